// Live requests, and below them those that ended last.

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
    const over = Object.keys(ended).filter((number) => !requests[number]).sort((a, b) => ended[b].endedAt - ended[a].endedAt);
    const numbers = [...live, ...over].slice(0, MAX_ROWS);
    for (const row of keyed(this.body, numbers, (number) => this.#make(number))) {
      const number = row.dataset.key;
      this.#fill(row, number, requests[number] ?? ended[number], !requests[number]);
    }
    $("requests-none").hidden = numbers.length > 0;
    const unlisted = engine.unlisted ?? 0;
    setText($("requests-count"), `${count(live.length + unlisted)} live, ${plural(engine.finished ?? 0, "request")} ended, ${plural(engine.preemptions ?? 0, "preemption")}`);
  }

  mark(number) {
    this.chosen = number;
    this.draw();
  }

  redraw() {
    for (const swatch of this.body.querySelectorAll(".swatch")) delete swatch.dataset.done;
    this.draw();
  }

  #make(number) {
    const pick = element("button", { class: "pick", type: "button" }, element("span", { class: "swatch" }), element("span"));
    pick.addEventListener("click", () => this.choose(this.chosen === Number(number) ? null : Number(number)));
    const cell = () => element("td", { class: "number" });
    return element("tr", {}, element("th", { scope: "row" }, pick), element("td", { class: "state-name" }), cell(), cell(), cell(), cell());
  }

  #fill(row, number, request, isOver) {
    const [name, state, prompt, output, blocks, age] = row.cells;
    const pick = name.firstChild;
    setText(pick.lastChild, request.id);
    pick.title = request.id;
    const isChosen = this.chosen === Number(number);
    pick.setAttribute("aria-pressed", isChosen);
    row.toggleAttribute("data-chosen", isChosen);
    row.classList.toggle("ended", isOver);
    const swatch = pick.firstChild;
    const wanted = isOver || !request.group ? "" : "yes";
    if (swatch.dataset.done !== `${wanted}`) {
      swatch.style.background = wanted ? colourOfRequest(Number(number)) : "";
      swatch.dataset.done = `${wanted}`;
    }
    setText(state, request.state);
    state.dataset.state = request.state;
    const isPrefilling = request.state === "prefilling";
    setText(prompt, isPrefilling ? `${count(request.computed)} / ${count(request.prompt)}` : count(request.prompt));
    setText(output, count(request.output));
    setText(blocks, isOver ? "" : count(this.#numBlocks(number)));
    setText(age, duration(((isOver ? request.endedAt : this.view.uptime) - request.startedAt) * 1000));
  }

  #numBlocks(number) {
    const tables = ["gpu", "cpu"].flatMap((memory) => this.view.tables.get(`${number}/${memory}`) ?? []);
    return tables.length === 1 ? tables[0].length : new Set(tables.flat()).size;
  }
}

const ORDER = ["decoding", "prefilling", "swapped", "preempted", "recovering", "queued"];
const order = (request) => ORDER.indexOf(request.state);
