"""Which requests are accepted, and the registry of those that were."""
