"""Record and exact replay of a scheduler core.

The core is a function of its inputs: no clock, no randomness. So a recording is the list of its
calls, and a failure is a text file that replays.

    driver ──▶ RecordingCore ──▶ RecordingWriter ──▶ FILE            a deployment with --record
    FILE ──▶ RecordingReader ──▶ ExactReplay ──▶ SchedulerCore       pagewire replay FILE

`recording.py`       the format: header, entries, hash chains (start reading here)
`recorder.py`        a core that records its inputs
`recording_file.py`  the file: written by a thread of its own, and read
`exact_replay.py`    replays a recording and compares plans and outputs
`report.py`          plans and differences as text
`cli.py`             `python -m scheduler_service replay`

Other policies and configurations on a recorded load: `python -m tools.what_if`.
"""
