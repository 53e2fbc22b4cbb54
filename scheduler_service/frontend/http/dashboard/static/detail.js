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
    $("detail-title").replaceChildren(swatch, element("span", {}, this.request.request_id));
    this.numbers = element("dl", { class: "numbers" });
    this.track = element("div", { class: "track", role: "img" });
    this.phases = element("ul", { class: "legend phases" });
    this.events = element("ol", { class: "events", tabindex: "0", "aria-label": "Events" });
    this.body.replaceChildren(this.numbers, this.track, this.phases, this.events);
  }

  #fill(request) {
    const isOver = request.ended_at_s != null;
    const ageMs = ((isOver ? request.ended_at_s : this.view.uptime) - request.accepted_at_s) * 1000;
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
const draftsOf = ({ num_drafts: drafts, num_accepted_drafts: accepted }) => (drafts ? `, ${count(accepted)} of ${count(drafts)} drafts accepted` : "");

const FIRST_TOKEN = 6;

function numbersOf(request, ageMs) {
  const first = request.events.find(([event]) => event === FIRST_TOKEN)?.[1];
  const decodeMs = first == null ? 0 : ageMs - first;
  const perSequence = request.num_output_tokens / request.num_sequences;
  const pairs = [
    ["state", request.state],
    ["prompt tokens", count(request.num_prompt_tokens)],
    ["from cache", count(request.num_cached_tokens)],
    ["output tokens", `${count(request.num_output_tokens)}${request.max_tokens ? ` of ${count(request.max_tokens * request.num_sequences)}` : ""}`],
    ["first token", duration(first)],
    ["between tokens", perSequence > 1 && decodeMs > 0 ? duration(decodeMs / (perSequence - 1)) : "–"],
    ["tokens/s", decodeMs > 0 ? short((request.num_output_tokens / decodeMs) * 1000) : "–"],
    ["duration", duration(ageMs)],
  ];
  if (request.num_accepted_drafts) pairs.push(["from drafts", count(request.num_accepted_drafts)]);
  if (request.num_drafts) pairs.push(["drafts", count(request.num_drafts)]);
  if (request.lora) pairs.push(["adapter", request.lora]);
  if (request.group_id) pairs.push(["worker group", request.group_id]);
  if (request.num_sequences > 1) pairs.push(["sequences", count(request.num_sequences)]);
  if (request.priority) pairs.push(["priority", String(request.priority)]);
  if (request.tenant) pairs.push(["tenant", request.tenant]);
  if (request.error_reason) pairs.push(["error", request.error_reason]);
  return pairs;
}
