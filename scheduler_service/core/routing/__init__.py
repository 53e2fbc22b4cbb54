"""Routing of waiting requests to worker groups."""
