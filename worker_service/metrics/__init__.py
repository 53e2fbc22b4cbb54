"""What Prometheus is told of a worker: its steps, and where the device's time goes.

`meter.py`        counts steps on the thread that collects them
`collector.py`    the meter's numbers, and the worker's state, as Prometheus' samples
`metric_list.py`  names and meanings

How the scheduling side's metrics are named is told in `scheduler_service/metrics`, and holds here.
"""
