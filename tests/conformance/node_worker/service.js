// WorkerService: calls, epochs and step streams.

import { Cache } from "./cache.js";
import { MAX_DRAFTS } from "./drafts.js";
import { PlanError, draining, outOfOrder, stale } from "./errors.js";
import { grpc } from "./contract.js";
import { executeStep, nowUs } from "./step.js";
import { Sequences } from "./sequences.js";

export class Worker {
  lastEpoch = 0n;
  numSteps = 0;
  isDraining = false;
  #cache = null;
  #stream = null;
  #streamEpoch = 0n;
  #whenIdle = [];

  /** `options`: workerId, model (a ModelInfo), numBlocks, numHostBlocks. */
  constructor(options) {
    this.options = options;
  }

  /** The methods as grpc-js takes them. */
  handlers() {
    const unary = (answer) => (call, callback) => {
      try {
        callback(null, answer(call.request));
      } catch (error) {
        callback(error);
      }
    };
    const unimplemented = unary(() => {
      throw Object.assign(new Error("no profiler"), { code: grpc.status.UNIMPLEMENTED });
    });
    return {
      GetInfo: unary(() => this.#info()),
      GetModelAssets: (call) => call.end(), // prompts are token ids: there is no tokenizer
      ProfileBlocks: unary((request) => this.#profile(request)),
      InitializeCache: unary((request) => this.#initialize(request)),
      ExecuteSteps: (call) => this.#serve(call),
      StartProfile: unimplemented,
      StopProfile: unimplemented,
    };
  }

  /** Accept no new stream; resolves when none is open. */
  drain() {
    this.isDraining = true;
    return this.#stream ? new Promise((resolve) => this.#whenIdle.push(resolve)) : Promise.resolve();
  }

  #info() {
    return {
      worker_id: this.options.workerId,
      model: this.options.model,
      device: "node",
      attention_backend: "",
      pid: process.pid,
      num_weight_loads: 1,
      last_epoch: String(this.lastEpoch),
      num_speculative_tokens: MAX_DRAFTS,
    };
  }

  #profile({ max_num_seqs: sequences, max_num_batched_tokens: tokens }) {
    if (sequences < 1 || tokens < sequences) {
      throw new PlanError("max_num_batched_tokens", "expected 1 <= max_num_seqs <= this");
    }
    const { numBlocks, numHostBlocks } = this.options;
    return { num_gpu_blocks: numBlocks, num_cpu_blocks: numHostBlocks };
  }

  #initialize({ num_gpu_blocks: numBlocks, num_cpu_blocks: numHostBlocks, epoch }) {
    if (this.isDraining) throw draining();
    if (numBlocks > 0 !== this.options.numBlocks > 0) {
      throw new PlanError("num_gpu_blocks", "expected at least 1, or 0 without cache groups");
    }
    if (BigInt(epoch) <= this.lastEpoch) throw stale(`epoch ${epoch} is not above ${this.lastEpoch}`);
    this.#fence(BigInt(epoch));
    this.#cache = new Cache(this.options.model.cache_groups, numBlocks, numHostBlocks);
    return {};
  }

  /** One step stream. Plans are executed as they come; grpc-js keeps the results in order. */
  #serve(call) {
    let stream = null;
    const close = (error) => {
      if (stream?.isClosed) return;
      if (stream) this.#forget(stream);
      if (error) call.emit("error", error);
      else call.end();
    };
    const execute = (plan) => {
      if (stream?.isClosed) return;
      try {
        const receivedUs = nowUs();
        stream ??= this.#open(BigInt(plan.epoch), close);
        this.#checkTurn(stream, plan);
        const result = executeStep(plan, stream.sequences, this.#cache, receivedUs);
        this.numSteps += 1;
        call.write({ results: [result] });
      } catch (error) {
        stream ??= { isClosed: false };
        close(error.code ? error : Object.assign(error, { code: grpc.status.INTERNAL }));
      }
    };
    call.on("data", ({ plans }) => plans.forEach(execute));
    call.on("end", () => close());
    call.on("cancelled", () => stream && !stream.isClosed && this.#forget(stream));
    call.on("error", () => stream && !stream.isClosed && this.#forget(stream));
  }

  #open(epoch, close) {
    if (this.isDraining) throw draining();
    if (epoch < this.lastEpoch) throw stale(`epoch ${epoch} is below ${this.lastEpoch}`);
    if (!this.#cache) throw outOfOrder("InitializeCache comes before ExecuteSteps");
    if (epoch === this.#streamEpoch) throw outOfOrder(`epoch ${epoch} has had its stream`);
    this.#fence(epoch);
    this.#streamEpoch = epoch;
    const sequences = new Sequences(this.options.model, this.#cache);
    this.#stream = { epoch, sequences, close, nextStep: 1n, isClosed: false };
    return this.#stream;
  }

  #checkTurn(stream, plan) {
    if (BigInt(plan.epoch) !== stream.epoch) {
      throw outOfOrder(`the stream's epoch is ${stream.epoch}, the plan's ${plan.epoch}`);
    }
    if (BigInt(plan.step_id) !== stream.nextStep) {
      throw outOfOrder(`step ${stream.nextStep} is next, got ${plan.step_id}`);
    }
    stream.nextStep += 1n;
  }

  #fence(epoch) {
    this.#stream?.close(stale(`epoch ${epoch} has taken over`));
    this.lastEpoch = epoch;
  }

  #forget(stream) {
    stream.isClosed = true;
    if (this.#stream === stream) {
      this.#stream = null;
      this.#whenIdle.splice(0).forEach((resolve) => resolve());
    }
  }
}
