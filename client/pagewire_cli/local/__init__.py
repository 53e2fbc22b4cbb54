"""A deployment on this machine: one core, frontends and workers as child processes.

`LLM`, `pagewire serve` and `pagewire demo` run the services as a cluster would run them: the same
programs, which use gRPC over unix sockets in a private directory.

| module | holds |
| --- | --- |
| `services` | `LocalServices`: starts all, waits until they serve, ends them in order |
| `service_process` | one child: its output, its restarts, its end |
| `parent_death_signal` | makes a child end when this process ends, even if it is killed |
| `packaged_model` | SmolLM2 from a package, for the demo |
| `runtime_directory` | the directory of the sockets, removed with its process |
| `engine_args` | the services' flags, and which service takes which |
| `service_commands` | how each service is started, and which extra it needs |
| `health` | asks a service whether it serves |

A child that dies is restarted: its state is soft, and open streams continue. A child that fails
before all serve, or repeatedly, ends the deployment with its own error message.
"""

from pagewire_cli.local.services import LocalServices

__all__ = ["LocalServices"]
