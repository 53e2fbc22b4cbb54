// Never run: `npx tsc` checks that what is right is accepted, and what is wrong is not.

import { credentials } from "@grpc/grpc-js";

import { Client, type Answer, type OutputDelta, type SamplingParams } from "../src/client.js";

const client = new Client(["host1:7600", "host2:7600"], {
  apiKey: "secret",
  credentials: credentials.createSsl(),
  recoveryTimeoutMs: 10_000,
  maxConnections: 4,
});
const params: SamplingParams = { maxTokens: 64, temperature: 0, seed: "18446744073709551615" };

export async function text(): Promise<string> {
  let text = "";
  for await (const delta of client.stream("Once upon a time", params, { timeoutMs: 1000 })) {
    const { index, tokenIds, finishReason }: OutputDelta = delta;
    if (index === 0 && tokenIds.length > 0) text += delta.text;
    if (finishReason === "stop") break;
  }
  const answer: Answer = await client.generate([{ role: "user", content: "What is 2 + 3?" }]);
  client.close();
  return text + answer.outputs[0].text + String(answer.usage.completionTokens);
}

// @ts-expect-error: a prompt is text, token ids or messages
client.stream(7);
// @ts-expect-error: names are in camelCase
client.stream("Hello", { max_tokens: 3 });
// @ts-expect-error: no number can hold every seed that comes back
export const seed: Promise<number> = client.generate("Hello").then((answer) => answer.seed);
// @ts-expect-error: null while it goes on
export const reason = (delta: OutputDelta): "stop" | "length" => delta.finishReason;
// @ts-expect-error: no option has another name
new Client("host:7600", { token: "secret" });
