"""One child process: its output, its restarts, and its end."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagewire_cli.local import service_commands
from pagewire_client.errors import LocalServiceError

logger = logging.getLogger(__name__)

OnLine = Callable[[str, str], None]
"""Called with a service's name and a line of its output, from a thread of that service."""

_LAUNCHER = Path(__file__).with_name("parent_death_signal.py")
_MAX_BACKOFF_S = 10.0
_LONG_LIFE_S = 30.0
"""A process that lived this long had started successfully."""
_MAX_FAILED_STARTS = 5
_NUM_LAST_LINES = 30
_READ_S, _LAST_READ_S = 1.0, 10.0
"""Time to read what a process said before it ended: usually, and if it is given up. A process that
it started may hold the pipe open."""
_REASON = "error: "
"""Prefix of the line in which a service reports why it ends."""


class ServiceProcess:
    """A service that is kept alive: restarted with backoff when it dies.

    Its thread starts the process and waits for it, and so lives as long as the process, which the
    parent-death signal needs (see `parent_death_signal`).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_line: OnLine | None,
        on_failure: Callable[[], None],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: the arguments of `python -m`. `on_line`: shows its output; None: it is not
        shown, and an error contains its last lines. `on_failure`: called when the service is given
        up. `env`: its whole environment; None: this process's."""
        self.name = name
        self.restartable = False
        """Whether the service is restarted when it dies; to be set once it has served."""
        self.max_failed_starts = _MAX_FAILED_STARTS
        """Most consecutive restarts that end early."""
        self.failure: LocalServiceError | None = None
        """Why the service was given up."""
        self.gave_reason = True
        """Whether that is in the service's own words; else its output has it."""
        self.num_starts = 0
        self.exit_code: int | None = None
        """Exit code of the last process that has ended; below 0: a signal's number."""
        self._command = list(command)
        self._on_line = on_line
        self._on_failure = on_failure
        self._env = service_commands.environment() if env is None else env
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._keeper = threading.Thread(target=self._keep_alive, name=name, daemon=True)

    @property
    def command(self) -> list[str]:
        """The arguments of `python -m`."""
        return list(self._command)

    @property
    def pid(self) -> int | None:
        """Id of the running process."""
        process = self._process
        return process.pid if process and process.poll() is None else None

    def start(self) -> None:
        """Start it, and keep it alive from now on."""
        self._keeper.start()

    def terminate(self) -> None:
        """Ask the service to stop gracefully; it is not restarted."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def join(self, timeout_s: float) -> None:
        """Wait until the service has ended; after `timeout_s` it is killed."""
        if not self._keeper.is_alive():
            return
        self._keeper.join(timeout_s)
        if self._keeper.is_alive():
            logger.warning("killing a service that does not stop service=%s", self.name)
            self.kill()
            self._keeper.join()

    def kill(self) -> None:
        """Kill the service and all processes that it started; it is not restarted."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _keep_alive(self) -> None:
        try:
            self._run_again_and_again()
        except OSError as error:
            self.failure = LocalServiceError(f"cannot start {self.name}: {error}")
        if self.failure:
            self._on_failure()

    def _run_again_and_again(self) -> None:
        failed_starts = 0
        while True:
            started = time.monotonic()
            code = self.exit_code = self._run()
            if self._stopping.is_set():
                return
            if time.monotonic() - started >= _LONG_LIFE_S:
                failed_starts = 0
            if not self.restartable or failed_starts == self.max_failed_starts:
                assert self._reader is not None
                self._reader.join(_LAST_READ_S)  # its last words are those that matter
                self.failure = self._describe(code)
                return
            # Exit code 0: it was asked to end, by a signal or by `pagewire drain`.
            delay = min(_MAX_BACKOFF_S, 0.2 * 2**failed_starts) if code else 0.0
            failed_starts += code != 0
            if self._on_line is not None and (reason := self._reason()):
                self._on_line(self.name, _REASON + reason)
            level = logging.WARNING if code else logging.INFO
            text = "restarting service=%s exit_code=%d delay_s=%.1f"
            logger.log(level, text, self.name, code, delay)
            if self._stopping.wait(delay):
                return

    def _run(self) -> int:
        """Run the process once; returns its exit code."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            process = self._process = self._spawn()
            self.num_starts += 1
        self._last_lines.clear()
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        code = process.wait()
        self._reader.join(_READ_S)
        return code

    def _spawn(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-I", str(_LAUNCHER), str(os.getpid()), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env,
            encoding="utf-8",
            errors="replace",
            # Ctrl-C in a terminal reaches this process only, which stops its children in order.
            process_group=0,
        )

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                text = line.rstrip("\n")
                self._last_lines.append(text)
                # Why it ends is in the failure, or is shown before a restart.
                if self._on_line is not None and not text.startswith(_REASON):
                    self._on_line(self.name, text)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process is None or self._process.poll() is not None:
                return
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _describe(self, code: int) -> LocalServiceError:
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        message = f"{self.name} ended with {end}"
        reason = self._reason()
        self.gave_reason = reason is not None
        if reason is not None:
            message = f"{message}: {reason}" if self.restartable else reason
        elif self._on_line is None:
            message += ":\n" + "\n".join(self._last_lines)
        return LocalServiceError(message, details={"service": self.name, "exit_code": str(code)})

    def _reason(self) -> str | None:
        """The service's own error: a line that begins with `error: `."""
        reasons = [line for line in self._last_lines if line.startswith(_REASON)]
        return reasons[-1][len(_REASON) :] if reasons else None
