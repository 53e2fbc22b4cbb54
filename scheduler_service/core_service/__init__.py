"""The scheduler core as a service: everything that waits, around a core that never does.

  frontends ─Attach───▶ frontend_streams ─┐              ┌─ worker_registry ◀RegisterWorker─ workers
                                          ├▶ driver ▶ core                                       ▲
  operators ─GetStatus─▶ status ──────────┘              └─ worker_session ─ExecuteSteps─────────┘

One process, one event loop, one thread. Every call into the core goes through the `driver`, so the
core needs no lock; after each call the driver delivers outputs and wakes the worker groups that may
have work.

`service.py`          composition and shutdown (start reading here)
`servicer.py`         the RPCs, a line or two each
`driver.py`           calls the core with the current time, sets its timer, delivers outputs
`frontend_streams.py` one stream per frontend; the outputs of a step are one message
`workers/`            registration of workers, and sessions in which their groups run steps
`adapters/`           which adapters the workers of a model have, and under which names
`model_assets.py`     the models' files, fetched from a worker once
`status.py`           the deployment's state as GetStatus returns it
`status_watchers.py`  WatchStatus: snapshots shared by all watchers, at a bounded cost
`metrics.py`          metrics for Prometheus; `counters.py` has what is counted as it happens
`tracing.py`          spans of requests
`config.py`, `cli.py` configuration, the tenants file, and the command line

A step: a session asks the core for a plan, which is sent at once, up to `pipeline_depth` ahead of
the results, or `max_results` and one where they travel together. A result comes in, the core
takes it, the next plan leaves, and then the tokens go to their frontends.

Promises. A worker that breaks its stream, its lease or the contract is removed at once: its
sequences return to the core's queue and continue elsewhere. While its lease holds the core
reconnects to it, each time with a greater epoch, so that messages of an older stream are ignored. A
worker whose steps do not return is removed as well, and after several in a row it is not used until
it registers again. A frontend's requests end with its stream. On SIGTERM accepted requests may
finish within the grace period; then the streams end with UNAVAILABLE, and frontends and workers
look for the next core.
"""
