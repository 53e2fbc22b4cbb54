"""HTTP on a frontend: OpenAI's interface, and whatever else browsers and scrapers ask for.

    client ──HTTP──▶ server (uvicorn) ─▶ app (FastAPI) ─▶ one router per file ─▶ open_requests

A thin translation: every request becomes the same protobuf message that a gRPC client would send
and goes through the same `OpenRequests`, so limits, deadlines, recovery and the tokens themselves
are the same. `errors` turns our errors into OpenAI's, in one table.

It runs in the frontend's own event loop. The libraries are imported only where HTTP is asked for,
in a thread, so that a frontend without it starts as fast as before and one with it already speaks
gRPC by then; the sockets are bound at once, so that callers wait instead of being refused.

A further endpoint is a module with `make_router(services: HttpServices) -> APIRouter`, and its line
in `app.ROUTERS`.
"""
