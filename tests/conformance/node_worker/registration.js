// Membership: registers with the core, sends heartbeats, obeys directives; tries again for ever.

import { SchedulerService, grpc } from "./contract.js";

const HEARTBEATS_PER_LEASE = 4;
const RETRY_MS = 200;

export class Membership {
  #call = null;
  #timer = null;

  /** `registration()` and `numSteps()` are called each time; `onDrain`, `onStop` are callbacks. */
  constructor(core, { registration, numSteps, onDrain, onStop }) {
    this.state = "WORKER_STATE_READY";
    this.client = new SchedulerService(core, grpc.credentials.createInsecure());
    Object.assign(this, { registration, numSteps, onDrain, onStop });
  }

  start() {
    const call = (this.#call = this.client.RegisterWorker());
    const again = () => {
      if (this.#call !== call) return;
      clearInterval(this.#timer);
      this.#call = null;
      setTimeout(() => this.start(), RETRY_MS);
    };
    call.on("data", ({ directive }) => this.#obey(directive));
    call.on("error", again);
    call.on("end", again);
    this.#beat({ registration: this.registration() });
  }

  /** Report to the core, now, that nothing new is to be planned here. */
  drain() {
    this.state = "WORKER_STATE_DRAINING";
    if (this.#call) this.#beat();
  }

  #beat(first = {}) {
    const heartbeat = { ...first, state: this.state, num_steps: String(this.numSteps()) };
    this.#call?.write({ heartbeat });
  }

  #obey({ directive, serve, stop }) {
    if (directive === "serve") {
      clearInterval(this.#timer);
      this.#timer = setInterval(() => this.#beat(), serve.lease_ms / HEARTBEATS_PER_LEASE);
    } else if (directive === "drain") {
      this.drain();
      this.onDrain();
    } else if (directive === "stop") {
      this.onStop(stop.reason);
    }
  }
}
