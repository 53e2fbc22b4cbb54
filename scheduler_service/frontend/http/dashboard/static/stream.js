// The line to the server: read, taken up again when it breaks, with a key where one is needed.

const KEY = "pagewire-key";
const SILENCE_MS = 8_000; // the server says something every second or two
const RETRY_MS = 2_000;

export class Refused extends Error {}

// Calls `onMessage(message)`, `onState(state, why)` with "live", "lost" or "refused".
export async function follow({ onMessage, onState, askKey }) {
  for (;;) {
    try {
      await read(onMessage, onState);
      onState("lost", "the connection ended");
    } catch (error) {
      if (error instanceof Refused) {
        sessionStorage.removeItem(KEY);
        onState("refused", error.message);
        sessionStorage.setItem(KEY, await askKey(error.message));
        continue;
      }
      onState("lost", "connection lost");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(onMessage, onState) {
  const abort = new AbortController();
  let alarm = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = headersWith(key);
    // Beside this file, wherever a proxy has put the page.
    const url = new URL("stream", import.meta.url);
    const response = await fetch(url, { headers, signal: abort.signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      throw new Refused(key ? await reason(response) : ""); // that one says how programs send a key
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    for await (const line of lines(response.body)) {
      clearTimeout(alarm);
      alarm = setTimeout(() => abort.abort(), SILENCE_MS);
      const message = JSON.parse(line);
      onMessage(message);
      onState(message.lost ? "lost" : "live", message.lost);
    }
  } finally {
    clearTimeout(alarm);
    abort.abort();
  }
}

function headersWith(key) {
  try {
    return new Headers(key ? { Authorization: `Bearer ${key}` } : {});
  } catch {
    throw new Refused("this key has characters that no key has");
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "this key is not accepted";
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}
