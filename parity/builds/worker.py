"""The process in which kernels are built: never interpreted, and replaced after a crash or a hang.

Started by `pool.Worker` as `python -m deeptwin.parity.builds.worker FD FD`; the protocol is that of the other worker.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Connection

from ..card import load_card
from ..outcome import Outcome
from ..protocol import BuildRequest, Reply, pack, unpack
from .runner import builder_name

TRACE_FRAMES = 8


def build(request: BuildRequest) -> list[Outcome]:
    """Call the builder that an architecture and a kernel language name."""
    card = load_card(request.component)
    op = card.op(request.op)
    name = builder_name(request.case.dsl, request.arch)
    module = importlib.import_module(name)
    if request.arch == "ascend950":
        return module.build(card, op, request.case)
    return module.build(card, op, request.case, request.arch)


def handle(request: BuildRequest) -> Reply:
    """Build once; an exception is a fault of the builder and becomes a reply."""
    try:
        return Reply(status="ok", builds=tuple(build(request)))
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-TRACE_FRAMES:])
        return Reply(status="error", message=f"{type(error).__name__}: {error}", trace=trace)


def main() -> None:
    """Answer requests on the two file descriptors of the command line until the parent closes its end."""
    inbox = Connection(int(sys.argv[1]), writable=False)
    outbox = Connection(int(sys.argv[2]), readable=False)
    while True:
        try:
            request = unpack(inbox.recv_bytes())
        except EOFError:
            return
        outbox.send_bytes(pack(handle(request)))


if __name__ == "__main__":
    main()
