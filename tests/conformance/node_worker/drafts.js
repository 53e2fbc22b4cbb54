// Drafts: what followed the sequence's last tokens when they occurred before.

export const MAX_DRAFTS = 4;

const MIN_MATCH = 2;

/** At most `count` tokens that may follow; none if the last two have not occurred before. */
export function draft(tokens, count) {
  const last = tokens.length - 1;
  for (let end = last - 1; end >= MIN_MATCH - 1; end--) {
    if (tokens[end] === tokens[last] && tokens[end - 1] === tokens[last - 1]) {
      return tokens.slice(end + 1, end + 1 + count);
    }
  }
  return [];
}
