#!/bin/sh
# Makes pagewirev1/ of the protos; needs protoc, protoc-gen-go and protoc-gen-go-grpc in PATH.
set -eu
cd "$(dirname "$0")"
protos=${PROTOS:-../../protos}
package=pagewire/client/pagewirev1

set -- --go_out=. --go-grpc_out=. --go_opt=module=pagewire/client --go-grpc_opt=module=pagewire/client
for path in "$protos"/pagewire/v1/*.proto; do
  file=pagewire/v1/$(basename "$path")
  set -- "$@" "--go_opt=M$file=$package" "--go-grpc_opt=M$file=$package" "$file"
done
${PROTOC:-protoc} -I"$protos" "$@"
