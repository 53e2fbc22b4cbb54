// A tiny worker in another language, written from the .proto files alone.
//
//   node worker.js --listen HOST:PORT|unix:PATH [--core ADDRESS] [--blocks 1024]
//                  [--host-blocks 64] [--cache-groups growing:8,window:8:24,state:2,fixed:8]

import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";

import { WorkerService, grpc } from "./contract.js";
import { blockBytes } from "./cache.js";
import { parseGroups } from "./groups.js";
import { facts } from "./model.js";
import { Membership } from "./registration.js";
import { Worker } from "./service.js";
import { addStandardServices } from "./standard_services.js";

const { values: flags } = parseArgs({
  options: {
    listen: { type: "string", default: "127.0.0.1:7620" },
    core: { type: "string" },
    "cache-groups": { type: "string", default: "growing:8" },
    blocks: { type: "string", default: "1024" },
    "host-blocks": { type: "string", default: "64" },
  },
});

const groups = parseGroups(flags["cache-groups"]);
const worker = new Worker({
  workerId: randomUUID(),
  model: {
    ...facts,
    cache_groups: groups,
    block_bytes: String(blockBytes(groups)),
    whole_prompt: groups.length === 0,
    work_kinds: groups.length > 0 ? facts.work_kinds : ["WORK_KIND_POOLING"],
  },
  numBlocks: groups.length > 0 ? Number(flags.blocks) : 0,
  numHostBlocks: groups.length > 0 ? Number(flags["host-blocks"]) : 0,
});
const server = new grpc.Server();
server.addService(WorkerService.service, worker.handlers());
addStandardServices(server);

/** End the process; without a core nothing else does. */
function stop() {
  server.forceShutdown();
  process.exit(0);
}

function register(port) {
  const isPath = flags.listen.startsWith("unix:");
  const address = isPath ? flags.listen : `${flags.listen.replace(/:\d+$/, "")}:${port}`;
  const membership = new Membership(flags.core, {
    registration: () => ({
      worker_id: worker.options.workerId,
      group_id: worker.options.workerId,
      rank: 0,
      world_size: 1,
      address,
      model: worker.options.model,
      last_epoch: String(worker.lastEpoch),
      version: "node-worker-1",
    }),
    numSteps: () => worker.numSteps,
    onDrain: () => worker.drain(),
    onStop: stop,
  });
  membership.start();
  return membership;
}

server.bindAsync(flags.listen, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(`error: cannot listen on ${flags.listen}: ${error.message}`);
    process.exit(1);
  }
  const membership = flags.core ? register(port) : null;
  process.on("SIGTERM", async () => {
    membership?.drain();
    await worker.drain();
    stop();
  });
  console.log(`listening address=${flags.listen} port=${port}`);
});
