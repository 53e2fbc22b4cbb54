"""What both the scheduler's and the worker's services need, as neither may import the other.

Only what is the same for both and knows of neither: no message of `pagewire.v1`, no tensor.

| module | holds |
| --- | --- |
| `errors`, `statuses` | the root of all errors, and what callers are told of them |
| `addresses` | what can be listened on, and why not |
| `grpc_server`, `grpc_options` | a server with health and reflection; bounds, keepalive |
| `cluster`, `tls`, `gate`, `metadata` | what members show each other, and who is let in |
| `request_timeout` | ends calls that do not say what they want |
| `metrics_server` | what Prometheus is told, and the port that it asks at |
| `log_format`, `repetition`, `tracing` | log lines, what is said again and again, spans |
| `watched_files`, `version` | files that may change, our version |
"""
