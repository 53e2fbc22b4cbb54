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
   */
  enter(deadline) {
    const connection = this.#numOpen.findIndex((number) => number < MAX_OPEN_REQUESTS);
    if (connection >= 0) {
      this.#numOpen[connection] += 1;
      return connection;
    }
    return new Promise((resolve, reject) => {
      const place = { resolve };
      if (deadline !== Infinity) {
        const expire = () => {
          this.#waiting.delete(place);
          reject(expired());
        };
        place.timer = setTimeout(expire, Math.min(deadline - performance.now(), LONGEST_TIMER_MS));
      }
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
    this.#waiting.delete(next);
    clearTimeout(next.timer);
    next.resolve(connection);
  }
}

function expired() {
  const error = new Error("the timeout passed while the client had its maximum of open requests");
  return Object.assign(error, { code: grpc.status.DEADLINE_EXCEEDED, details: error.message });
}
