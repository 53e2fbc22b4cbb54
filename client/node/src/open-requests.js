import grpc from "@grpc/grpc-js";

/** Most open requests of one connection. A frontend allows 1,024 calls. */
const MAX_OPEN_REQUESTS = 1000;
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Spreads requests over connections, one after the other; when all are full, requests wait. */
export class OpenRequests {
  #numOpen;
  #waiting = new Set();

  /** @param {number} maxConnections */
  constructor(maxConnections) {
    this.#numOpen = new Array(maxConnections).fill(0);
  }

  /**
   * The number of the connection for one more request; `leave` must follow.
   * @param {number} deadline on the clock of `performance.now()`; the wait ends with DEADLINE_EXCEEDED
   * @param {AbortSignal} [signal] the wait ends with its reason
   */
  enter(deadline, signal) {
    const connection = this.#numOpen.findIndex((number) => number < MAX_OPEN_REQUESTS);
    if (connection >= 0) {
      this.#numOpen[connection] += 1;
      return connection;
    }
    return new Promise((resolve, reject) => {
      const leave = () => {
        this.#waiting.delete(place);
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
      };
      const giveUp = (error) => {
        leave();
        reject(error);
      };
      const abort = () => giveUp(signal.reason);
      const place = (connection) => {
        leave();
        resolve(connection);
      };
      const timeLeft = Math.min(deadline - performance.now(), LONGEST_TIMER_MS);
      const timer = deadline < Infinity ? setTimeout(() => giveUp(expired()), timeLeft) : undefined;
      signal?.addEventListener("abort", abort);
      this.#waiting.add(place);
    });
  }

  /** Note that a request on this connection has ended. */
  leave(connection) {
    const [next] = this.#waiting;
    if (next === undefined) {
      this.#numOpen[connection] -= 1;
      return;
    }
    next(connection);
  }
}

function expired() {
  const error = new Error("the timeout passed while the client had its maximum of open requests");
  return Object.assign(error, { code: grpc.status.DEADLINE_EXCEEDED, details: error.message });
}
