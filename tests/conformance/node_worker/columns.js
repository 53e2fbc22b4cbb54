// Columns of numbers, as the .proto files declare them: `(pagewire.v1.column)` says what the bytes
// of a field hold, so no list of columns is repeated here.

import { messageType } from "./contract.js";
import { PlanError } from "./errors.js";

const ELEMENTS = {
  COLUMN_ELEMENT_INT32: { size: 4, read: "readInt32LE", write: "writeInt32LE" },
  COLUMN_ELEMENT_FLOAT32: { size: 4, read: "readFloatLE", write: "writeFloatLE" },
  COLUMN_ELEMENT_UINT8: { size: 1, read: "readUInt8", write: "writeUInt8" },
};
const declared = new Map();

/** The columns of a message type: name, element, width, and whether rows have an entry each. */
function columnsOf(typeName) {
  if (!declared.has(typeName)) {
    const columns = messageType(typeName).fieldsArray.flatMap(({ name, options }) => {
      const element = ELEMENTS[options?.["(column).element"]];
      if (!element) return [];
      const width = options["(column).width"] ?? 1;
      const ofRows = options["(column).entries"] === "COLUMN_ENTRIES_ROWS";
      return [{ name, element, width, ofRows, absent: options["(column).absent"] ?? 0 }];
    });
    declared.set(typeName, columns);
  }
  return declared.get(typeName);
}

function readColumn({ name, element, width }, bytes, path) {
  const size = element.size * width;
  if (bytes.length % size !== 0) {
    throw new PlanError(path + name, `expected a multiple of ${size} bytes, got ${bytes.length}`);
  }
  const values = [];
  for (let at = 0; at < bytes.length; at += element.size) values.push(bytes[element.read](at));
  if (width === 1) return values;
  return Array.from({ length: values.length / width }, (_, row) =>
    values.slice(row * width, (row + 1) * width),
  );
}

/** A message's columns by name: numbers, or entries of several. `numRows` fills empty columns of
 *  rows. `path` precedes names in errors. */
export function readColumns(typeName, message, path = "", numRows = 0) {
  const read = {};
  for (const column of columnsOf(typeName)) {
    const values = readColumn(column, message[column.name], path);
    if (column.ofRows && values.length === 0) values.push(...Array(numRows).fill(column.absent));
    if (column.ofRows && values.length !== numRows) {
      throw new PlanError(path + column.name, `expected ${numRows} entries, or none`);
    }
    read[column.name] = values;
  }
  return read;
}

/** The fields of a message, its columns packed. */
export function withColumns(typeName, fields) {
  const packed = { ...fields };
  for (const { name, element } of columnsOf(typeName)) {
    if (!fields[name]) continue;
    packed[name] = Buffer.alloc(element.size * fields[name].length);
    fields[name].forEach((value, at) => packed[name][element.write](value, element.size * at));
  }
  return packed;
}
