// The contract, read from the .proto files. grpc-js is the Node client's.

import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const ROOT = new URL("../../../", import.meta.url);
const require = createRequire(new URL("client/node/package.json", ROOT));

export const grpc = require("@grpc/grpc-js");

const FILES = ["worker_service", "scheduler_service"].map((name) => `pagewire/v1/${name}.proto`);

export const definition = require("@grpc/proto-loader").loadSync(FILES, {
  includeDirs: [fileURLToPath(new URL("protos", ROOT))],
  keepCase: true,
  longs: String, // 64 bits do not fit into a number
  enums: String,
  defaults: true,
  oneofs: true, // `_seed` names the field that is set, where an optional one is
});

// The loader of services drops the options of fields; protobufjs, on which it builds, keeps them.
const root = new (createRequire(require.resolve("@grpc/proto-loader"))("protobufjs").Root)();
root.resolvePath = (_, target) =>
  target.startsWith("google/") ? target : fileURLToPath(new URL(`protos/${target}`, ROOT));
root.loadSync(FILES, { keepCase: true });

/** The declaration of a message, with the options of its fields. */
export const messageType = (name) => root.lookupType(`pagewire.v1.${name}`);

export const { WorkerService, SchedulerService } =
  grpc.loadPackageDefinition(definition).pagewire.v1;
