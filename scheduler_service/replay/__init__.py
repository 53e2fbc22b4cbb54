"""Records what a scheduler core is told, runs it again, and tries other configurations on it.

The core is a function of its inputs: no clock, no randomness. So its whole life is the list of
what it was told, and a failure is a text file that replays.

    driver ──▶ RecordingCore ──▶ SchedulerCore                       a deployment with --record
                    └──▶ Output ──▶ FILE
    FILE ──▶ RecordingReader ──▶ Replay ──▶ SchedulerCore            pagewire replay FILE
                                   └──▶ TraceReader ──▶ Trace ──▶ simulate(…)     … --with …

Recording and exact replay:

`recording.py`   what a recording says: header, entries, hash chains (start reading here)
`codec.py`       dataclasses as JSON and back
`outcomes.py`    plans, news and errors as a recording has them
`recorder.py`    a core that writes down what it is told
`output.py`      the file while it is written, by a thread of its own
`reader.py`      the file while it is read
`exact.py`       runs a recording again and compares
`show.py`, `report.py`   plans and findings as text

Other configurations on the same trace, in virtual time:

`lives.py`         what became of requests, as frontends saw it
`trace.py`         what a recording says of users and workers, whatever the scheduler made of it
`cost_model.py`    how long steps take, learned from the recorded ones
`virtual_time.py`  puts a trace to a core
`overrides.py`     configurations as they are written on a command line
`comparison.py`, `latencies.py`              the same requests under each configuration
`comparison_report.py`, `plot.py`            tables and a picture

`command.py`     `python -m scheduler_service replay`
"""
