// One request: its numbers, its timeline as a bar, its events in words.

import { $, element, fillPairs, keyed, setText } from "./dom.js";
import { count, duration, short } from "./format.js";
import { colourOfRequest } from "./theme.js";
import { describe, phasesOf } from "./timeline.js";

const HINT = "Choose a request, or a block of the map.";

export class Detail {
  constructor(view) {
    this.view = view;
    this.number = null;
    this.body = $("detail-body");
  }

  show(number) {
    this.number = number;
    this.request = null;
    this.body.replaceChildren();
    this.draw();
    // On a narrow screen it is below the list, out of sight.
    this.body.querySelector(".track")?.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  draw() {
    if (this.number === null) {
      setText($("detail-title"), "Timeline");
      if (this.body.textContent !== HINT) this.body.replaceChildren(element("p", { class: "quiet" }, HINT));
      return;
    }
    this.request = this.view.request(this.number) ?? this.request;
    if (!this.request) {
      this.body.replaceChildren(element("p", { class: "quiet" }, "It is not among the requests that are listed."));
      return;
    }
    if (!this.body.querySelector(".track")) this.#make();
    this.#fill(this.request);
  }

  #make() {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = colourOfRequest(this.number);
    $("detail-title").replaceChildren(swatch, element("span", {}, this.request.id));
    this.numbers = element("dl", { class: "numbers" });
    this.track = element("div", { class: "track", role: "img" });
    this.phases = element("ul", { class: "legend phases" });
    this.events = element("ol", { class: "events", tabindex: "0", "aria-label": "Events" });
    this.body.replaceChildren(this.numbers, this.track, this.phases, this.events);
  }

  #fill(request) {
    const isOver = request.endedAt != null;
    const ageMs = ((isOver ? request.endedAt : this.view.uptime) - request.startedAt) * 1000;
    const phases = phasesOf(request.events, ageMs);
    fillPairs(this.numbers, numbersOf(request, ageMs));
    this.numbers.querySelector("dd").dataset.state = request.state;
    const spans = keyed(this.track, phases.map((phase, i) => `${i} ${phase.name}`), (key) => element("span", { class: key.split(" ")[1] }));
    spans.forEach((span, i) => {
      span.style.flex = `${Math.max(phases[i].ms, ageMs / 400)} 0 0`;
      span.title = `${phases[i].name} ${duration(phases[i].ms)}${phases[i].name === "decode" ? draftsOf(request) : ""}`;
    });
    const sums = new Map();
    for (const { name, ms } of phases) sums.set(name, (sums.get(name) ?? 0) + ms);
    const legend = keyed(this.phases, [...sums.keys()], (name) => element("li", { class: `phase ${name}` }, element("i"), name, element("b")));
    const lengthOf = (name) => `${duration(sums.get(name))}${name === "decode" ? draftsOf(request) : ""}`;
    legend.forEach((item) => setText(item.lastChild, lengthOf(item.dataset.key)));
    this.track.setAttribute("aria-label", [...sums.keys()].map((name) => `${name} ${lengthOf(name)}`).join(", "));
    const lines = keyed(this.events, request.events.map(([event, ms], i) => `${i} ${event} ${ms}`), () => element("li", {}, element("time"), element("span")));
    lines.forEach((line, i) => {
      setText(line.firstChild, duration(request.events[i][1]));
      setText(line.lastChild, describe(request.events[i], request));
    });
  }
}

// Appended to a decode phase's text; nothing for a request without drafts.
const draftsOf = ({ drafts, fromDrafts }) => (drafts ? `, ${count(fromDrafts)} of ${count(drafts)} drafts accepted` : "");

const FIRST_TOKEN = 6;

function numbersOf(request, ageMs) {
  const first = request.events.find(([event]) => event === FIRST_TOKEN)?.[1];
  const decodeMs = first == null ? 0 : ageMs - first;
  const perSequence = request.output / request.sequences;
  const pairs = [
    ["state", request.state],
    ["prompt tokens", count(request.prompt)],
    ["from cache", count(request.cached)],
    ["output tokens", `${count(request.output)}${request.maxTokens ? ` of ${count(request.maxTokens * request.sequences)}` : ""}`],
    ["first token", duration(first)],
    ["between tokens", perSequence > 1 && decodeMs > 0 ? duration(decodeMs / (perSequence - 1)) : "–"],
    ["tokens/s", decodeMs > 0 ? short((request.output / decodeMs) * 1000) : "–"],
    ["duration", duration(ageMs)],
  ];
  if (request.fromDrafts) pairs.push(["from drafts", count(request.fromDrafts)]);
  if (request.drafts) pairs.push(["drafts", count(request.drafts)]);
  if (request.group) pairs.push(["worker group", request.group]);
  if (request.sequences > 1) pairs.push(["sequences", count(request.sequences)]);
  if (request.priority) pairs.push(["priority", String(request.priority)]);
  if (request.tenant) pairs.push(["tenant", request.tenant]);
  if (request.error) pairs.push(["error", request.error]);
  return pairs;
}
