"""The process in which candidates run: a crash, a hang or a poisoned device costs one verdict, not the run.

Started by `pool.Worker` as `python -m deeptwin.parity.worker FD FD`; speaks length-prefixed pickles on those two
file descriptors, so that whatever a candidate prints cannot disturb the protocol.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

from .card import case_rng, load_card
from .protocol import Reply, Request, pack, unpack


def handle(request: Request) -> Reply:
    """Run one request; every exception of the candidate becomes a reply."""
    from . import candidates, guard, relations

    for module in request.needs:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return Reply(status="unsupported", message=f"needs {module}: {error}")
    op = load_card(request.component).op(request.op)
    try:
        call = guard.Call(candidates.load(request.candidate), op, request.device)
    except (candidates.CandidateNotFound, guard.SignatureError) as error:
        return Reply(status="broken", message=str(error), trace=_trace(error))
    try:
        if request.task == "outputs":
            outputs = call(request.inputs)
            return Reply(status="ok", outputs={name: x.cpu() for name, x in outputs.items()})
        relation = next(r for r in op.relations if r.name == request.task)
        partner = None
        if request.partner is not None and relation.partner is not None:
            other = load_card(request.component).op(relation.partner)
            partner = guard.Call(candidates.load(request.partner), other, request.device)
        rng = case_rng(request.component, f"{request.op}:{request.task}", request.case_id, request.seed)
        context = relations.Context(op=op, relation=relation, rng=rng, full=request.full, partner=partner)
        return Reply(status="ok", finding=relations.check(call, request.inputs, context))
    except guard.ContractViolation as error:
        return Reply(status="violation", message=str(error))
    except NotImplementedError as error:
        return Reply(status="unsupported", message=str(error) or "NotImplementedError")
    except Exception as error:
        return Reply(status="error", message=f"{type(error).__name__}: {error}", trace=_trace(error))


def _trace(error: BaseException) -> str:
    frames = traceback.format_exception(error)
    return "".join(frames[-12:])


def _poisoned(device: str) -> bool:
    """Whether an earlier fault left the device unusable: CUDA then fails every call, whoever makes it."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def serve(inbox: Connection, outbox: Connection) -> None:
    """Answer requests until the parent closes its end."""
    from .environment import fixed_numerics

    with fixed_numerics():
        while True:
            try:
                request = unpack(inbox.recv_bytes())
            except EOFError:
                return
            reply = handle(request)
            outbox.send_bytes(pack(replace(reply, poisoned=_poisoned(request.device))))


def main() -> None:
    """Entry point: the two file descriptors to read from and write to."""
    inbox = Connection(int(sys.argv[1]), writable=False)
    outbox = Connection(int(sys.argv[2]), readable=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(inbox, outbox)


if __name__ == "__main__":
    main()
