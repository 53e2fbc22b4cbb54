// A small client of Pagewire for Node. It reads the contract from the .proto files, which also
// say what each field means; their names appear here in camelCase.

import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));

const definition = protoLoader.loadSync("pagewire/v1/inference_service.proto", {
  includeDirs: [PROTOS],
  longs: String, // a seed may be larger than a number can hold
  enums: String,
  defaults: true,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pagewire.v1;

const FINISH_REASONS = {
  FINISH_REASON_STOP: "stop",
  FINISH_REASON_LENGTH: "length",
};

/** A server that vanished without a word is noticed while calls are open. */
const KEEPALIVE = { "grpc.keepalive_time_ms": 15_000, "grpc.keepalive_timeout_ms": 10_000 };

/** Talks to one frontend. Errors are those of @grpc/grpc-js: `code` and `details` say what. */
export class Client {
  #service;
  #metadata = new grpc.Metadata();

  /**
   * @param {string} address `HOST:PORT` or `unix:PATH`
   * @param {object} [options]
   * @param {string} [options.token] sent as a bearer token
   * @param {grpc.ChannelCredentials} [options.credentials] default: no encryption
   */
  constructor(address = "127.0.0.1:7600", { token, credentials } = {}) {
    const secured = credentials ?? grpc.credentials.createInsecure();
    this.#service = new InferenceService(address, secured, KEEPALIVE);
    if (token) this.#metadata.set("authorization", `Bearer ${token}`);
  }

  /**
   * The answer to a prompt, piece by piece: `{index, text, tokenIds, finishReason}`, where
   * `finishReason` is "stop", "length", or null while the choice goes on. Leaving the loop ends
   * the request.
   *
   * @param {string | number[] | {role: string, content: string}[]} prompt text, token ids or chat
   * @param {object} [samplingParams] such as `{maxTokens: 64, temperature: 0}`
   * @param {object} [options] `model`, `requestId`, `timeoutMs`
   */
  async *stream(prompt, samplingParams = {}, options = {}) {
    for await (const response of this.#responses(prompt, samplingParams, options)) {
      for (const choice of response.choices) yield asDelta(choice);
    }
  }

  /** The whole answer: `{requestId, model, seed, promptTokenIds, outputs, usage, timings}`. */
  async generate(prompt, samplingParams = {}, options = {}) {
    const answer = { outputs: [] };
    for await (const response of this.#responses(prompt, samplingParams, options)) {
      answer.requestId = response.requestId;
      if (response.started) Object.assign(answer, response.started);
      for (const choice of response.choices) append(answer.outputs, asDelta(choice));
      if (response.usage) Object.assign(answer, { usage: response.usage, timings: response.timings });
    }
    return answer;
  }

  /** Close the connection. */
  close() {
    this.#service.close();
  }

  async *#responses(prompt, samplingParams, { model, requestId, timeoutMs }) {
    const request = { ...asPrompt(prompt), samplingParams, model, requestId };
    const deadline = timeoutMs === undefined ? Infinity : Date.now() + timeoutMs;
    const call = this.#service.generate(request, this.#metadata, { deadline });
    call.on("error", () => {}); // the loop throws it; a call cancelled after the loop has no reader
    let complete = false;
    try {
      for await (const response of call) {
        complete = response.usage !== null;
        yield response;
      }
    } finally {
      call.cancel();
    }
    if (!complete) throw new Error("the stream ended before the answer was complete");
  }
}

function asPrompt(prompt) {
  if (typeof prompt === "string") return { text: prompt };
  if (Array.isArray(prompt) && prompt.every((item) => Number.isInteger(item))) {
    return { tokenIds: { ids: prompt } };
  }
  if (Array.isArray(prompt) && prompt.every((item) => typeof item?.role === "string")) {
    return { chat: { messages: prompt } };
  }
  throw new TypeError("prompt must be a text, an array of token ids, or an array of messages");
}

function asDelta({ index, text, tokenIds, finishReason }) {
  return { index, text, tokenIds, finishReason: FINISH_REASONS[finishReason] ?? null };
}

function append(outputs, { index, text, tokenIds, finishReason }) {
  outputs[index] ??= { index, text: "", tokenIds: [], finishReason: null };
  outputs[index].text += text;
  outputs[index].tokenIds.push(...tokenIds);
  outputs[index].finishReason = finishReason;
}
