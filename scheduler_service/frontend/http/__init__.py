"""HTTP on a frontend: OpenAI's API, metrics, health and the dashboard.

    client ──HTTP──▶ connection ─▶ middleware ─▶ app (FastAPI) ─▶ a router ─▶ request_manager

| module | holds |
| --- | --- |
| `server` | sockets, TLS and shutdown |
| `connection` | one connection: uvicorn's protocol with limits |
| `app` | the application and its OpenAPI document |
| `middleware` | what endpoints use, their caller; who is admitted, and complete error answers |
| `request_body` | JSON bodies: bounded, parsed and validated, off the loop if they are large |
| `inert_fields` | fields of bodies that are ignored, redundant or not supported, in one table |
| `content_coding` | compressed bodies |
| `errors` | errors in OpenAI's shape, in one table |
| `openai/` | `/v1/…` |
| `anthropic` | `/v1/messages` |
| `pooling/` | vectors, scores, ranks and labels: `/v1/embeddings` and others |
| `monitoring`, `tokenize` | health and metrics; `/tokenize` and its like, `/version` |
| `unsupported` | what vLLM's server answers and this one does not, by path |
| `dashboard/` | the deployment's state in a browser |

A thin translation: every request becomes the same protobuf message that a gRPC client would send
and goes through the same `RequestManager`, so limits, deadlines, recovery and the tokens themselves
are the same.

It runs in the frontend's own event loop. The libraries are imported only if HTTP is enabled, in a
thread, so that a frontend without it starts as fast as before and one with it already speaks gRPC
by then; the sockets are bound at once, so that callers wait instead of being refused.

Another endpoint is a route of its module's `router`, and the module an entry of `app.ENDPOINTS`. A
body that generates is a function with `openai.serving.generation_endpoint`.
"""
