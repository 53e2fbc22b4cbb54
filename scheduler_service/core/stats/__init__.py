"""Counters, timings, measured throughput and status pages of the core."""
