"""The contract on the wire; see `pagewire.v1`."""
