// The picture of one memory: a cell per KV block, painted on a canvas.
//
// Large cells are drawn, with a digit where several share them. From some thousands of blocks on
// cells are a few pixels wide, and their pixels are set one by one: at 100,000 blocks that is many
// times faster than drawing rectangles.

import { element } from "./dom.js";
import { colourOf, colourOfRequest, pixelOf } from "./theme.js";

const MAX_CELL = 18;
const DRAWN_FROM = 8; // pixels of a cell
const DIMMED = 0.18;
export const CACHED = -1;

export class Cells {
  constructor() {
    this.canvas = element("canvas");
    this.context = this.canvas.getContext("2d");
    this.width = this.total = this.scale = this.cell = this.perRow = 0;
  }

  // Makes room for `total` cells in `width` pixels, as high as said at most if they can be as small;
  // whether anything is another than before.
  layOut(width, maxHeight, total) {
    const layout = [width, maxHeight, total, devicePixelRatio];
    if (layout.every((value, i) => value === this.layout?.[i])) return false;
    this.layout = layout;
    [this.width, this.total, this.scale] = [width, total, devicePixelRatio];
    let cell = MAX_CELL;
    while (cell > 2 && Math.ceil(total / Math.floor(width / cell)) * cell > maxHeight) cell -= 1;
    this.cell = cell;
    this.gap = cell >= 8 ? 2 : cell >= 4 ? 1 : 0;
    this.perRow = Math.max(1, Math.floor(width / cell));
    const height = Math.ceil(total / this.perRow) * cell;
    this.canvas.width = Math.round(width * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.image = null;
    return true;
  }

  // `memory`: {owners, references}, and `own`, what is not dimmed by block; null: all.
  paintAll(memory) {
    this.colours = { empty: colourOf("--cell-empty"), cached: colourOf("--cell-cached"), surface: colourOf("--surface"), ink: colourOf("--ink") };
    this.context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    this.context.clearRect(0, 0, this.width, this.canvas.height);
    if (this.cell < DRAWN_FROM) {
      this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.paint(memory, [0, this.total]);
  }

  // `runs`: [start, count, start, count, ...] of the blocks that changed.
  paint(memory, runs) {
    if (!this.colours) return;
    for (let i = 0; i < runs.length; i += 2) {
      if (this.image) this.#set(memory, runs[i], runs[i] + runs[i + 1]);
      else this.#draw(memory, runs[i], runs[i] + runs[i + 1]);
    }
    if (this.image && runs.length) this.#show(runs);
  }

  #colour(owner) {
    return owner > 0 ? colourOfRequest(owner) : owner === CACHED ? this.colours.cached : this.colours.empty;
  }

  #draw({ owners, references, own }, start, end) {
    const { context, cell, gap, perRow } = this;
    for (let block = start; block < end; block++) {
      const x = (block % perRow) * cell;
      const y = Math.floor(block / perRow) * cell;
      context.clearRect(x, y, cell, cell);
      context.globalAlpha = owners[block] && own && !own[block] ? DIMMED : 1;
      context.fillStyle = this.#colour(owners[block]);
      context.fillRect(x, y, cell - gap, cell - gap);
      if (references[block] > 1) this.#mark(x, y, cell - gap, references[block]);
    }
    context.globalAlpha = 1;
  }

  // How many share it, where there is room for a digit; else diagonal lines.
  #mark(x, y, size, number) {
    const { context } = this;
    context.fillStyle = this.colours.surface;
    if (size >= 13 && number < 100) {
      const inset = 2;
      context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
      context.fillStyle = this.colours.ink;
      context.font = `600 ${number < 10 ? 10 : 8}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(number), x + size / 2, y + size / 2 + 0.5);
      return;
    }
    context.strokeStyle = this.colours.surface;
    context.lineWidth = Math.max(0.7, size / 7);
    context.beginPath();
    for (const offset of [0.5, 1, 1.5]) {
      const reach = size * offset;
      context.moveTo(x + Math.max(0, reach - size), y + Math.min(size, reach));
      context.lineTo(x + Math.min(size, reach), y + Math.max(0, reach - size));
    }
    context.stroke();
  }

  #set({ owners, references, own }, start, end) {
    const { pixels, perRow, scale } = this;
    const width = this.canvas.width;
    const side = (this.cell - this.gap) * scale;
    const period = Math.max(2, Math.min(Math.round(side), Math.round(4 * scale)));
    const surface = pixelOf(this.colours.surface);
    let [known, colour] = [null, 0];
    for (let block = start; block < end; block++) {
      if (owners[block] !== known) {
        known = owners[block];
        colour = pixelOf(this.#colour(known));
      }
      const pixel = known && own && !own[block] ? dimmed(colour) : colour;
      const isShared = references[block] > 1;
      const [left, top] = [(block % perRow) * this.cell * scale, Math.floor(block / perRow) * this.cell * scale];
      const [right, bottom] = [Math.round(left + side), Math.round(top + side)];
      for (let y = Math.round(top); y < bottom; y++) {
        for (let x = Math.round(left); x < right; x++) {
          pixels[y * width + x] = isShared && (x + y) % period === 0 ? surface : pixel;
        }
      }
    }
  }

  // Brings the rows of these runs to the screen.
  #show(runs) {
    let [first, last] = [this.total, 0];
    for (let i = 0; i < runs.length; i += 2) {
      first = Math.min(first, runs[i]);
      last = Math.max(last, runs[i] + runs[i + 1]);
    }
    const [top, bottom] = [Math.floor(first / this.perRow), Math.ceil(last / this.perRow)].map((row) => Math.round(row * this.cell * this.scale));
    this.context.putImageData(this.image, 0, 0, 0, top, this.canvas.width, bottom - top);
  }
}

// A pixel (ABGR) whose surface shines through.
const dimmed = (pixel) => ((pixel & 0xffffff) | (Math.round(DIMMED * 255) << 24)) >>> 0;
