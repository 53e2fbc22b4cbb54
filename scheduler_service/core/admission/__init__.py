"""Admission control, and the registry of accepted requests."""
