// node examples/generate.js [options] "Count from 1 to 5."
//
// Streams a model's answer to standard output. With --json: the whole answer as one JSON object.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";

import { Client } from "../src/client.js";

const { values, positionals } = parsed({
  allowPositionals: true,
  options: {
    address: { type: "string", default: process.env.PAGEWIRE_ADDRESS ?? "127.0.0.1:7600" },
    "max-tokens": { type: "string", default: "128" },
    temperature: { type: "string" },
    seed: { type: "string" },
    timeout: { type: "string" },
    "recovery-timeout": { type: "string", default: "60" },
    "api-key": { type: "string" },
    "tls-ca": { type: "string" },
    "tls-cert": { type: "string" },
    "tls-key": { type: "string" },
    chat: { type: "boolean", default: false },
    json: { type: "boolean", default: false },
  },
});
const text = positionals.join(" ");
const prompt = values.chat ? [{ role: "user", content: text }] : text;
const samplingParams = { maxTokens: Number(values["max-tokens"]) };
if (values.temperature !== undefined) samplingParams.temperature = Number(values.temperature);
if (values.seed !== undefined) samplingParams.seed = values.seed;
const options = {};
if (values.timeout !== undefined) options.timeoutMs = 1000 * Number(values.timeout);

let client;
try {
  client = new Client(values.address, {
    apiKey: values["api-key"] ?? process.env.PAGEWIRE_API_KEY,
    credentials: credentials(),
    recoveryTimeoutMs: 1000 * Number(values["recovery-timeout"]),
  });
  if (values.json) {
    console.log(JSON.stringify(await client.generate(prompt, samplingParams, options)));
  } else {
    for await (const delta of client.stream(prompt, samplingParams, options)) {
      process.stdout.write(delta.text);
    }
    process.stdout.write("\n");
  }
} catch (error) {
  console.error(`error: ${error.details || error.message}`);
  process.exitCode = 1;
} finally {
  client?.close();
}

/** The arguments; a wrong one ends the program with a line. */
function parsed(config) {
  try {
    return parseArgs(config);
  } catch (error) {
    console.error(`error: ${error.message}`);
    process.exit(2);
  }
}

/** TLS where an authority is given, with this client's certificate where the server asks for one. */
function credentials() {
  const files = ["tls-ca", "tls-key", "tls-cert"].map((name) => values[name]);
  if (files.every((file) => file === undefined)) return undefined;
  return grpc.credentials.createSsl(...files.map((file) => (file ? readFileSync(file) : null)));
}
