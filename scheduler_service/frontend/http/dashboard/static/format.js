// Numbers as people read them.

const plain = new Intl.NumberFormat("en-US");

export const count = (n) => plain.format(Math.round(n));

// A number with about three digits: 0.42, 8.1, 940, 12.3k.
export function short(n) {
  if (n == null) return "–";
  if (n >= 999_950) return `${(n / 1e6).toFixed(1)}M`;
  if (n >= 9_995) return `${(n / 1e3).toFixed(1)}k`;
  if (n >= 100) return count(n);
  if (n >= 10) return n.toFixed(Number.isInteger(n) ? 0 : 1);
  return Number.isInteger(n) ? String(n) : n.toFixed(n < 1 ? 2 : 1);
}

// Milliseconds as text: 840 µs, 12.4 ms, 1.32 s, 2 min 5 s.
export function duration(ms) {
  if (ms == null) return "–";
  if (ms < 0.0005) return "0 s";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1_000) return `${ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 100_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const s = Math.round(ms / 1000);
  if (s < 3_600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172_800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} days`;
}

// Seconds as text, to a tenth: for what is at most seconds ago.
export const seconds = (s) => `${Math.max(0, s).toFixed(1)} s`;

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
