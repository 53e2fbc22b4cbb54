// Live requests, and below them those that ended last. A click anywhere in a row chooses its
// request; keyboards reach it by the button in its first cell, whose click the row hears as well.

import { $, element, keyed, setText } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { colourOfRequest } from "./theme.js";

const MAX_ROWS = 200;

export class Requests {
  constructor(view, choose) {
    this.view = view;
    this.choose = choose;
    this.chosen = null;
    this.body = $("requests").tBodies[0];
  }

  draw() {
    const { requests = {}, ended = {}, engine = {} } = this.view.facts;
    const live = Object.keys(requests).sort((a, b) => order(requests[a]) - order(requests[b]) || a - b);
    const over = Object.keys(ended).filter((number) => !requests[number]).sort((a, b) => ended[b].ended_at_s - ended[a].ended_at_s);
    const numbers = [...live, ...over].slice(0, MAX_ROWS);
    for (const row of keyed(this.body, numbers, (number) => this.#make(number))) {
      const number = row.dataset.key;
      this.#fill(row, number, requests[number] ?? ended[number], !requests[number]);
    }
    $("requests-none").hidden = numbers.length > 0;
    const unlisted = engine.num_unlisted_requests ?? 0;
    const totals = `${plural(engine.num_finished ?? 0, "request")} ended, ${plural(engine.num_preemptions ?? 0, "preemption")}, ${plural(engine.num_fetched_blocks ?? 0, "block")} moved`;
    setText($("requests-count"), `${count(live.length + unlisted)} live; since the core’s start ${duration(this.view.uptime * 1000)} ago: ${totals}`);
  }

  mark(number) {
    this.chosen = number;
    this.draw();
  }

  redraw() {
    for (const row of this.body.rows) row.querySelector(".swatch").style.background = colourOfRequest(Number(row.dataset.key));
    this.draw();
  }

  #make(number) {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = colourOfRequest(Number(number));
    const pick = element("button", { class: "pick", type: "button" }, swatch, element("span"));
    const cell = () => element("td", { class: "number" });
    const row = element("tr", {}, element("th", { scope: "row" }, pick), element("td"), cell(), cell(), cell(), cell());
    row.addEventListener("click", () => this.choose(this.chosen === Number(number) ? null : Number(number)));
    return row;
  }

  #fill(row, number, request, isOver) {
    const [name, state, prompt, output, blocks, time] = row.cells;
    const pick = name.firstChild;
    setText(pick.lastChild, request.request_id);
    pick.title = request.request_id;
    const isChosen = this.chosen === Number(number);
    pick.setAttribute("aria-pressed", isChosen);
    row.toggleAttribute("data-chosen", isChosen);
    row.classList.toggle("ended", isOver);
    setText(state, request.state);
    state.dataset.state = request.state;
    const isPrefilling = request.state === "prefilling";
    setText(prompt, isPrefilling ? `${count(request.num_computed_tokens)} / ${count(request.num_prompt_tokens)}` : count(request.num_prompt_tokens));
    setText(output, count(request.num_output_tokens));
    setText(blocks, isOver ? "" : count(this.#numBlocks(number)));
    setText(time, duration(((isOver ? request.ended_at_s : this.view.uptime) - request.accepted_at_s) * 1000));
  }

  #numBlocks(number) {
    const tables = ["gpu", "cpu"].map((memory) => this.view.tables.get(`${number}/${memory}`) ?? []);
    const sizes = tables.map((same) => (same.length === 1 ? same[0].length : new Set(same.flat()).size));
    return sizes[0] + sizes[1]; // blocks of both memories have the same numbers
  }
}

const ORDER = ["decoding", "prefilling", "swapped", "preempted", "recovering", "queued"];
const order = (request) => ORDER.indexOf(request.state);
