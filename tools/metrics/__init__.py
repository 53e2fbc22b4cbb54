"""The Grafana dashboard, generated from the services' lists of metrics.

python -m tools.metrics.dashboard
"""
