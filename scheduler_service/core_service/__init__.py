"""The scheduler core as a service: everything that waits, around a core that never does.

  frontends ─ Attach ────▶ attachments ─┐                    ┌─ registry ◀─ RegisterWorker ─ workers
                                        ├─▶ driver ─▶ core ◀─┤                                  ▲
  operators ─ GetStatus ─▶ status ──────┘                    └─ worker_link ─ ExecuteSteps ─────┘

One process, one event loop, one thread. Every call into the core goes through the `driver`, so the
core needs no lock; after each the driver hands out news and wakes whoever may have work.

`service.py`      the parts put together, and their orderly end (start reading here)
`driver.py`       tells the core the time, sets the alarm for deadlines, carries its news
`attachments.py`  one stream per frontend; the news of a step are one message
`holding.py`      how long its news may wait, so that more go with them
`registry.py`     one stream per worker: registration, heartbeats, lease, directives
`worker_group.py` the ranks of a group: whole or not, and its link while it is
`worker_link.py`  dials a group's workers, sizes their caches, keeps them stepping, dials again
`step_stream.py`  the hot path: plans go out ahead of the results that come in, or are overdue
`hangs.py`        when a group has hung too often
`assets.py`       the models' files, fetched from a worker once
`status.py`       the snapshot for operators; `status_messages.py` has its parts
`metrics.py`      the same for Prometheus; `metric_list.py` has the names, `meters.py` what passes
`request_spans.py` the same of a request, as spans
`servicer.py`     the rpcs, each a line or two
`config.py`, `command.py`, `tenants_file.py`  what can be chosen, and the flags and the file for it

A step: a link asks the core for a plan, which leaves at once, up to `pipeline_depth` ahead of the
results, or `max_steps_together` and one where they travel together. A result comes in, the core
takes it, the next plan leaves, and then the tokens go to their frontends.

Promises. A worker that breaks its stream, its lease or the contract is out at once: its sequences
go back to the core's queue and on elsewhere. While its lease holds it is dialled again, each time
with a greater epoch, so that whatever an older stream still says counts for nothing. A worker whose
steps do not come back is out as well, and after some such in a row until it registers anew. A
frontend's requests end with its stream. On SIGTERM the accepted requests may finish within the
grace period; then the streams end with UNAVAILABLE, and frontends and workers look for the next
core.
"""
