// A small client of Pagewire for Node. It reads the contract from the .proto files, which also
// say what each field means; their names appear here in camelCase.

import { randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

import { checkMessage, checkNames, checkNumber } from "./checks.js";
import { OpenRequests } from "./open-requests.js";
import { Received } from "./received.js";
import { Retries } from "./retries.js";

const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));

const definition = protoLoader.loadSync("pagewire/v1/inference_service.proto", {
  includeDirs: [PROTOS],
  longs: String, // a seed may be larger than a number can hold
  enums: String,
  defaults: true,
  oneofs: true,
});
const descriptorOf = (name) => definition[`pagewire.v1.${name}`].type;
const { InferenceService } = grpc.loadPackageDefinition(definition).pagewire.v1;

const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": 256 * 1024 * 1024, // long prompts have long log probabilities
  // A server that disappeared silently is detected while calls are open.
  "grpc.keepalive_time_ms": 15_000,
  "grpc.keepalive_timeout_ms": 10_000,
  // The first retries reach a frontend that restarts.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2000,
  "grpc.use_local_subchannel_pool": 1, // each channel has a connection of its own
};

const MAX_HOLD_MS = 1000; // how long the server may hold back tokens of a whole answer

// From this timeout on, some 30 years, a request has no deadline: the library ends the process if a
// deadline is later than its format can hold.
const NEVER_MS = 1e12;

const OPTIONS = ["model", "lora", "requestId", "timeoutMs", "signal"];
const CLIENT_OPTIONS = ["apiKey", "credentials", "recoveryTimeoutMs", "maxConnections"];
const ADDRESS = /^(unix:.+|(\[[^\]]+\]|[^:/\s]+):\d{1,5})$/;

const FINISH_REASONS = {
  FINISH_REASON_STOP: "stop",
  FINISH_REASON_LENGTH: "length",
};

/**
 * Talks to one deployment through any of its frontends. A stream whose connection breaks
 * continues where it was, through the next frontend or the same one when it is back. Errors are
 * those of @grpc/grpc-js, with `code` and `details`, and TypeErrors that name wrong arguments.
 */
export class Client {
  #addresses;
  #credentials;
  #services = new Map();
  #openRequests;
  #server = { wasReached: false, progressedAt: 0 };
  #isClosed = false;
  #current = 0;
  #metadata = new grpc.Metadata();
  #recoveryTimeoutMs;

  /**
   * @param {string | string[]} address `HOST:PORT` or `unix:PATH`, or several, also with commas
   *   between them
   * @param {object} [options]
   * @param {string} [options.apiKey] sent with each call, as a bearer token
   * @param {grpc.ChannelCredentials} [options.credentials] such as
   *   `grpc.credentials.createSsl(ca)`; default: no encryption
   * @param {number} [options.recoveryTimeoutMs] how long a request is tried again after its
   *   connection broke, and while the server is full
   * @param {number} [options.maxConnections] to one address, opened as needed; each carries up to
   *   1,000 open requests, and further requests wait in the client until one ends
   */
  constructor(address = "127.0.0.1:7600", options = {}) {
    checkNames("options", options, CLIENT_OPTIONS);
    const { apiKey, credentials, recoveryTimeoutMs = 60_000, maxConnections = 1 } = options;
    checkNumber("options.recoveryTimeoutMs", recoveryTimeoutMs, "of at least 0", (n) => n >= 0);
    checkNumber("options.maxConnections", maxConnections, "of at least 1", (n) => n >= 1);
    this.#openRequests = new OpenRequests(Math.floor(maxConnections));
    this.#credentials = credentials ?? grpc.credentials.createInsecure();
    this.#addresses = [address].flat().flatMap((text) => String(text).split(","));
    for (const text of this.#addresses.length ? this.#addresses : [""]) {
      if (!ADDRESS.test(text)) {
        throw new TypeError(`address: expected HOST:PORT or unix:PATH, got ${JSON.stringify(text)}`);
      }
    }
    this.#recoveryTimeoutMs = recoveryTimeoutMs;
    if (apiKey) this.#metadata.set("authorization", `Bearer ${apiKey}`);
  }

  /**
   * The answer to a prompt, piece by piece: `{index, text, reasoning, toolCalls, tokenIds, logprobs,
   * cumulativeLogprob, finishReason, stopReason}`, where `finishReason` is "stop", "length", or null
   * while the choice goes on. Leaving the loop ends the request.
   *
   * @param {string | number[] | {role: string, content: string}[] | object} prompt text, token ids,
   *   messages, or a chat: `{messages, tools, ...}`
   * @param {object} [samplingParams] such as `{maxTokens: 64, temperature: 0}`
   * @param {object} [options] `model`, `lora`, `requestId`, `timeoutMs`, and `signal`, an AbortSignal
   *   that ends the request; the error is then its reason
   */
  async *stream(prompt, samplingParams = {}, options = {}) {
    if (Number.isInteger(samplingParams?.promptLogprobs)) {
      throw new TypeError("samplingParams.promptLogprobs: only whole answers have them: use generate");
    }
    for await (const response of this.#responses(prompt, samplingParams, options)) {
      for (const choice of response.choices) yield asDelta(choice);
    }
  }

  /**
   * The whole answer: `{requestId, model, lora, seed, promptTokenIds, promptLogprobs, outputs, usage,
   * timings}`.
   */
  async generate(prompt, samplingParams = {}, options = {}) {
    const answer = { promptLogprobs: [], outputs: [] };
    for await (const response of this.#responses(prompt, samplingParams, options, MAX_HOLD_MS)) {
      answer.requestId = response.requestId;
      if (response.started) Object.assign(answer, response.started);
      // Each attempt reports them.
      if (response.promptLogprobs.length) answer.promptLogprobs = asLogprobs(response.promptLogprobs);
      for (const choice of response.choices) append(answer.outputs, asDelta(choice));
      if (response.usage) Object.assign(answer, { usage: response.usage, timings: response.timings });
    }
    return answer;
  }

  /** Close the connections. */
  close() {
    this.#isClosed = true;
    for (const service of this.#services.values()) service.close();
  }

  /** The responses to a request, over all its attempts. */
  async *#responses(prompt, samplingParams, options, maxHoldMs) {
    checkNames("options", options, OPTIONS);
    const { model, lora, requestId, signal } = options;
    if (signal !== undefined && !(signal instanceof AbortSignal)) {
      throw new TypeError("options.signal: expected an AbortSignal");
    }
    signal?.throwIfAborted();
    const timeoutMs = options.timeoutMs ?? Infinity;
    checkNumber("options.timeoutMs", timeoutMs, "above 0", (n) => n > 0);
    const deadline = timeoutMs < NEVER_MS ? performance.now() + timeoutMs : Infinity;
    const retries = new Retries(this.#recoveryTimeoutMs, deadline, this.#server);
    const request = { ...asPrompt(prompt), samplingParams, model, lora, maxHoldMs };
    request.requestId = requestId ?? randomUUID(); // the client must know it to continue the request
    checkMessage("", request, "GenerateRequest", descriptorOf);
    const received = new Received(request);
    const connection = await this.#openRequests.enter(deadline, signal);
    try {
      while (!received.isComplete) {
        const used = this.#current;
        try {
          signal?.throwIfAborted();
          const service = this.#service(connection);
          const responses = this.#attempt(service, received.nextRequest(), deadline, signal);
          for await (const response of responses) {
            retries.progressed();
            yield received.add(response);
          }
          if (!received.isComplete) throw incomplete();
        } catch (error) {
          signal?.throwIfAborted();
          await pause(retries.delayAfter(error), undefined, { signal }).catch(() => {});
          if (used === this.#current) this.#current = (used + 1) % this.#addresses.length;
        }
      }
    } finally {
      this.#openRequests.leave(connection);
    }
  }

  /** The service at the current address, over one of its connections. */
  #service(connection) {
    if (this.#isClosed) throw new Error("this client is closed");
    const key = `${this.#current} ${connection}`;
    if (!this.#services.has(key)) {
      const address = this.#addresses[this.#current];
      const options = { ...CHANNEL_OPTIONS, "grpc.enable_http_proxy": isLocal(address) ? 0 : 1 };
      this.#services.set(key, new InferenceService(address, this.#credentials, options));
    }
    return this.#services.get(key);
  }

  async *#attempt(service, request, deadline, signal) {
    const timeLeft = deadline - performance.now(); // the library's deadlines are by the wall clock
    const call = service.generate(request, this.#metadata, { deadline: Date.now() + timeLeft });
    call.on("error", () => {}); // the loop throws errors; after the loop there is no reader
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel);
    try {
      yield* call;
    } finally {
      signal?.removeEventListener("abort", cancel);
      cancel();
    }
  }
}

/** Whether an address is on this machine, which no proxy reaches. */
function isLocal(address) {
  const host = address.slice(0, address.lastIndexOf(":"));
  return address.startsWith("unix:") || ["127.0.0.1", "localhost", "[::1]"].includes(host);
}

function incomplete() {
  const error = new Error("the stream ended before the answer was complete");
  return Object.assign(error, { code: grpc.status.UNAVAILABLE });
}

function asPrompt(prompt) {
  if (typeof prompt === "string") return { text: prompt };
  if (Array.isArray(prompt) && prompt.every((item) => Number.isInteger(item))) {
    return { tokenIds: { ids: prompt } };
  }
  if (Array.isArray(prompt) && prompt.every((item) => typeof item?.role === "string")) {
    return { chat: { messages: prompt } };
  }
  if (Array.isArray(prompt?.messages)) return { chat: prompt };
  throw new TypeError(
    "prompt must be a text, an array of token ids, an array of messages, or an object with messages",
  );
}

function asDelta(choice) {
  const { index, text, reasoning, toolCalls, tokenIds } = choice;
  return {
    index,
    text,
    reasoning,
    toolCalls,
    tokenIds,
    logprobs: asLogprobs(choice.logprobs),
    cumulativeLogprob: choice.cumulativeLogprob ?? null,
    finishReason: FINISH_REASONS[choice.finishReason] ?? null,
    stopReason: choice[choice.stopReason] ?? null,
  };
}

function asLogprobs(positions) {
  return positions.map(({ token, top }) => ({ ...asLogprob(token), top: top.map(asLogprob) }));
}

function asLogprob({ tokenId, logprob, rank, text }) {
  return { tokenId, logprob: logprob ?? null, rank, text };
}

function append(outputs, { index, text, reasoning, toolCalls, tokenIds, logprobs, ...ending }) {
  outputs[index] ??= { index, text: "", reasoning: "", toolCalls: [], tokenIds: [], logprobs: [] };
  const output = outputs[index];
  output.text += text;
  output.reasoning += reasoning;
  for (const call of toolCalls) {
    const begun = (output.toolCalls[call.index] ??= { ...call, arguments: "" });
    begun.arguments += call.arguments;
  }
  output.tokenIds.push(...tokenIds);
  output.logprobs.push(...logprobs);
  Object.assign(output, ending);
}
