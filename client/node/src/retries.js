import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const MAX_RETRIES = 5; // while no server has been reached, or the one reached cannot serve
const FIRST_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;

// The service gives every error details. An error without them comes from the transport: the server
// was killed, or cancelled its calls after its grace period.
const TRANSPORT_BREAKS = new Map([
  [grpc.status.UNAVAILABLE, ""],
  [grpc.status.CANCELLED, ""],
  [grpc.status.UNKNOWN, "Stream removed"],
  [grpc.status.INTERNAL, "RST_STREAM"],
]);
const LAST_ERROR = /Last error: (?:Error: )?(.*?)\.? Resolution note:/;
const NO_CONNECTION = /^(No connection established|Name resolution failed)/;

/** Whether to retry after a failure of one request, and how long to wait. */
export class Retries {
  #recoveryTimeoutMs;
  #deadline;
  #server;
  #hasBegun = false;
  #numRetries = 0;
  #failingSince = null;

  /**
   * @param {number} recoveryTimeoutMs how long to retry after a connection broke, and while the
   *   server is full; 0: not at all
   * @param {number} deadline on the clock of `performance.now()`
   * @param {{wasReached: boolean, progressedAt: number}} server whether any server was ever
   *   reached, and when it last sent anything; shared by a client's requests
   */
  constructor(recoveryTimeoutMs, deadline, server) {
    this.#recoveryTimeoutMs = recoveryTimeoutMs;
    this.#deadline = deadline;
    this.#server = server;
  }

  /** Note that something was received: the count of failures restarts. */
  progressed() {
    this.#server.wasReached = true;
    this.#server.progressedAt = performance.now();
    this.#hasBegun = true;
    this.#numRetries = 0;
    this.#failingSince = null;
  }

  /** Milliseconds to wait before the next attempt; throws `error` if there is to be none. */
  delayAfter(error) {
    const why = LAST_ERROR.exec(error.details ?? "")?.[1];
    const wasReached = !NO_CONNECTION.test(error.details ?? "");
    if (why) error.details = error.message = `no server answers: ${why}`;
    const now = performance.now();
    this.#failingSince ??= now;
    const { reason, retryDelayMs = 0 } = detailsOf(error);
    this.#server.wasReached ||= wasReached;
    const backoff = Math.min(MAX_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** this.#numRetries);
    const delay = Math.max(backoff * (0.5 + Math.random() / 2), retryDelayMs);
    const isFull = error.code === grpc.status.RESOURCE_EXHAUSTED && retryDelayMs > 0;
    const isRestarting = isBreak(error, reason) || reason === "SHUTTING_DOWN";
    const isAway = error.code === grpc.status.UNAVAILABLE;
    // The library counts to its deadlines by the wall clock, which may have been set ahead. Those
    // that the request has reached are thrown below, as no delay fits.
    const isEarly = error.code === grpc.status.DEADLINE_EXCEEDED;
    if (!isFull && !isRestarting && !isAway && !isEarly) throw error;
    const byTime = this.#hasBegun || isFull || (isRestarting && this.#server.wasReached);
    // The server may be full with other requests of this client.
    const since = Math.max(this.#failingSince, isFull ? this.#server.progressedAt : 0);
    if (now - since >= this.#recoveryTimeoutMs) throw error;
    if (!byTime && this.#numRetries >= MAX_RETRIES) throw error;
    if (now + delay >= this.#deadline) throw error;
    this.#numRetries += 1;
    return delay;
  }
}

/** Whether the connection ended, rather than the service the call. */
function isBreak(error, reason) {
  const words = TRANSPORT_BREAKS.get(error.code);
  return reason === undefined && words !== undefined && (error.details ?? "").includes(words);
}

const field = (type, id, rule) => ({ type, id, rule });
const decoders = protoLoader.fromJSON({
  nested: {
    Any: { fields: { typeUrl: field("string", 1), value: field("bytes", 2) } },
    Status: { fields: { details: field("Any", 3, "repeated") } },
    ErrorInfo: { fields: { reason: field("string", 1) } },
    Duration: { fields: { seconds: field("int32", 1), nanos: field("int32", 2) } },
    RetryInfo: { fields: { retryDelay: field("Duration", 1) } },
    Decode: {
      methods: Object.fromEntries(
        ["Status", "ErrorInfo", "RetryInfo"].map((name) => [
          name,
          { requestType: "Any", responseType: name },
        ]),
      ),
    },
  },
}, { defaults: true }).Decode;

/** What the service says of an error: its constant reason, and when to try again. */
function detailsOf(error) {
  const [data] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const found = {};
  if (data === undefined) return found;
  for (const { typeUrl, value } of decoders.Status.responseDeserialize(data).details) {
    if (typeUrl.endsWith("/google.rpc.ErrorInfo")) {
      found.reason = decoders.ErrorInfo.responseDeserialize(value).reason;
    } else if (typeUrl.endsWith("/google.rpc.RetryInfo")) {
      const { seconds, nanos } = decoders.RetryInfo.responseDeserialize(value).retryDelay;
      found.retryDelayMs = seconds * 1000 + nanos / 1e6;
    }
  }
  return found;
}
