// From a request's events (status.proto's RequestEvent) to phases and to words.

import { count } from "./format.js";

const [QUEUED, RESUMED, PLACED, STARTED, PREFILLED, FIRST_TOKEN, PREEMPTED, SWAPPED_OUT, SWAPPED_IN, LOST, MOVED, ENDED] =
  Array.from({ length: 12 }, (_, i) => i + 1);

// What a request was doing, without gaps: [{name, ms}].
export function phasesOf(events, ageMs) {
  const phases = [];
  let [name, since] = ["queued", 0];
  const enter = (next, at) => {
    if (next === name) return;
    if (at > since) phases.push({ name, ms: at - since });
    [name, since] = [next, at];
  };
  events.forEach(([event, at], i) => {
    const next = events[i + 1]?.[0];
    if (event === RESUMED) enter("recovering", at);
    else if (event === STARTED) enter(events[i - 1]?.[0] === SWAPPED_IN ? "decode" : "prefill", at);
    else if (event === FIRST_TOKEN || (event === PREFILLED && next !== PREFILLED && next !== undefined)) {
      if (name === "prefill") enter("decode", at);  // else it was in flight when the request left the batch
    }
    else if (event === PREEMPTED) enter("preempted", at);
    else if (event === SWAPPED_OUT) enter("swapped", at);
    else if (event === LOST && name === "queued") return;  // it had not begun there
    else if (event === LOST || event === MOVED) enter("recovering", at);
  });
  if (ageMs > since) phases.push({ name, ms: ageMs - since });
  return phases;
}

// One event in words.
export function describe([event, , value], request) {
  const tokens = `${count(value)} tokens`;
  switch (event) {
    case QUEUED: return `queued with ${tokens}`;
    case RESUMED: return `resumed after a loss, with ${tokens}`;
    case PLACED: return `given to ${request.placements[value] ?? "a worker group"}`;
    case STARTED: return "in the batch";
    case PREFILLED: return `prefilled ${count(value)} of its tokens`;
    case FIRST_TOKEN: return "first token";
    case PREEMPTED: return `preempted at ${tokens}, to be computed again`;
    case SWAPPED_OUT: return `swapped out at ${tokens}`;
    case SWAPPED_IN: return "swapped in";
    case LOST: return "its worker was lost";
    case MOVED: return "leaves a worker group that drains";
    case ENDED: return `${request.state} with ${tokens}`;
    default: return "something newer than this page";
  }
}
