// A memory and what is to be said of it: its picture, its sums, and whose the block under the
// pointer is.
//
// Only cells that changed are painted again; all of them when the size, the theme or the chosen
// request is another.

import { CACHED, Cells } from "./cells.js";
import { element, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const MAX_HEIGHT = 300;
const MAX_HEIGHT_OF_MANY = 130;

export class BlockMap {
  // `key`: "group/gpu"; `choose(number)` is called with the request of a block.
  constructor(view, key, title, choose) {
    this.view = view;
    this.key = key;
    this.title = title;
    this.choose = choose;
    this.chosen = null;
    this.focused = 0;
    this.width = 0;
    this.cells = new Cells();
    this.canvas = this.cells.canvas;
    this.cursor = element("div", { class: "cursor", hidden: true });
    this.map = element(
      "div",
      { class: "map", tabindex: "0", role: "application", "aria-roledescription": "block map" },
      this.canvas,
      this.cursor,
    );
    this.label = element("span");
    this.spoken = element("p", { class: "visually-hidden", "aria-live": "polite" });
    const heading = element("div", { class: "map-title" }, element("span", {}, title), this.label);
    this.root = element("div", {}, heading, this.map, this.spoken);
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
    if (!this.width) return;
    const touched = ["owners", "references"].map((name) => this.view.touched.get(`${this.key}/${name}`));
    const maxHeight = this.map.closest("[data-many]") ? MAX_HEIGHT_OF_MANY : MAX_HEIGHT;
    if (this.cells.layOut(this.width, maxHeight, this.owners.length)) {
      everything = true;
      Object.assign(this.map.dataset, { cell: this.cells.cell, perRow: this.cells.perRow });
    }
    const isLive = this.chosen !== null && this.view.facts.requests?.[this.chosen];
    if (!isLive !== !this.own) everything = true; // it has ended: nothing is dimmed any more
    this.own = isLive ? this.#blocksOf(this.chosen) : null;
    const memory = { owners: this.owners, references: this.references, own: this.own };
    if (everything || this.view.touched.has("*") || touched.includes("all")) this.cells.paintAll(memory);
    else for (const runs of touched) if (runs) this.cells.paint(memory, runs);
    this.#updateLabel();
  }

  // Rings one request's blocks by dimming all others; null: none.
  mark(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    this.draw(true);
  }

  // By block whether the request has it in this memory; another worker group's have the same numbers.
  #blocksOf(number) {
    const own = new Uint8Array(this.owners.length);
    if (this.view.request(number)?.group_id !== this.#group) return own;
    for (const table of this.view.tables.get(`${number}/${this.#memory}`) ?? []) for (const block of table) own[block] = 1;
    return own;
  }

  get #group() {
    return this.key.slice(0, this.key.lastIndexOf("/"));
  }

  get #memory() {
    return this.key.slice(this.key.lastIndexOf("/") + 1);
  }

  #updateLabel() {
    let [used, shared, cached] = [0, 0, 0];
    const { owners, references } = this;
    for (let block = 0; block < owners.length; block++) {
      if (owners[block] > 0) used += 1;
      else if (owners[block] === CACHED) cached += 1;
      if (references[block] > 1) shared += 1;
    }
    const text = `${count(used)} of ${plural(owners.length, "block")} in use, ${count(shared)} shared, ${count(cached)} cached`;
    setText(this.label, text);
    this.map.setAttribute("aria-label", `${this.title}: ${text}. Arrow keys go from block to block, Enter shows its request.`);
  }

  // What is to be said of one block.
  describe(block) {
    const owner = this.owners[block];
    if (!(owner > 0)) return `Block ${count(block)}: free, ${owner === CACHED ? "its contents still cached" : "empty"}`;
    const holders = this.#holders(block);
    const { block_size: blockSize, cache_groups: caches = [] } = this.view.facts.groups?.[this.#group] ?? {};
    const first = holders[0] ?? { number: owner };
    // Only of such a table the blocks are all there, one after the other.
    const isGrowing = caches.length < 2 && caches.every(([name]) => name.startsWith("growing"));
    const place = first.index == null || !isGrowing ? "" : `, tokens ${count(first.index * blockSize)} to ${count((first.index + 1) * blockSize - 1)}`;
    const name = (number) => this.view.request(number)?.request_id ?? `request ${number}`;
    const others = holders.length > 1 ? `, shared by ${count(this.references[block])} sequences: ${names(holders.map((h) => name(h.number)))}` : this.references[block] > 1 ? `, shared by ${this.references[block]} of its sequences` : "";
    return `Block ${count(block)}: ${name(owner)}${place}${others}`;
  }

  #holders(block) {
    const found = [];
    for (const [key, tables] of this.view.tables) {
      const [number, memory] = key.split("/");
      if (memory !== this.#memory) continue;
      if (this.view.request(number)?.group_id !== this.#group) continue;
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
      const { cell, perRow, total } = this.cells;
      const box = this.canvas.getBoundingClientRect();
      const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((v) => Math.floor(v / cell));
      const block = row * perRow + column;
      return column >= 0 && column < perRow && block >= 0 && block < total ? block : null;
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
    // The width is a parameter: reading it would make the browser lay the page out.
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw();
    }).observe(this.map);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.cells.perRow, ArrowDown: this.cells.perRow };
    if (event.key in steps) this.#goTo(this.focused + steps[event.key]);
    else if (event.key === "Home") this.#goTo(0);
    else if (event.key === "End") this.#goTo(this.cells.total - 1);
    else if (event.key === "Enter" || event.key === " ") this.#chooseAt(this.focused);
    else return;
    event.preventDefault();
  }

  #goTo(block) {
    this.focused = Math.min(Math.max(block, 0), this.cells.total - 1);
    this.#point(this.focused);
    const box = this.cursor.getBoundingClientRect();
    const text = this.describe(this.focused);
    showTip(box.right, box.bottom, text);
    setText(this.spoken, text);
  }

  #point(block) {
    this.cursor.hidden = block === null;
    if (block === null) return;
    const size = Math.max(this.cells.cell, 6);
    this.cursor.style.left = `${(block % this.cells.perRow) * this.cells.cell - 2}px`;
    this.cursor.style.top = `${Math.floor(block / this.cells.perRow) * this.cells.cell - 2}px`;
    this.cursor.style.width = this.cursor.style.height = `${size + 2}px`;
  }

  #chooseAt(block) {
    const owner = this.owners[block];
    this.choose(owner > 0 ? owner : null);
  }
}

const names = (all) => (all.length <= 4 ? all.join(", ") : `${all.slice(0, 3).join(", ")} and ${all.length - 3} more`);
