// Cache groups: what each keeps of a sequence, and for how long.

const [GROWING, WINDOW, CHUNK, STATE, FIXED] = [1, 2, 3, 4, 5];
export const NO_BLOCK = -1; // in a table, for a block that was released
export const MEDIA = "CONTEXT_KIND_MEDIA";

const FLAGS = {
  growing: [GROWING, "block_tokens"],
  window: [WINDOW, "block_tokens", "span"],
  chunk: [CHUNK, "block_tokens", "span"],
  state: [STATE, "num_blocks"],
  fixed: [FIXED, "block_tokens"],
};

/** The groups that a flag names, such as growing:8,window:8:24,state:2; none for `none`. */
export function parseGroups(text) {
  if (text === "none") return [];
  return text.split(",").map((item) => {
    const [name, ...numbers] = item.split(":");
    const [lifetime, ...fields] = FLAGS[name] ?? [];
    if (!lifetime || numbers.length !== fields.length || !numbers.every((n) => Number(n) > 0)) {
      throw new Error(`expected LIFETIME:NUMBER… of ${Object.keys(FLAGS)}, got ${item}`);
    }
    return Object.fromEntries([["lifetime", lifetime], ...fields.map((f, i) => [f, Number(numbers[i])])]);
  });
}

export const isState = ({ lifetime }) => lifetime === STATE;
export const isSource = ({ lifetime }) => lifetime === FIXED;
export const hasTokens = (group) => !isState(group) && !isSource(group);

/** The first position that the token at `position` sees. */
export function firstVisible({ lifetime, span }, position) {
  if (lifetime === WINDOW) return Math.max(0, position - span + 1);
  return lifetime === CHUNK ? position - (position % span) : 0;
}

/** Number of blocks of a state or a source, which are there from the beginning. */
export const numFixedBlocks = (group, numSourceTokens) =>
  isState(group) ? group.num_blocks : Math.ceil(numSourceTokens / group.block_tokens);

/** Number of a sequence's first tokens that its tables have entries for. */
export function numSlots(groups, tables) {
  const rooms = groups.map((group, index) =>
    hasTokens(group) ? tables[index].length * group.block_tokens : Infinity,
  );
  return Math.min(...rooms);
}
