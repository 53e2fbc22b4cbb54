/** What was received for one request over all its attempts, and the request for the rest. */
export class Received {
  #request;
  #numAttempts = 0;
  #started = null;
  #choices = [];

  /** Whether the answer is complete. */
  isComplete = false;

  /** @param {object} request a GenerateRequest with a requestId, or it could not be continued */
  constructor(request) {
    this.#request = request;
  }

  /** The next request: each attempt has a greater number, and takes over from the one before. */
  nextRequest() {
    const request = { ...this.#request, attempt: this.#numAttempts++ };
    if (this.#started === null) return request;
    const { seed, model, lora, loraDigest } = this.#started;
    const samplingParams = { ...request.samplingParams, seed };
    const resume = this.#choices.filter((choice) => choice.tokenIds.length > 0);
    // With an adapter, `model` may be its name, and stays what the caller has chosen.
    const chosen = lora ? { loraDigest } : { model };
    return { ...request, ...chosen, samplingParams, resume };
  }

  /** Process a response; returns it without what an earlier attempt has already reported. */
  add(response) {
    this.#started ??= response.started;
    // After a reconnect a choice's end is reported again.
    const choices = response.choices.filter(({ index }) => !this.#choices[index]?.isFinished);
    for (const delta of choices) this.#append(delta);
    if (response.usage) this.isComplete = true;
    return { ...response, choices };
  }

  #append({ index, text, reasoning, toolCalls, tokenIds, logprobs, finishReason }) {
    this.#choices[index] ??= {
      index,
      tokenIds: [],
      numChars: 0,
      numReasoningChars: 0,
      numToolCalls: 0,
      numArgumentChars: 0,
    };
    const choice = this.#choices[index];
    choice.tokenIds.push(...tokenIds);
    choice.numChars += numCodePoints(text);
    choice.numReasoningChars += numCodePoints(reasoning);
    for (const call of toolCalls) {
      choice.numToolCalls = Math.max(choice.numToolCalls, call.index + 1);
      choice.numArgumentChars += numCodePoints(call.arguments);
    }
    for (const { token } of logprobs) {
      choice.cumulativeLogprob = (choice.cumulativeLogprob ?? 0) + token.logprob;
    }
    choice.isFinished = finishReason !== "FINISH_REASON_UNSPECIFIED";
  }
}

/** The length of a text as the protos count it, not in UTF-16 units. */
function numCodePoints(text) {
  return [...text].length;
}
