"""The parent's side of a worker process: start, ask with a time limit, restart after a crash or a timeout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import IO

from .house import worker_environment
from .protocol import BuildRequest, Reply, Request, pack, unpack

LOG_TAIL = 2000


class Worker:
    """One persistent worker process. `ask` never raises for what a candidate does."""

    def __init__(self, device: str = "cpu", timeout: float = 60.0, module: str = "deeptwin.parity.worker") -> None:
        self.device = device
        self.timeout = timeout
        self.module = module
        self.process: subprocess.Popen[bytes] | None = None
        self._inbox: Connection | None = None
        self._outbox: Connection | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        """Spawn the process; what it prints goes to a temporary file."""
        to_child, from_child = os.pipe(), os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(to_child[0]), str(from_child[1])],
            pass_fds=(to_child[0], from_child[1]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=worker_environment(self.device),
            start_new_session=True,
        )
        os.close(to_child[0])
        os.close(from_child[1])
        self._outbox = Connection(to_child[1], readable=False)
        self._inbox = Connection(from_child[0], writable=False)

    def ask(self, request: Request | BuildRequest, timeout: float | None = None) -> Reply:
        """Send one request and wait for its reply; a dead or silent worker is replaced and reported."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        assert self._inbox is not None
        assert self._outbox is not None
        limit = self.timeout if timeout is None else timeout
        try:
            self._outbox.send_bytes(pack(request))
            if not self._inbox.poll(limit):
                self.stop()
                return Reply(status="crashed", message=f"no answer within {limit:g} s (hang): the worker was killed")
            reply: Reply = unpack(self._inbox.recv_bytes())
        except (EOFError, OSError):
            return Reply(status="crashed", message=f"the worker process died: {self._death()}", trace=self._tail())
        if reply.poisoned:
            self.stop()
        return reply

    def _death(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its pipe"
        if code < 0:
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"exit status {code}"

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def stop(self) -> None:
        """Kill the process and everything it started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for handle in (self._inbox, self._outbox, self._log):
            if handle is not None:
                handle.close()
        self.process = self._inbox = self._outbox = self._log = None
