// Types of client.js. What each field means is in protos/pagewire/v1, under the same name in
// snake_case; a test compares the names.

import type { ChannelCredentials } from "@grpc/grpc-js";

/** A 64-bit integer: as text where it may be larger than a number can hold. */
export type Int64 = number | string;

export interface SamplingParams {
  n?: number;
  bestOf?: number;
  beamSearch?: { width?: number; lengthPenalty?: number; earlyStopping?: "EARLY_STOPPING_WHEN_FULL" | "EARLY_STOPPING_WHEN_HOPELESS" | "EARLY_STOPPING_NEVER"; };
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  logitBias?: { tokenId?: number; bias?: number; }[];
  seed?: Int64;
  stop?: string[];
  stopTokenIds?: number[];
  badWords?: string[];
  minTokens?: number;
  maxTokens?: number;
  ignoreEos?: boolean;
  logprobs?: number;
  promptLogprobs?: number;
  skipSpecialTokens?: boolean;
  includeStopInOutput?: boolean;
  jsonSchema?: string;
  regex?: string;
  grammar?: string;
  choice?: { choices?: string[]; };
  truncatePromptTokens?: number;
  thought?: { start?: string; ends?: string[]; };
  allowedTokenIds?: number[];
}

export interface ChatMessage {
  role: string;
  content?: string;
  name?: string;
  toolCalls?: ToolCall[];
  toolCallId?: string;
  reasoningContent?: string;
  /** In place of `content`: its parts. */
  contentParts?: { text?: string; }[];
}

export interface ToolCall {
  id: string;
  name: string;
  /** The text of a JSON object. */
  argumentsJson: string;
}

export interface Tool {
  name: string;
  description?: string;
  /** JSON schema of its arguments, as JSON text. */
  parametersJson?: string;
  strict?: boolean;
}

export interface Chat {
  messages: ChatMessage[];
  addGenerationPrompt?: boolean;
  tools?: Tool[];
  templateArgumentsJson?: string;
  continueFinalMessage?: boolean;
  includeReasoning?: boolean;
  toolChoice?: { required: boolean } | { name: string };
  parallelToolCalls?: boolean;
}

/** A text, token ids, or a chat. */
export type Prompt = string | number[] | ChatMessage[] | Chat;

export interface RequestOptions {
  /** Required only if several models are served. */
  model?: string;
  /** The name of an adapter of the model; `model` may name the adapter instead. */
  lora?: string;
  /** Drawn at random unless given. */
  requestId?: string;
  /** Milliseconds until the request is given up; default: never. */
  timeoutMs?: number;
  /** Ends the request; the error is then its reason. */
  signal?: AbortSignal;
}

export interface ClientOptions {
  /** Sent as a bearer token. */
  apiKey?: string;
  /** Default: no encryption. */
  credentials?: ChannelCredentials;
  /**
   * How long to retry a request after its connection broke, and while the server is full; default
   * 60,000, 0 disables retries.
   */
  recoveryTimeoutMs?: number;
  /**
   * To one address, opened as needed; default 1. Each carries up to 1,000 open requests, and further
   * requests wait in the client until one ends.
   */
  maxConnections?: number;
}

export type FinishReason = "stop" | "length";

/** The next part of a tool call. */
export interface ToolCallDelta {
  index: number;
  /** Empty but in the first part, like `name`. */
  id: string;
  name: string;
  /** JSON text, to be appended. */
  arguments: string;
}

/** A token's log probability under the model, before penalties and temperature. */
export interface TokenLogprob {
  tokenId: number;
  /** null for the first token of a prompt. */
  logprob: number | null;
  /** 1 for the most probable token; 0 if there is no log probability. */
  rank: number;
  text: string;
}

/** The token at a position, and the most probable ones there. */
export interface PositionLogprobs extends TokenLogprob {
  top: TokenLogprob[];
}

/** An increment of one choice. */
export interface OutputDelta {
  /** Which choice, from 0. */
  index: number;
  /** To be appended; in a chat, without reasoning and calls. */
  text: string;
  /** To be appended to the model's reasoning. */
  reasoning: string;
  /** Calls that begin, with id and name, or continue. In an answer: whole calls. */
  toolCalls: ToolCallDelta[];
  tokenIds: number[];
  /** With `logprobs`: one for each token. */
  logprobs: PositionLogprobs[];
  /** With `logprobs`, at the end: the sum over all tokens. */
  cumulativeLogprob: number | null;
  /** null while the choice continues. */
  finishReason: FinishReason | null;
  /** The stop string or the stop token that ended the choice. */
  stopReason: string | number | null;
}

export interface Usage {
  promptTokens: number;
  cachedTokens: number;
  completionTokens: number;
  reasoningTokens: number;
}

/** Where the time went, in microseconds, as text. */
export interface Timings {
  totalUs: string;
  queueUs: string;
  planUs: string;
  wireUs: string;
  forwardUs: string;
  sampleUs: string;
  detokenizeUs: string;
  preemptedUs: string;
  recoveryUs: string;
  unaccountedUs: string;
  /** How often it was resumed on workers of another arithmetic; later tokens may then differ. */
  numInexactRecoveries: number;
  /** Output tokens that came as drafts of speculative decoding. */
  numAcceptedDrafts: number;
  /** Drafts that were computed, whether or not they were right. */
  numDrafts: number;
  transferUs: string;
}

export interface Answer {
  requestId: string;
  model: string;
  /** The name of the adapter in effect; empty without one. */
  lora: string;
  /** The seed in effect, as text: it has 64 bits. */
  seed: string;
  promptTokenIds: number[];
  /** With `promptLogprobs`: one for each token of the prompt. */
  promptLogprobs: PositionLogprobs[];
  /** One for each choice. */
  outputs: OutputDelta[];
  usage: Usage;
  timings: Timings;
}

/**
 * Talks to one deployment through any of its frontends. A stream whose connection breaks
 * continues where it was. Errors are those of @grpc/grpc-js, with `code` and `details`, and
 * TypeErrors that name wrong arguments.
 */
export class Client {
  /** @param address `HOST:PORT` or `unix:PATH`, or several, also with commas between them */
  constructor(address?: string | string[], options?: ClientOptions);

  /** The answer piece by piece; leaving the loop ends the request. */
  stream(
    prompt: Prompt,
    samplingParams?: SamplingParams,
    options?: RequestOptions,
  ): AsyncGenerator<OutputDelta, void, undefined>;

  /** The whole answer. */
  generate(
    prompt: Prompt,
    samplingParams?: SamplingParams,
    options?: RequestOptions,
  ): Promise<Answer>;

  /** Close the connections. */
  close(): void;
}
