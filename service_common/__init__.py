"""Code that the scheduler's and the worker's services share, as neither may import the other.

It depends on neither: no messages of `pagewire.v1`, no tensors. What clients need as well, such as
the check of PEM files, is in the package `pagewire`.

| module | holds |
| --- | --- |
| `errors`, `grpc_status` | the root of all errors, and errors as gRPC statuses |
| `addresses` | addresses to listen on, and whether they are free |
| `durations` | durations that settings may have |
| `grpc_server`, `grpc_options` | a server with health and reflection; limits, keepalive |
| `interceptors`, `metadata` | the guard of calls; what metadata contains |
| `cluster`, `tls` | credentials between the services of a deployment |
| `config_flags` | command lines, whose flags are derived from configuration dataclasses |
| `threads` | whether the system lets a service start its threads |
| `end_signals` | whether a signal that ends a process is of a second request |
| `prometheus`, `metrics_server` | metrics and histograms; the port that Prometheus scrapes |
| `logging_config`, `tracing` | log lines, spans |
| `garbage` | short pauses for Python's garbage collector |
| `chat_parsers` | names of the formats of reasoning and tool calls |
| `lark`, `token_bytes` | grammars of constraints; the bytes of tokens |
| `watched_files`, `version` | files that are reread when they change, the version |
"""
