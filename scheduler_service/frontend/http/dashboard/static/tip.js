// A few words beside the pointer, or beside what has the focus.

import { $ } from "./dom.js";

export function showTip(x, y, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
  const top = y + 18 + height > innerHeight - 8 ? y - 12 - height : y + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}
