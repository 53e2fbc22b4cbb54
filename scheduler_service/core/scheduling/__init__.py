"""The scheduler of one worker group: which sequences are in its next step."""
