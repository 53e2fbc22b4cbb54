"""Which worker group serves a waiting request."""
