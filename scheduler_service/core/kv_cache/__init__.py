"""The KV cache of one worker group: blocks on the device and on the host, and the prefix cache."""
