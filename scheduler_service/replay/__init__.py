"""Records what a scheduler core is told, and runs it again.

The core is a function of its inputs: no clock, no randomness. So its whole life is the list of
what it was told, and a failure is a text file that replays.

    driver ──▶ RecordingCore ──▶ SchedulerCore          recording
                    └──▶ Output ──▶ FILE
    FILE ──▶ RecordingReader ──▶ Replay ──▶ SchedulerCore    `pagewire replay FILE`

`recording.py`   what a recording says: header, entries, hash chains (start reading here)
`codec.py`       dataclasses as JSON and back
`outcomes.py`    plans, news and errors as a recording has them
`recorder.py`    a core that writes down what it is told
`output.py`      the file while it is written, by a thread of its own
`reader.py`      the file while it is read
`exact.py`       runs a recording again and compares
`show.py`, `report.py`   plans and findings as text
`command.py`     `python -m scheduler_service replay`
"""
