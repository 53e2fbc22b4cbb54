"""The `pagewire` command.

| module | holds |
| --- | --- |
| `app` | the commands together, and errors as one line and an exit code |
| `serve` | a deployment on this machine |
| `demo` | the same with the embedded model, shown and ended |
| `generate`, `chat` | one answer; a conversation |
| `status` | how a deployment is doing |
| `top`, `top_screen`, `top_blocks`, `top_rates` | the same, live and block by block |
| `drain` | takes a worker group out of service |
| `bench`, `bench_table` | how fast it answers under load |
| `roles` | one service alone, as a cluster runs it; the conformance kit |
| `options` | groups of options that commands share |
| `terminal` | where answers, notes and errors are written |

Answers go to standard output, everything else to standard error.
"""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name."""
    # Ctrl-C may come while the commands are still being imported.
    try:
        from pagewire_client.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
