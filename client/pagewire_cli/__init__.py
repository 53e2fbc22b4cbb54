"""The `pagewire` command: a module for each subcommand, and what they share.

| module | holds |
| --- | --- |
| `app` | the subcommands together; errors as one line and an exit code |
| `serve`, `demo` | a deployment on this machine; one that shows the embedded model and ends |
| `generate`, `chat` | one answer; a conversation |
| `status` | how a deployment is doing |
| `health` | whether one service serves, for health checks |
| `top`, `top_screen` | the same, live and block by block |
| `drain` | takes a worker group out of service |
| `adapter` | loads, unloads and lists LoRA adapters |
| `key` | makes API keys |
| `bench` | latencies and throughput under load |
| `services` | one service alone, as a cluster runs it; the conformance kit; replay |
| `load/` | the load generator behind `bench` |
| `local/` | services started and supervised by this process, for `serve`, `demo` and `LLM` |
| `options` | groups of options that commands share |
| `command` | how arguments are read: unknown options together, vLLM's spellings |
| `foreign_flags` | what other engines' flags are called here, or why there is none |
| `terminal` | where answers, notes and errors are written |

Answers go to standard output, everything else to standard error.
"""

import os
import sys
from io import TextIOWrapper

from pagewire.standard_streams import open_standard_streams

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name."""
    open_standard_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that is not of UTF-8 shows the rest of an answer.
        sys.stdout.reconfigure(errors="replace")
    # gRPC's core writes of each closed connection to stderr, in a format of its own. Services that
    # are started from here inherit the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Ctrl-C may be pressed while the commands are still being imported.
    try:
        if sys.argv[1:2] == ["health"]:  # without importing the other commands
            from pagewire_cli import health

            sys.exit(health.main(sys.argv[2:]))
        from pagewire_cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
