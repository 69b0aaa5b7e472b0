"""Groups of processes that work together wrongly: what `parity/distributed.py` must see."""

from __future__ import annotations

from ..distributed import Group, Pairs
from ..parallel_runs import (
    Habits,
    bounded_replay,
    context_parallel,
    data_parallel,
    expert_parallel,
    merged_keys,
    moving_experts,
)


def shards_in_reverse(group: Group) -> Pairs:
    """Shards are put together from the last rank to the first."""
    return context_parallel(group, Habits(gather_reversed=True))


def padding_attends(group: Group) -> Pairs:
    """U58: padding rows see a key."""
    return context_parallel(group, Habits(padding_attends=True))


def merged_in_base_2(group: Group) -> Pairs:
    """U03: partial results are weighed as if their LSE were in base 2."""
    return merged_keys(group, Habits(lse_base_2=True))


def cut_by_mates(group: Group) -> Pairs:
    """U73: where a query's keys are cut depends on the batch."""
    return merged_keys(group, Habits(split_by_mates=True))


def kept_rows_of_rank_0(group: Group) -> Pairs:
    """U35: every rank sends the rows that rank 0 should."""
    return bounded_replay(group, Habits(kept_of_rank_0=True))


def combined_by_arrival(group: Group) -> Pairs:
    """U70: the outputs of a token are added in the order of the ranks that hold its experts."""
    return expert_parallel(group, Habits(combine="arrival"))


def combined_by_rank(group: Group) -> Pairs:
    """U70, row 5 of the invariance switch: a rounded sum per rank first, so that copies decide what is rounded."""
    return expert_parallel(group, Habits(combine="partial"))


def copies_of_other_experts(group: Group) -> Pairs:
    """A row goes to the slot of the next rank, whatever it holds."""
    return expert_parallel(group, Habits(next_rank=True))


def placeholders_routed(group: Group) -> Pairs:
    """U37: rows of idle ranks go to experts."""
    return data_parallel(group, Habits(padding_routed=True))


def shared_too_early(group: Group) -> Pairs:
    """U36: weights are copied within a rank before they have arrived."""
    return moving_experts(group, Habits(shared_late=False))


runs: dict[str, int] = {}


def other_bytes_next_time(group: Group) -> Pairs:
    """U10: right once, and off by the last bit when it runs again."""
    runs["count"] = runs.get("count", 0) + 1
    pairs = context_parallel(group)
    if runs["count"] == 1:
        return pairs
    return {
        name: (got + 1, expected + 1) if got.numel() else (got, expected) for name, (got, expected) in pairs.items()
    }


def dies(group: Group) -> Pairs:
    """The last rank ends without a word."""
    import os

    if group.rank == group.world - 1:
        os._exit(7)
    return context_parallel(group)


def raises(group: Group) -> Pairs:
    """One rank fails before it meets the others."""
    if group.rank == 1:
        raise RuntimeError("no memory")
    return context_parallel(group)


def never_ends(group: Group) -> Pairs:
    """One rank waits for good."""
    import time

    if group.rank == 0:
        time.sleep(3600)
    return context_parallel(group)


def compares_nothing(group: Group) -> Pairs:
    """No pair at all."""
    return {}
