// Columns of integers: little-endian int32, one after the other.

import { PlanError } from "./errors.js";

/** The integers of a column; a matrix of `width` columns where that is more than one. */
export function column(bytes, field, width = 1) {
  if (bytes.length % (4 * width) !== 0) {
    throw new PlanError(field, `expected a multiple of ${4 * width} bytes, got ${bytes.length}`);
  }
  const values = [];
  for (let at = 0; at < bytes.length; at += 4) values.push(bytes.readInt32LE(at));
  if (width === 1) return values;
  return Array.from({ length: values.length / width }, (_, row) =>
    values.slice(row * width, (row + 1) * width),
  );
}

/** The column of some integers. */
export function pack(values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, index) => bytes.writeInt32LE(value, 4 * index));
  return bytes;
}

/** The column of some numbers, as little-endian float32. */
export function packFloats(values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, index) => bytes.writeFloatLE(value, 4 * index));
  return bytes;
}
