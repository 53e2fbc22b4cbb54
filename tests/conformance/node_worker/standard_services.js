// grpc.health.v1.Health and server reflection, in bytes: their messages are small.

import { definition } from "./contract.js";

const SERVING = Buffer.from([0x08, 1]);
const SERVICES = ["pagewire.v1.WorkerService", "grpc.health.v1.Health"];
const FILES = definition["pagewire.v1.StepPlan"].fileDescriptorProtos;
const asIs = (bytes) => bytes;

function method(path, isStream) {
  return {
    path,
    requestStream: isStream,
    responseStream: isStream,
    requestSerialize: asIs,
    requestDeserialize: asIs,
    responseSerialize: asIs,
    responseDeserialize: asIs,
  };
}

function varint(value) {
  const bytes = [];
  for (; value > 0x7f; value >>>= 7) bytes.push((value & 0x7f) | 0x80);
  return Buffer.from([...bytes, value]);
}

/** A field that holds bytes, a text or a message. */
function field(number, content) {
  const bytes = Buffer.from(content);
  return Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes]);
}

const LIST_SERVICES = 7; // in ServerReflectionRequest; 3 and 4 ask for files

function reflect(request) {
  // A request holds an optional host, field 1, and then one question.
  let at = 0;
  while (request[at] >> 3 === 1) at += 2 + request[at + 1];
  if (request[at] >> 3 === LIST_SERVICES) {
    return field(6, Buffer.concat(SERVICES.map((name) => field(1, field(1, name)))));
  }
  return field(4, Buffer.concat(FILES.map((file) => field(1, file))));
}

/** Make a server answer health checks and reflection. */
export function addStandardServices(server) {
  server.addService(
    { Check: method("/grpc.health.v1.Health/Check", false) },
    { Check: (_, callback) => callback(null, SERVING) },
  );
  const path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  server.addService(
    { ServerReflectionInfo: method(path, true) },
    {
      ServerReflectionInfo: (call) => {
        call.on("data", (request) => call.write(Buffer.concat([field(2, request), reflect(request)])));
        call.on("end", () => call.end());
      },
    },
  );
}

