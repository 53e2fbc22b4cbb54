/** What has come of one request over all its attempts, and what to say to get the rest. */
export class Received {
  #request;
  #numAttempts = 0;
  #started = null;
  #choices = [];

  /** Whether the answer is whole. */
  isComplete = false;

  /** @param {object} request a GenerateRequest with a requestId, or it could not be continued */
  constructor(request) {
    this.#request = request;
  }

  /** What to send: each attempt has a greater number, and takes over what the one before left. */
  nextRequest() {
    const request = { ...this.#request, attempt: this.#numAttempts++ };
    if (this.#started === null) return request;
    const { seed, model } = this.#started;
    const samplingParams = { ...request.samplingParams, seed };
    const resume = this.#choices.filter((choice) => choice.tokenIds.length > 0);
    return { ...request, model, samplingParams, resume };
  }

  /** Take in a response; gives it back without what an earlier attempt has told. */
  add(response) {
    this.#started ??= response.started;
    // A choice's end is told again after a reconnect.
    const choices = response.choices.filter(({ index }) => !this.#choices[index]?.isFinished);
    for (const delta of choices) this.#append(delta);
    if (response.usage) this.isComplete = true;
    return { ...response, choices };
  }

  #append({ index, text, tokenIds, logprobs, finishReason }) {
    this.#choices[index] ??= { index, tokenIds: [], numChars: 0 };
    const choice = this.#choices[index];
    choice.tokenIds.push(...tokenIds);
    choice.numChars += [...text].length; // code points, not UTF-16 units
    for (const { token } of logprobs) {
      choice.cumulativeLogprob = (choice.cumulativeLogprob ?? 0) + token.logprob;
    }
    choice.isFinished = finishReason !== "FINISH_REASON_UNSPECIFIED";
  }
}
