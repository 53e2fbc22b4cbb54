// What ends a call: a gRPC status and a message.

import { grpc } from "./contract.js";

/** An error that a call ends with; grpc-js reads `code` and `details`. */
export class StatusError extends Error {
  constructor(code, details) {
    super(details);
    this.code = code;
    this.details = details;
  }
}

/** A message that is malformed or contradicts what the worker knows. */
export class PlanError extends StatusError {
  constructor(field, problem) {
    super(grpc.status.INVALID_ARGUMENT, `${field}: ${problem}`);
  }
}

/** A call or a step out of its turn. */
export const outOfOrder = (details) =>
  new StatusError(grpc.status.FAILED_PRECONDITION, details);

/** A greater epoch has taken over. */
export const stale = (details) => new StatusError(grpc.status.ABORTED, details);

/** The worker is about to end. */
export const draining = () =>
  new StatusError(grpc.status.UNAVAILABLE, "the worker is shutting down");
