// Arguments that a message cannot hold, refused by name: the library would drop a field that it does
// not know, and convert a value of another type.

const INTEGERS = {
  TYPE_INT32: [-(2n ** 31n), 2n ** 31n - 1n],
  TYPE_UINT32: [0n, 2n ** 32n - 1n],
  TYPE_UINT64: [-(2n ** 63n), 2n ** 64n - 1n], // such as a seed, of which only the bits count
};
const TYPES = { TYPE_STRING: "string", TYPE_BOOL: "boolean" };
const FLOATS = ["TYPE_FLOAT", "TYPE_DOUBLE"];

/**
 * Throw a TypeError that names the first field of a message which is none, or has a wrong value.
 *
 * @param {string} path what errors call the message
 * @param {object} message
 * @param {string} type the message's name in the protos, without the package
 * @param {(name: string) => object} descriptorOf the descriptor of a message or an enum
 */
export function checkMessage(path, message, type, descriptorOf) {
  if (message === null || typeof message !== "object" || Array.isArray(message)) {
    throw wrong(path, "an object", message);
  }
  const fields = new Map(descriptorOf(type).field.map((field) => [field.name, field]));
  checkNames(path, message, [...fields.keys()]);
  for (const [name, value] of Object.entries(message)) {
    if (value === null || value === undefined) continue; // absent
    const field = fields.get(name);
    const values = field.label === "LABEL_REPEATED" ? value : [value];
    const place = join(path, name);
    if (!Array.isArray(values)) throw wrong(place, "an array", value);
    for (const [index, entry] of values.entries()) {
      checkValue(values === value ? `${place}[${index}]` : place, entry, field, descriptorOf);
    }
  }
}

function checkValue(path, value, { type, typeName }, descriptorOf) {
  if (type === "TYPE_MESSAGE") {
    checkMessage(path, value, typeName, descriptorOf);
  } else if (type === "TYPE_ENUM") {
    const names = descriptorOf(typeName).value.map(({ name }) => name);
    if (!names.includes(value)) throw wrong(path, `one of ${names.join(", ")}`, value);
  } else if (type in INTEGERS) {
    const [low, high] = INTEGERS[type];
    const isText = type === "TYPE_UINT64" && /^-?\d+$/.test(value);
    const isWhole = Number.isInteger(value) || isText;
    if (!isWhole || BigInt(value) < low || BigInt(value) > high) {
      throw wrong(path, `an integer from ${low} to ${high}`, value);
    }
  } else if (FLOATS.includes(type)) {
    if (typeof value !== "number") throw wrong(path, "a number", value);
  } else if (type in TYPES && typeof value !== TYPES[type]) {
    throw wrong(path, `a ${TYPES[type]}`, value);
  }
}

/** Throw a TypeError for the first name that is not known. */
export function checkNames(path, values, known) {
  const unknown = Object.keys(values).find((name) => !known.includes(name));
  if (unknown !== undefined) {
    throw new TypeError(`${join(path, unknown)}: no such field; there are ${known.join(", ")}`);
  }
}

/** Throw a TypeError unless a value is a number that `isAllowed`, in words `allowed`. */
export function checkNumber(name, value, allowed, isAllowed) {
  if (typeof value !== "number" || !isAllowed(value)) throw wrong(name, `a number ${allowed}`, value);
}

function join(path, name) {
  return path ? `${path}.${name}` : name;
}

function wrong(path, expected, value) {
  const isPlain = ["number", "bigint", "undefined"].includes(typeof value);
  const text = isPlain ? String(value) : JSON.stringify(value);
  return new TypeError(`${path}: expected ${expected}, got ${text.slice(0, 100)}`);
}
