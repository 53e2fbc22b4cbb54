import grpc from "@grpc/grpc-js";

const MAX_RETRIES = 5; // of a request of which nothing was received
const FIRST_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;

// The service gives every error details. An error without them comes from the transport: the server
// was killed, or cancelled its calls after its grace period.
const TRANSPORT_BREAKS = new Map([
  [grpc.status.CANCELLED, ""],
  [grpc.status.UNKNOWN, "Stream removed"],
  [grpc.status.INTERNAL, "RST_STREAM"],
]);

/** Whether to retry after a failure of one request, and how long to wait. */
export class Retries {
  #recoveryTimeoutMs;
  #deadline;
  #hasBegun = false;
  #numRetries = 0;
  #failingSince = null;

  /**
   * @param {number} recoveryTimeoutMs how long a stream that broke is tried again; 0: not at all
   * @param {number} deadline on the clock of `Date.now()`
   */
  constructor(recoveryTimeoutMs, deadline) {
    this.#recoveryTimeoutMs = recoveryTimeoutMs;
    this.#deadline = deadline;
  }

  /** Note that something was received: the count of failures restarts. */
  progressed() {
    this.#hasBegun = true;
    this.#numRetries = 0;
    this.#failingSince = null;
  }

  /** Milliseconds to wait before the next attempt; throws `error` if there is to be none. */
  delayAfter(error) {
    const now = Date.now();
    this.#failingSince ??= now;
    const backoff = Math.min(MAX_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** this.#numRetries);
    const delay = backoff * (0.5 + Math.random() / 2);
    if (!isPassing(error) || this.#isExhausted(now) || now + delay >= this.#deadline) throw error;
    this.#numRetries += 1;
    return delay;
  }

  #isExhausted(now) {
    if (now - this.#failingSince >= this.#recoveryTimeoutMs) return true;
    return !this.#hasBegun && this.#numRetries >= MAX_RETRIES;
  }
}

/** Whether the same request may succeed on another frontend, or on this one later. */
function isPassing(error) {
  if (error.code === grpc.status.UNAVAILABLE) return true;
  const hasDetails = error.metadata?.get("grpc-status-details-bin").length > 0;
  const words = TRANSPORT_BREAKS.get(error.code);
  return !hasDetails && words !== undefined && (error.details ?? "").includes(words);
}
