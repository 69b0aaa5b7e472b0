"""How HCA and sliding layers are checked: whole sequences against transformers, and steps over caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deeptwin.reference.config import V4Kind

from ..card import REGIMES, Candidate, Card, Equivalent, Op, Output, Peer, Relation, variants
from ..rules import V4_LAYER, Close
from ..stored_state import CSA2_STORED
from ..v4_draws import (
    StoredPages,
    StoredPool,
    V4Case,
    alone,
    draw_run,
    draw_whole,
    later_tokens,
    moved_pages,
    other_schedules,
    sequences_alone,
)
from .linear import F32_PRODUCT

_mutant, _control = variants("hca")
PEERS = "deeptwin.parity.peers.csa"

HCA = V4Case(kind=V4Kind.HCA, lengths=(9,))
SLIDING = V4Case(kind=V4Kind.SLIDING, lengths=(9,))


def _whole(base: V4Case, full: bool) -> list[V4Case]:
    found = [replace(base, lengths=(n,)) for n in (7, 8)]
    found += [replace(base, lengths=(7, 0, 17, 8)), replace(base, lengths=(0,))]
    found += [replace(base, lengths=(26,), regime=r) for r in (*REGIMES, "rotary")]
    found += [replace(base, lengths=(13,), form=f) for f in ("fused", "fmla")]
    if full:
        found += [replace(base, lengths=(n,), form="wide", regime=r) for n in (127, 130, 258) for r in REGIMES]
    return found


def _exact(base: V4Case, full: bool) -> list[V4Case]:
    found = [replace(base, form=f, lengths=(40, 13, 3)) for f in ("hf", "hf_eps")]
    if full:
        found += [replace(base, form="hf", lengths=(n,)) for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 20)]
    return found


def cases_exact(full: bool) -> list[V4Case]:
    """What transformers takes: nothing is quantised; a large eps shows where it stands."""
    return _exact(HCA, full)


def cases_sliding_exact(full: bool) -> list[V4Case]:
    """The same of a layer without entries."""
    return _exact(SLIDING, full)


def cases_whole(full: bool) -> list[V4Case]:
    """Lengths around the group, packed ones, forms, regimes."""
    return _whole(HCA, full)


def cases_sliding(full: bool) -> list[V4Case]:
    """The same of a layer without entries."""
    return _whole(SLIDING, full)


def _run(base: V4Case, full: bool) -> list[V4Case]:
    found = [replace(base, lengths=(9,), schedule="mixed"), replace(base, lengths=(7, 0, 10), schedule="chunks3")]
    found += [replace(base, lengths=(17, 9), schedule="chunks5", regime="rotary")]
    found += [replace(base, lengths=(12,), schedule="chunks5", form=f) for f in ("fused", "fmla")]
    found += [replace(base, lengths=(10,), schedule="decode")]
    if full:
        found += [replace(base, lengths=(n, 20 - n), schedule=s) for n in range(8) for s in ("mixed", "chunks3")]
        found += [replace(base, lengths=(258,), form="wide", schedule=s) for s in ("one", "mixed", "chunks100")]
    return found


def cases_run(full: bool) -> list[V4Case]:
    """Schedules of one and several sequences."""
    return _run(HCA, full)


def cases_sliding_run(full: bool) -> list[V4Case]:
    """The same of a layer without entries."""
    return _run(SLIDING, full)


def packed(case: V4Case) -> bool:
    """Several sequences of the micro form."""
    return len(case.lengths) > 1 and case.form == "micro" and case.regime == "normal"


def single(case: V4Case) -> bool:
    """One sequence, short enough for many calls."""
    return len(case.lengths) == 1 and case.regime == "normal" and case.tokens in (9, 26) and case.form == "micro"


def decoded(case: V4Case) -> bool:
    """Token by token."""
    return case.schedule == "decode"


def too_long(case: V4Case) -> str | None:
    """What the interpreter cannot do in seconds."""
    if case.tokens > 9 or case.form != "micro" or case.regime != "normal":
        return "the interpreter needs a third of a second a token: judged on a device"
    return None


def whole_too_long(case: V4Case) -> str | None:
    """The steps of the cached form are judged already: two lengths are enough."""
    return too_long(case) or (None if case.lengths in ((8,),) else "the same kernels run in the cached form")


def many_kernels(case: Any) -> str | None:
    """No layer runs lowered on a CPU."""
    return "some twenty kernels in a row, which take minutes to lower: each is run by the card of its component"


def golden_whole() -> list[V4Case]:
    """One of two forms."""
    return [replace(HCA, lengths=(9,), form=f) for f in ("micro", "fused")]


def golden_sliding() -> list[V4Case]:
    """One of two forms."""
    return [replace(SLIDING, lengths=(6,), form=f) for f in ("micro", "fused")]


def golden_run() -> list[V4Case]:
    """A chunk, then decode steps that complete an entry."""
    return [replace(HCA, lengths=(9,), schedule="mixed")]


def golden_sliding_run() -> list[V4Case]:
    """A chunk, then decode steps."""
    return [replace(SLIDING, lengths=(5,), schedule="mixed")]


Y = Output(name="y_tm", rule=V4_LAYER, dtype=torch.bfloat16)
RING = Output(name="ring_pow", rule=StoredPages(part="ring_pow", limit=CSA2_STORED["ring"]), dtype=torch.uint8)


def _exact_op(name: str, cases: Any) -> Op:
    rows = (("transformers", "transformers_dense"), ("transformers-cached", "transformers_dense_cached"))
    return Op(
        name=f"{name}_exact",
        reference=f"deeptwin.reference.hca:{name}",
        outputs=(Output(name="y_tm", rule=Close(rtol=2.0**-6), dtype=torch.float32),),
        cases=cases,
        draw=draw_whole,
        rows={"x_tm": 0},
        out_rows={"y_tm": 0},
        peers=tuple(
            Peer(
                name=peer,
                function=f"{PEERS}:{function}",
                needs=("transformers",),
                explains="fp32 throughout, no quantiser: 3.6e-7 from SEMANTIC by the order of sums; cached: a chunk of "
                "five tokens, then token by token",
                rules={"y_tm": Close(rtol=2e-6)},
            )
            for peer, function in rows
        ),
    )


def _whole_op(name: str, triton: str, cases: Any, golden: Any, mutants: Any) -> Op:
    return Op(
        name=name,
        reference=f"deeptwin.reference.hca:{name}",
        outputs=(Y,),
        cases=cases,
        draw=draw_whole,
        rows={"x_tm": 0},
        out_rows={"y_tm": 0},
        relations=(
            Relation(name="batch_invariant", axis="packed sequences", hook=sequences_alone, only=packed),
            Relation(
                name="causality", axis="later tokens", hook=later_tokens, only=lambda c: single(c) and c.tokens > 9
            ),
        ),
        candidates=(
            Candidate(
                name="triton",
                function=triton,
                interpreter_declines=whole_too_long,
                lowered_declines=many_kernels,
            ),
        ),
        mutants=mutants,
        controls=(_control("right_whole"),),
        golden=golden,
    )


WHOLE = _whole_op(
    "hca_attention",
    "deeptwin.optimized.hca:hca_attention_triton",
    cases_whole,
    golden_whole,
    (
        _mutant("plain_base", "U30", "base 10000 without YaRN in a compressed layer"),
        _mutant("window_plain_base", "U30", "window keys have the plain base, everything else the compressed one"),
        _mutant("output_kept_turned", "U30", "the output keeps the rotation of its keys"),
        _mutant("head_norm_missing", "U11", "the norm of a head is missing, as in V4.1"),
        _mutant("sink_scaled", "U78", "the sink is multiplied by the softmax scale"),
        _mutant("sink_ignored", "U78", "the sink is not in the denominator"),
        _mutant("window_one_short", "U36", "the window is one key short"),
        _mutant("window_one_long", "U36", "the window is one key long"),
        _mutant("two_softmaxes", "U02", "window and entries have a softmax each"),
        _mutant("duplicates_dropped", "U08", "an entry of a token in the window is not attended again"),
        _mutant("bias_missing", "U31", "the positional bias is left out"),
        _mutant("bias_one_place_on", "U31", "the bias of the next place in the group"),
        _mutant("one_softmax_for_all_channels", "U25", "channels share a softmax of their mean logit"),
        _mutant("mean_instead_of_softmax", "U25", "the compressor averages"),
        _mutant("entry_at_its_last_token", "U25", "an entry stands at the position of its last token"),
        _mutant("entry_at_its_centre", "U25", "an entry stands at the centre of its group"),
        _mutant("entry_at_its_number", "U25", "an entry stands at position j instead of r j"),
        _mutant("entry_visible_early", "U25", "an entry is visible before its last token"),
        _mutant("entry_visible_late", "U25", "the entry that ends at the query is not visible"),
        _mutant("every_entry_visible", "U39", "a sequence sees all of its entries"),
    ),
)

SLIDING_WHOLE = _whole_op(
    "sliding_attention",
    "deeptwin.optimized.hca:sliding_attention_triton",
    cases_sliding,
    golden_sliding,
    (
        _mutant("compressed_table", "U30", "the base of compressed layers with YaRN in a sliding layer"),
        _mutant("half_split_pairs", "U12", "queries, keys and output turn channels i and i + 32 together"),
        _mutant("groups_interleaved", "U38", "heads go round the groups of wo_a"),
        _mutant("window_one_short", "U36", "the window is one key short"),
        _mutant("head_norm_missing", "U11", "the norm of a head is missing, as in V4.1"),
    ),
)


def _run_op(name: str, triton: str, cases: Any, outputs: tuple[Output, ...], **rest: Any) -> Op:
    steps = single if name == "hca_run" else decoded  # the interpreter runs the rings of both under hca_run
    relations: tuple[Relation, ...] = (
        Relation(name="chunk_invariant", axis="steps", hook=other_schedules, only=steps),
        Relation(name="batch_invariant", axis="packed sequences", hook=alone, only=packed),
    )
    if name == "hca_run":
        relations += (Relation(name="page_permutation", axis="pages", hook=moved_pages, only=packed),)
    return Op(
        name=name,
        reference=f"deeptwin.reference.hca:{name}",
        outputs=outputs,
        cases=cases,
        draw=draw_run,
        rows={"x_tm": 0},
        out_rows={"y_tm": 0},
        relations=relations,
        candidates=(
            Candidate(
                name="triton",
                function=triton,
                interpreter_declines=too_long,
                lowered_declines=many_kernels,
            ),
        ),
        **rest,
    )


RUN = _run_op(
    "hca_run",
    "deeptwin.optimized.hca:hca_run_triton",
    cases_run,
    (
        Y,
        RING,
        Output(name="main_pow", rule=StoredPages(part="main_pow", limit=CSA2_STORED["ring"]), dtype=torch.uint8),
        Output(name="pool", rule=StoredPool(limit=F32_PRODUCT), dtype=torch.float32),
    ),
    mutants=(
        _mutant("run_history_lost", "U27", "window keys of earlier steps are not seen"),
        _mutant("run_group_split", "U27", "a group that a step cuts loses its first tokens"),
        _mutant("run_entry_visible_early", "U25", "an entry is visible before its last token"),
        _mutant("run_entries_never_stored", "U28", "compressed entries are never written"),
        _mutant("run_pool_one_row_on", "U33", "tokens stand one row further in the pool"),
        _mutant("run_logits_and_values_exchanged", "U26", "logits and values of the pool change places"),
    ),
    controls=(_control("right_run"),),
    golden=golden_run,
)

SLIDING_RUN = _run_op(
    "sliding_run",
    "deeptwin.optimized.hca:sliding_run_triton",
    cases_sliding_run,
    (Y, RING),
    mutants=(
        _mutant("sliding_history_lost", "U27", "window keys of earlier steps are not seen"),
        _mutant("sliding_window_one_long", "U36", "the window is one key long"),
        _mutant("sliding_keys_never_stored", "U28", "window keys are never written"),
    ),
    controls=(_control("right_sliding_run"),),
    golden=golden_sliding_run,
)

EXACT, SLIDING_EXACT = _exact_op("hca_attention", cases_exact), _exact_op("sliding_attention", cases_sliding_exact)

CARD = Card(
    component="hca",
    summary="window and every compressed entry in one softmax, and layers with a window alone (V4)",
    contract={
        "dtypes": "x, q, keys bf16; matrices e4m3 in 128 x 128 tiles with UE8M0 scales, rows e4m3 in groups of 128",
        "rounding": "bf16 after every product, norm and rotation; HeadNorm and OutputCast say the rest",
        "records": "584 bytes, sectioned pages at multiples of 576 bytes; the floor is that of config.cache",
        "visibility": "entries j < floor((p + 1) / r), and keys p - W + 1 … p",
        "state": "rings, pages and fp32 pools of one layer; equal bytes after any cut of the text into steps",
        "NaN": "caches may hold anything before their first write",
    },
    ops=(RUN, WHOLE, EXACT, SLIDING_RUN, SLIDING_WHOLE, SLIDING_EXACT),
    equivalents=(
        Equivalent(
            name="the online pool of SGLang",
            reason="maximum, sum and mean of a group instead of its rows: equal but for last bits, not to roll back",
        ),
    ),
)
