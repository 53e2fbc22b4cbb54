"""Workers, from their registration to their end: each group has a session that runs its steps.

`worker_registry.py`  one stream per worker: registration, heartbeats, the end of its lease
`worker.py`           a registered worker: its lease, and the directives that it gets
`models.py`           what of the groups' models can be served, and in what they must agree
`worker_group.py`     the ranks of a worker group, and its session while it is complete
`worker_session.py`   connects to a group's workers, sizes their caches, runs steps, reconnects
`kept_blocks.py`      what an earlier core has left in the caches of a group's workers
`step_stream.py`      the hot path: plans are sent ahead of the results that come in
`step_watchdog.py`    when a step is overdue, and when a worker group has hung too often
`errors.py`           why a session ends
"""
