// node examples/many.js --address HOST:PORT --requests 10000
//
// Sends many requests at once, each with a prompt and a seed of its own, and prints as JSON how many
// failed, a digest of all answers' tokens, and the client's memory per request.

import { createHash } from "node:crypto";
import { parseArgs } from "node:util";

import { Client } from "../src/client.js";

const { values } = parseArgs({
  options: {
    address: { type: "string", default: "127.0.0.1:7600" },
    requests: { type: "string", default: "1000" },
    "max-tokens": { type: "string", default: "16" },
    "max-connections": { type: "string", default: "1" },
  },
});
const requests = Number(values.requests);
const client = new Client(values.address, { maxConnections: Number(values["max-connections"]) });
const maxTokens = Number(values["max-tokens"]);
const before = process.memoryUsage().rss;
let peak = before;
const timer = setInterval(() => (peak = Math.max(peak, process.memoryUsage().rss)), 50);
const ends = await Promise.allSettled(
  Array.from({ length: requests }, (_, index) =>
    client.generate([3 + (index % 1000), 4 + Math.floor(index / 1000), 5, 6], {
      maxTokens,
      ignoreEos: true,
      seed: index,
    }),
  ),
);
clearInterval(timer);
client.close();
const failed = ends.filter((end) => end.status === "rejected");
const tokens = JSON.stringify(ends.map((end) => end.value?.outputs[0].tokenIds));
console.log(
  JSON.stringify({
    requests,
    failed: failed.length,
    error: failed.length ? String(failed[0].reason) : null,
    bytesPerRequest: Math.round((peak - before) / requests),
    digest: createHash("sha256").update(tokens).digest("hex"),
  }),
);
