"""What Prometheus is told of a service of the scheduling side, and the port it asks at.

`metric.py`     what a metric is: name, kind, help, labels; the source of the metrics reference
`counts.py`     counters and histograms that cost a service next to nothing
`labels.py`     labels with a bounded number of values, whatever clients send
`collector.py`  reads a service's numbers on its event loop, whoever asks
`server.py`     `--metrics-port`
`publish.py`    the registry of a process, and its server for as long as it runs

What each service tells is in its own folder: `frontend/metrics.py`, `core_service/metrics.py`.

Names. A metric that means what one of vLLM's means has that one's name (`vllm:…`), so dashboards,
alerts and autoscalers made for vLLM read a Pagewire deployment as it is. All others begin with
`pagewire_`. Nothing has a `vllm:` name that differs in what it counts.
"""
