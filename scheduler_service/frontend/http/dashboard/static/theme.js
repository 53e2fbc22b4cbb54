// Light or dark: the system's wish, unless somebody chose. `onChange` is called when it changes.

const CHOICES = ["auto", "light", "dark"];
const KEY = "pagewire-theme";

export function setUpTheme(button, onChange) {
  let choice = localStorage.getItem(KEY) ?? "auto";
  const show = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
    button.setAttribute("aria-label", `Theme: ${choice}. Change`);
    onChange();
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(KEY, choice);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  show();
}

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// A custom property's colour as it is now, for canvases, which know no light-dark().
const probe = document.createElement("span");
export function colourOf(name) {
  probe.hidden = true;
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

// A request's colour: neighbours in number are far apart in hue, and it stays the same for life.
const known = new Map();
export function colourOfRequest(number) {
  const key = isDark() ? -number : number;
  let colour = known.get(key);
  if (!colour) {
    const hue = (number * 137.508) % 360;
    const [lightness, chroma] = isDark() ? [0.66 + 0.08 * (number % 2), 0.125] : [0.6 + 0.1 * (number % 2), 0.135];
    colour = `oklch(${lightness} ${chroma} ${hue.toFixed(1)})`;
    if (known.size > 20_000) known.clear();
    known.set(key, colour);
  }
  return colour;
}
