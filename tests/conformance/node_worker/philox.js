// Philox4x32-10 (Salmon et al., SC 2011).

const MASK = 0xffffffffn;

function philox4x32(counter, key) {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const left = c0 * 0xd2511f53n;
    const right = c2 * 0xcd9e8d57n;
    [c0, c1, c2, c3] = [
      (right >> 32n) ^ c1 ^ k0,
      right & MASK,
      (left >> 32n) ^ c3 ^ k1,
      left & MASK,
    ];
    k0 = (k0 + 0x9e3779b9n) & MASK;
    k1 = (k1 + 0xbb67ae85n) & MASK;
  }
  return [c0, c1, c2, c3];
}

/** The uniform number, from 0 to below 1, of a choice at an output position. */
export function draw(seed, choiceIndex, position) {
  const bits = BigInt(seed);
  const counter = [BigInt(choiceIndex), BigInt(position), 0n, 0n];
  const [w0, w1] = philox4x32(counter, [bits & MASK, bits >> 32n]);
  return Number(((w0 << 32n) | w1) >> 11n) / 2 ** 53;
}
