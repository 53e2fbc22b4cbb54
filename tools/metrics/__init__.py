"""What is generated from the services' lists of metrics: docs/metrics.md and the Grafana dashboard.

python -m tools.metrics.reference
python -m tools.metrics.dashboard
"""
