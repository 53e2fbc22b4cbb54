// The KV memory: slots in blocks, on a "device" and a "host".

import { PlanError } from "./errors.js";

export class Cache {
  constructor(blockSize, numDeviceBlocks, numHostBlocks) {
    this.blockSize = blockSize;
    this.numDeviceBlocks = numDeviceBlocks;
    this.device = new Uint32Array(numDeviceBlocks * blockSize);
    this.host = new Uint32Array(numHostBlocks * blockSize);
  }

  /** The slot of a position. */
  slot(blockTable, position) {
    const block = blockTable[Math.floor(position / this.blockSize)];
    return block * this.blockSize + (position % this.blockSize);
  }

  /** Swap out, swap in and copy, in this order. */
  move({ swapOut, swapIn, copy }) {
    this.#check("swap_out", swapOut, this.device, this.host);
    this.#check("swap_in", swapIn, this.host, this.device);
    this.#check("copy", copy, this.device, this.device);
    this.#move(swapOut, this.device, this.host);
    this.#move(swapIn, this.host, this.device);
    this.#move(copy, this.device, this.device);
  }

  #check(field, pairs, from, to) {
    const limits = [from.length / this.blockSize, to.length / this.blockSize];
    for (const pair of pairs) {
      if (pair.some((block, side) => block < 0 || block >= limits[side])) {
        throw new PlanError(field, `expected blocks below ${limits}, got ${pair}`);
      }
    }
  }

  #move(pairs, from, to) {
    const size = this.blockSize;
    // All sources are read before any target is written: they may overlap.
    const contents = pairs.map(([source]) => from.slice(source * size, (source + 1) * size));
    pairs.forEach(([, target], index) => to.set(contents[index], target * size));
  }
}
