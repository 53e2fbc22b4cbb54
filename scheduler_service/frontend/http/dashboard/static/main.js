// The page: one view, fed by the stream, drawn once per frame at most.

import { Charts } from "./charts.js";
import { Detail } from "./detail.js";
import { $, setText } from "./dom.js";
import { duration } from "./format.js";
import { Groups } from "./groups.js";
import { Requests } from "./requests.js";
import { follow } from "./stream.js";
import { setUpTheme } from "./theme.js";
import { View } from "./view.js";

export const view = new View();
const charts = new Charts(view);
const groups = new Groups(view, choose);
const requests = new Requests(view, choose);
const detail = new Detail(view);
let isDue = false;

// Shows one request, by its number; null: none.
export function choose(number) {
  detail.show(number);
  requests.mark(number);
  groups.mark(number);
}

function draw() {
  isDue = false;
  const { engine = {} } = view.facts;
  setText($("deployment"), `${(engine.models ?? []).join(", ") || "no model"} · version ${engine.version ?? "?"} · core up ${duration(view.uptime * 1000)}`);
  charts.draw();
  groups.draw();
  requests.draw();
  detail.draw();
  view.touched.clear();
}

function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(draw);
}

function onMessage(message) {
  view.apply(message);
  $("main").hidden = !view.facts.engine;
  $("login").hidden = true;
  if (view.facts.engine) drawSoon();
}

function onState(state, why) {
  $("connection").dataset.state = state;
  setText($("connection-text"), { live: "live", lost: "connection lost", refused: "key needed" }[state]);
  $("banner").hidden = state !== "lost";
  const shown = view.facts.engine ? "What is shown is the last that was known; trying again." : "Trying again.";
  if (state === "lost") setText($("banner"), `${why[0].toUpperCase()}${why.slice(1)}. ${shown}`);
}

function askKey(why) {
  $("main").hidden = true;
  $("login").hidden = false;
  setText($("login").querySelector("p"), `${why && `${why}. `}An operator’s key stays in this tab, and is sent to this server alone.`);
  $("key").focus();
  return new Promise((resolve) => {
    $("login").onsubmit = (event) => {
      event.preventDefault();
      resolve($("key").value.trim());
      $("key").value = "";
    };
  });
}

setUpTheme($("theme"), () => {
  if (!view.facts.engine) return;
  groups.redraw();
  requests.redraw();
  detail.show(detail.number);
  drawSoon();
});
addEventListener("keydown", (event) => event.key === "Escape" && choose(null));
follow({ onMessage, onState, askKey });
