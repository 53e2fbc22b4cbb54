// A memory, one cell per KV block: coloured by request, shared ones hatched, cached ones dim.
//
// Only cells that changed are drawn again; all of them when the size, the theme or the chosen
// request is another. At 100,000 blocks a cell is two or three pixels wide.

import { element, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { colourOf, colourOfRequest } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const CACHED = -1;
const MAX_CELL = 18;
const MAX_HEIGHT = 300;

export class BlockMap {
  // `key`: "group/gpu"; `choose(number)` is called with the request of a block.
  constructor(view, key, title, choose) {
    this.view = view;
    this.key = key;
    this.title = title;
    this.choose = choose;
    this.chosen = null;
    this.focused = 0;
    this.canvas = element("canvas");
    this.cursor = element("div", { class: "cursor", hidden: true });
    this.map = element(
      "div",
      { class: "map", tabindex: "0", role: "application", "aria-roledescription": "block map" },
      this.canvas,
      this.cursor,
    );
    this.told = element("span");
    this.spoken = element("p", { class: "visually-hidden", "aria-live": "polite" });
    const heading = element("div", { class: "map-title" }, element("span", {}, title), this.told);
    this.root = element("div", {}, heading, this.map, this.spoken);
    this.context = this.canvas.getContext("2d");
    this.#listen();
  }

  get owners() {
    return this.view.columns.get(`${this.key}/owners`) ?? new Int32Array();
  }

  get references() {
    return this.view.columns.get(`${this.key}/references`) ?? new Int32Array();
  }

  // Draws what changed since the last time, or everything.
  draw(everything = false) {
    const touched = ["owners", "references"].map((name) => this.view.touched.get(`${this.key}/${name}`));
    const layout = this.#layOut();
    const isLive = this.chosen !== null && this.view.facts.requests?.[this.chosen];
    if (!isLive !== !this.own) everything = true; // it has ended: nothing is dimmed any more
    this.own = isLive ? this.#blocksOf(this.chosen) : null;
    if (everything || layout || this.view.touched.has("*") || touched.includes("all")) this.#paintAll();
    else for (const runs of touched) for (let i = 0; runs && i < runs.length; i += 2) this.#paintRun(runs[i], runs[i + 1]);
    this.#tell();
  }

  // Rings one request's blocks by dimming all others; null: none.
  mark(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    this.draw(true);
  }

  #layOut() {
    const width = Math.floor(this.map.clientWidth);
    const total = this.owners.length;
    if (!width || (width === this.width && total === this.total && devicePixelRatio === this.scale)) return false;
    [this.width, this.total, this.scale] = [width, total, devicePixelRatio];
    let cell = MAX_CELL;
    while (cell > 2 && Math.ceil(total / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell -= 1;
    this.cell = cell;
    this.perRow = Math.max(1, Math.floor(width / cell));
    Object.assign(this.map.dataset, { cell, perRow: this.perRow });
    const height = Math.ceil(total / this.perRow) * cell;
    this.canvas.width = Math.round(width * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    return true;
  }

  #paintAll() {
    this.colours = { empty: colourOf("--cell-empty"), cached: colourOf("--cell-cached"), surface: colourOf("--surface") };
    this.context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    this.context.clearRect(0, 0, this.width, this.canvas.height);
    this.#paintRun(0, this.total);
  }

  // A request's blocks in this memory; another worker group's have the same numbers.
  #blocksOf(number) {
    const isHere = this.view.request(number)?.group === this.key.slice(0, this.key.lastIndexOf("/"));
    return new Set(isHere ? (this.view.tables.get(`${number}/${this.#memory}`) ?? []).flat() : []);
  }

  get #memory() {
    return this.key.slice(this.key.lastIndexOf("/") + 1);
  }

  #paintRun(start, length) {
    const { context, cell, perRow, owners, references } = this;
    if (!this.colours) return;
    const gap = cell >= 8 ? 2 : cell >= 4 ? 1 : 0;
    for (let block = start; block < start + length; block++) {
      const x = (block % perRow) * cell;
      const y = Math.floor(block / perRow) * cell;
      const owner = owners[block];
      if (gap) context.clearRect(x, y, cell, cell);
      context.globalAlpha = owner > 0 && this.own && !this.own.has(block) ? 0.18 : 1;
      context.fillStyle = owner > 0 ? colourOfRequest(owner) : owner === CACHED ? this.colours.cached : this.colours.empty;
      context.fillRect(x, y, cell - gap, cell - gap);
      if (references[block] > 1) this.#hatch(x, y, cell - gap, references[block]);
    }
    context.globalAlpha = 1;
  }

  // Diagonal lines for what several have; with how many, where there is room for a digit.
  #hatch(x, y, size, number) {
    const { context } = this;
    context.fillStyle = this.colours.surface;
    if (size >= 13 && number < 100) {
      const inset = 2;
      context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
      context.fillStyle = colourOf("--ink");
      context.font = `600 ${number < 10 ? 10 : 8}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(number), x + size / 2, y + size / 2 + 0.5);
      return;
    }
    context.strokeStyle = this.colours.surface;
    context.lineWidth = Math.max(0.7, size / 7);
    context.beginPath();
    for (const offset of size >= 6 ? [0.5, 1, 1.5] : [1]) {
      const reach = size * offset;
      context.moveTo(x + Math.max(0, reach - size), y + Math.min(size, reach));
      context.lineTo(x + Math.min(size, reach), y + Math.max(0, reach - size));
    }
    context.stroke();
  }

  #tell() {
    let [used, shared, cached] = [0, 0, 0];
    const { owners, references } = this;
    for (let block = 0; block < owners.length; block++) {
      if (owners[block] > 0) used += 1;
      else if (owners[block] === CACHED) cached += 1;
      if (references[block] > 1) shared += 1;
    }
    const text = `${count(used)} of ${plural(owners.length, "block")} in use, ${count(shared)} shared, ${count(cached)} cached`;
    setText(this.told, text);
    this.map.setAttribute("aria-label", `${this.title}: ${text}. Arrow keys go from block to block, Enter shows its request.`);
  }

  // What is to be said of one block.
  describe(block) {
    const owner = this.owners[block];
    if (!(owner > 0)) return `Block ${count(block)}: free, ${owner === CACHED ? "its contents still cached" : "empty"}`;
    const holders = this.#holders(block);
    const { blockSize } = this.view.facts.groups?.[this.key.slice(0, this.key.lastIndexOf("/"))] ?? {};
    const first = holders[0] ?? { number: owner };
    const place = first.index == null ? "" : `, tokens ${count(first.index * blockSize)} to ${count((first.index + 1) * blockSize - 1)}`;
    const name = (number) => this.view.request(number)?.id ?? `request ${number}`;
    const others = holders.length > 1 ? `, shared by ${count(this.references[block])} sequences: ${names(holders.map((h) => name(h.number)))}` : this.references[block] > 1 ? `, shared by ${this.references[block]} of its sequences` : "";
    return `Block ${count(block)}: ${name(owner)}${place}${others}`;
  }

  #holders(block) {
    const found = [];
    for (const [key, tables] of this.view.tables) {
      const [number, memory] = key.split("/");
      if (memory !== this.#memory) continue;
      if (this.view.request(number)?.group !== this.key.slice(0, this.key.lastIndexOf("/"))) continue;
      for (const table of tables) {
        const index = table.indexOf(block);
        if (index >= 0) {
          found.push({ number: Number(number), index });
          break;
        }
      }
    }
    return found;
  }

  #listen() {
    const blockAt = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((v) => Math.floor(v / this.cell));
      const block = row * this.perRow + column;
      return column >= 0 && column < this.perRow && block >= 0 && block < this.total ? block : null;
    };
    const show = (event) => {
      const block = blockAt(event);
      this.#point(block);
      if (block === null) hideTip();
      else showTip(event.clientX, event.clientY, this.describe(block));
      return block;
    };
    this.map.addEventListener("pointermove", show);
    this.map.addEventListener("pointerleave", () => {
      this.#point(null);
      hideTip();
    });
    this.map.addEventListener("click", (event) => {
      const block = show(event);
      if (block !== null) this.#chooseAt(block);
    });
    this.map.addEventListener("focus", () => this.map.matches(":focus-visible") && this.#goTo(this.focused));
    this.map.addEventListener("blur", () => {
      this.#point(null);
      hideTip();
    });
    this.map.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.perRow, ArrowDown: this.perRow };
    if (event.key in steps) this.#goTo(this.focused + steps[event.key]);
    else if (event.key === "Home") this.#goTo(0);
    else if (event.key === "End") this.#goTo(this.total - 1);
    else if (event.key === "Enter" || event.key === " ") this.#chooseAt(this.focused);
    else return;
    event.preventDefault();
  }

  #goTo(block) {
    this.focused = Math.min(Math.max(block, 0), this.total - 1);
    this.#point(this.focused);
    const box = this.cursor.getBoundingClientRect();
    const text = this.describe(this.focused);
    showTip(box.right, box.bottom, text);
    setText(this.spoken, text);
  }

  #point(block) {
    this.cursor.hidden = block === null;
    if (block === null) return;
    const size = Math.max(this.cell, 6);
    this.cursor.style.left = `${(block % this.perRow) * this.cell - 2}px`;
    this.cursor.style.top = `${Math.floor(block / this.perRow) * this.cell - 2}px`;
    this.cursor.style.width = this.cursor.style.height = `${size + 2}px`;
  }

  #chooseAt(block) {
    const owner = this.owners[block];
    this.choose(owner > 0 ? owner : null);
  }
}

const names = (all) => (all.length <= 4 ? all.join(", ") : `${all.slice(0, 3).join(", ")} and ${all.length - 3} more`);
