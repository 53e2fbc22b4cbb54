"""What both the scheduler's and the worker's services need, as neither may import the other.

Only what is the same for both and knows of neither: no message of `pagewire.v1`, no tensor.

| module | holds |
| --- | --- |
| `errors`, `grpc_status` | the root of all errors, and errors as gRPC statuses |
| `addresses` | addresses to listen on, and whether they are free |
| `grpc_server`, `grpc_options` | a server with health and reflection; limits, keepalive |
| `interceptors`, `metadata` | authentication and request timeouts; what travels in metadata |
| `cluster`, `tls` | credentials between the services of a deployment |
| `metrics_server` | the port that Prometheus scrapes |
| `logging_config`, `tracing` | log lines, spans |
| `watched_files`, `version` | files that may change, our version |
"""
