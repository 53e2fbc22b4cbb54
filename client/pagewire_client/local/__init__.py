"""A deployment on this machine: one core, frontends and workers as child processes.

`LLM`, `pagewire serve` and `pagewire demo` run the services as a cluster would run them: the same
programs, speaking gRPC over unix sockets in a private folder.

| module | holds |
| --- | --- |
| `services` | `LocalServices`: starts all, waits until they serve, ends them in order |
| `process` | one child: its output, its restarts, its end |
| `die_with_parent` | a child's first act: to end when this process does, however it ends |
| `private_folder` | where the sockets are, and its end |
| `flags` | the services' flags, and which service takes which |
| `programs` | where the services are installed, and what is missing |
| `health` | asks a service whether it serves |

A child that dies is started again: its state is soft, and open streams go on. One that fails
before all serve, or again and again, ends the deployment with its own error message.
"""

from pagewire_client.local.services import LocalServices

__all__ = ["LocalServices"]
