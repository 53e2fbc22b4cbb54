"""The adapters of each model: which name means which content, on all workers of the model.

The *table* of a model is an `AdapterSet`. Every worker keeps it, with the contents of all adapters
in it, and sends it when it registers. Each change has a greater version, and of several tables the
one with the greatest version is valid: so a core that restarts gets the table back from its
workers, and a worker that joins gets it from the core, before it serves.

    load      every worker has the content ──▶ every worker has the new table ──▶ the core and its
              frontends know the name. A failure on the way restores the previous table everywhere.
    unload    the other way round. The content is *retained* while requests may use it.

A content goes by its digest. A request has the digest in its context, so that it continues with the
same weights when its adapter's name is loaded again with others, or unloaded. Nobody can ask a
frontend that is away whether it has such requests: retained contents are kept for at least
`retain_s`, in which it returns and submits them again.

A core that has just started does not know all tables. Until `settle_s` have passed, in which every
worker that is alive registers, it announces its tables as *settling*.

`directory.py`        all models: what is announced, loads and unloads by operators
`model_adapters.py`   one model: its valid table, and the workers that have it
`distribution.py`     how tables and contents get to workers
`tables.py`           tables as values
"""
