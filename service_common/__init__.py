"""What both the scheduler's and the worker's services need, as neither may import the other.

Only what is the same for both and knows of neither: the standard library is all it
imports, and OpenTelemetry where spans are asked for.
"""
