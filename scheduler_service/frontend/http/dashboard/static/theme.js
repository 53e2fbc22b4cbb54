// Light or dark: the system's wish, unless somebody chose. `onChange` is called when it changes.

const CHOICES = ["auto", "light", "dark"];
const KEY = "pagewire-theme";
const MAX_KNOWN = 20_000;

const system = matchMedia("(prefers-color-scheme: dark)");
const resolved = new Map(); // custom properties as they are in the theme of now
let dark = system.matches;

export function setUpTheme(button, onChange) {
  let choice = localStorage.getItem(KEY) ?? "auto";
  const next = () => CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
  const changed = () => {
    resolved.clear();
    dark = choice === "auto" ? system.matches : choice === "dark";
    onChange();
  };
  const show = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = `Theme: ${choice}`;
    button.title = `Change to ${next()}`;
    changed();
  };
  button.addEventListener("click", () => {
    choice = next();
    localStorage.setItem(KEY, choice);
    show();
  });
  system.addEventListener("change", changed);
  show();
}

// A custom property's colour as it is now, for canvases, which know no light-dark().
const probe = document.createElement("span");
export function colourOf(name) {
  if (!resolved.has(name)) {
    probe.hidden = true;
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

// A request's colour: neighbours in number are far apart in hue, and it stays the same for life.
const known = new Map();
export function colourOfRequest(number) {
  const key = dark ? -number : number;
  let colour = known.get(key);
  if (!colour) {
    const hue = (number * 137.508) % 360;
    const [lightness, chroma] = dark ? [0.66 + 0.08 * (number % 2), 0.125] : [0.6 + 0.1 * (number % 2), 0.135];
    colour = `oklch(${lightness} ${chroma} ${hue.toFixed(1)})`;
    if (known.size > MAX_KNOWN) known.clear();
    known.set(key, colour);
  }
  return colour;
}

// A colour as a pixel of an image: ABGR, as little-endian machines hold RGBA.
const pixels = new Map();
const dot = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
export function pixelOf(colour) {
  let pixel = pixels.get(colour);
  if (pixel === undefined) {
    dot.fillStyle = colour;
    dot.fillRect(0, 0, 1, 1);
    pixel = new Uint32Array(dot.getImageData(0, 0, 1, 1).data.buffer)[0];
    if (pixels.size > MAX_KNOWN) pixels.clear();
    pixels.set(colour, pixel);
  }
  return pixel;
}
