"""Argument checks whose messages name the argument, what was got and what was expected."""

from __future__ import annotations

import torch

from .config import RECORD_FORMATS, RECORD_WRITERS, CompressorConfig, PoolAction, RecordFormat, StoreAction


def expect_shape(name: str, x: torch.Tensor, letters: str, dims: dict[str, int]) -> None:
    """Bind each letter of `letters` to a size of `x`; raise ValueError if a bound letter disagrees."""
    if x.dim() != len(letters):
        raise ValueError(f"{name}: expected {len(letters)} dims [{', '.join(letters)}], got shape {tuple(x.shape)}")
    for letter, size in zip(letters, x.shape, strict=True):
        if dims.setdefault(letter, size) != size:
            raise ValueError(f"{name}: expected {letter}={dims[letter]}, got {letter}={size} in shape {tuple(x.shape)}")


def expect_dtype(name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError unless `x.dtype` is one of `allowed`."""
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected {' or '.join(str(d) for d in allowed)}, got {x.dtype}")


def expect_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is greater than zero (NaN is refused too)."""
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def expect_multiple(name: str, value: int, of: int) -> None:
    """Raise ValueError unless `value` is a multiple of `of`."""
    if value % of:
        raise ValueError(f"{name}: expected a multiple of {of}, got {value}")


def expect_finite(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if `x` holds NaN or infinity, naming the first position."""
    bad = ~torch.isfinite(x)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}: expected finite values, got {x[where].item()} at {where}")


def expect_in_range(name: str, x: torch.Tensor, low: int, high: int) -> None:
    """Raise ValueError unless every element of the integer tensor `x` lies in [low, high)."""
    bad = (x < low) | (x >= high)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}: expected values in [{low}, {high}), got {x[where].item()} at {where}")


def expect_records(name: str, cache_pow: torch.Tensor, dims: dict[str, int]) -> RecordFormat:
    """The format of a paged cache of records, uint8 [p, o, w]: w bytes a record, pages without gaps inside.

    Raises:
        TypeError: the cache is not uint8.
        ValueError: no format has records of w bytes, or the o * w bytes of a page do not follow one another.
    """
    expect_dtype(name, cache_pow, torch.uint8)
    expect_shape(name, cache_pow, "pow", dims)
    num_slots, width = cache_pow.shape[1:]
    if width not in RECORD_FORMATS:
        known = ", ".join(f"{size} ({fmt.name})" for size, fmt in RECORD_FORMATS.items())
        raise ValueError(f"{name}: expected records of {known} bytes, got {width} in shape {tuple(cache_pow.shape)}")
    page, slot, byte = cache_pow.stride()
    if byte != 1 or (num_slots > 1 and slot != width) or (cache_pow.shape[0] > 1 and page < num_slots * width):
        raise ValueError(
            f"{name}: expected pages of {num_slots * width} bytes in a row, got strides {cache_pow.stride()}"
        )
    return RECORD_FORMATS[width]


def expect_writer(name: str, cache_pow: torch.Tensor, fmt: RecordFormat | None) -> RecordFormat:
    """The format that a store writes: `fmt` where several writers share a width, otherwise that of the width.

    Raises:
        TypeError: the cache is not uint8.
        ValueError: as `expect_records`; or `fmt` is no writer of that width, or none and there are several.
    """
    found = expect_records(name, cache_pow, {})
    writers = RECORD_WRITERS.get(found.record_bytes, (found,))
    if fmt is None and len(writers) == 1:
        return found
    if fmt is None or fmt not in writers:
        known = ", ".join(writer.name for writer in writers)
        raise ValueError(f"fmt: expected {known} for records of {found.record_bytes} bytes, got {fmt and fmt.name}")
    return fmt


def expect_slots(name: str, slots: torch.Tensor, count: int, high: int, *, distinct: bool) -> None:
    """Raise unless `slots` are `count` integers in [-1, high), those that are not -1 `distinct` if asked for."""
    expect_dtype(name, slots, torch.int32, torch.int64)
    expect_shape(name, slots, "n", {"n": count})
    expect_in_range(name, slots, -1, high)
    used = slots[slots >= 0]
    if distinct and len(used.unique()) != len(used):
        raise ValueError(f"{name}: expected every slot once, got {slots.tolist()}")


def expect_chunk(start_b: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int | None) -> None:
    """Raise unless the packed chunk is well-formed: first positions, and where each sequence begins among `tokens`."""
    expect_chunk_shape(start_b, cu_seqlens)
    if (start_b < 0).any():
        raise ValueError(f"start_b: expected positions from 0 on, got {start_b.tolist()}")
    ends_well = tokens is None or int(cu_seqlens[-1]) == tokens
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any() or not ends_well:
        wanted = "" if tokens is None else f" up to {tokens}"
        raise ValueError(f"cu_seqlens: expected numbers from 0{wanted} that never decrease, got {cu_seqlens.tolist()}")


def expect_chunk_shape(start_b: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """The part of `expect_chunk` that reads no values."""
    expect_dtype("start_b", start_b, torch.int32, torch.int64)
    expect_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    expect_shape("start_b", start_b, "b", {})
    expect_shape("cu_seqlens", cu_seqlens, "n", {"n": len(start_b) + 1})


def expect_step(slot_t: torch.Tensor, position_t: torch.Tensor, ring: int, span: int) -> None:
    """Raise unless the tokens of a slot stand side by side, ascend by one, and leave `span` live ring rows."""
    expect_dtype("position_t", position_t, torch.int32, torch.int64)
    expect_shape("position_t", position_t, "t", {"t": len(slot_t)})
    used_y = (slot_t >= 0).nonzero()[:, 0]
    slot_y, at_y = slot_t[used_y], position_t[used_y]
    begins_y = torch.ones(len(used_y) + 1, dtype=torch.bool, device=slot_t.device)  # a run of one slot, and the end
    begins_y[1:-1] = (slot_y.diff() != 0) | (used_y.diff() != 1)
    starts_b = begins_y.nonzero()[:, 0]
    breaks = (at_y.diff() != 1) & ~begins_y[1:-1]
    apart = len(slot_y.unique()) < len(starts_b) - 1
    if apart or breaks.any() or (at_y < 0).any():
        raise ValueError(
            f"position_t: expected the tokens of a slot side by side, ascending by one, got {position_t.tolist()} in "
            f"slots {slot_t.tolist()}"
        )
    longest = int(starts_b.diff().max()) if len(used_y) else 0
    if longest and ring < span + longest - 1:
        raise ValueError(f"state_: expected a ring of {span + longest - 1} for {longest} tokens, got {ring}")


def expect_rows_to_pool(
    value_tw: torch.Tensor, gate_tw: torch.Tensor | None, bias_rw: torch.Tensor | None, config: CompressorConfig
) -> int:
    """The width of value and gate rows; raise if they, or the bias, do not fit together and to `config`."""
    dims: dict[str, int] = {}
    expect_shape("value_tw", value_tw, "tw", dims)
    expect_dtype("value_tw", value_tw, torch.float32, torch.float64)
    expect_multiple("value_tw (last axis)", dims["w"], config.series)
    if gate_tw is not None:
        expect_shape("gate_tw", gate_tw, "tw", dims)
        expect_dtype("gate_tw", gate_tw, torch.float32, torch.float64)
    elif config.ratio > 1:
        raise ValueError(f"gate_tw: expected logits for ratio {config.ratio}, got None")
    if bias_rw is not None:
        expect_shape("bias_rw", bias_rw, "rw", dims | {"r": config.ratio})
        expect_dtype("bias_rw", bias_rw, torch.float32)
    return dims["w"]


def expect_pooling_state(state_: torch.Tensor, width: int, config: CompressorConfig) -> None:
    """Raise unless `state_` is a ring of float32 logits and values in which an unfinished group finds room."""
    if config.ratio == 1:
        raise ValueError("config: expected a ratio above 1, got 1, which carries nothing over")
    expect_dtype("state_", state_, torch.float32)
    if state_.dim() != 4 or state_.shape[2:] != (2, width) or state_.shape[1] < config.span - 1:
        wanted = f"[slots, ring of at least {config.span - 1}, 2, {width}]"
        raise ValueError(f"state_: expected {wanted}, got shape {tuple(state_.shape)}")


def expect_lengths(length_b: torch.Tensor, dims: dict[str, int]) -> None:
    """Raise unless there is a length, 0 or more, for every request."""
    expect_shape("length_b", length_b, "b", dims)
    expect_dtype("length_b", length_b, torch.int32, torch.int64)
    if (length_b < 0).any():
        raise ValueError(f"length_b: expected no negative lengths, got {length_b.tolist()}")


def expect_key_sets(
    keys_bnk: torch.Tensor, length_b: torch.Tensor, pages_sk: torch.Tensor, states_ik: torch.Tensor
) -> dict[str, int]:
    """The sizes of requests' keys and of stored ones; raise unless all are 32 bytes and lengths are 0 or more."""
    dims = {"k": 32}
    named = (("keys_bnk", keys_bnk, "bnk"), ("pages_sk", pages_sk, "sk"), ("states_ik", states_ik, "ik"))
    for name, x, letters in named:
        expect_shape(name, x, letters, dims)
        expect_dtype(name, x, torch.uint8)
    expect_lengths(length_b, dims)
    return dims


def expect_requests(tokens_bt: torch.Tensor, length_b: torch.Tensor) -> dict[str, int]:
    """The sizes of a batch of requests; raise unless their tokens are none below 0, as many as there is room for."""
    dims: dict[str, int] = {}
    expect_shape("tokens_bt", tokens_bt, "bt", dims)
    expect_dtype("tokens_bt", tokens_bt, torch.int32)
    expect_lengths(length_b, dims)
    expect_in_range("length_b", length_b, 0, dims["t"] + 1)
    named_bt = torch.arange(dims["t"]) < length_b[:, None]
    if (named_bt & (tokens_bt < 0)).any():
        raise ValueError(f"tokens_bt: expected no negative tokens, got {int(tokens_bt[named_bt].min())}")
    return dims


def expect_states(name: str, state_sq: torch.Tensor, state_b: torch.Tensor, end_b: torch.Tensor) -> None:
    """Raise unless `state_b` names states of bytes, and `end_b` says how many tokens are in each."""
    dims: dict[str, int] = {}
    expect_shape(name, state_sq, "sq", dims)
    expect_dtype(name, state_sq, torch.uint8)
    for part, x_b in (("state_b", state_b), ("end_b", end_b)):
        expect_shape(part, x_b, "b", dims)
        expect_dtype(part, x_b, torch.int32, torch.int64)
    expect_in_range("state_b", state_b, 0, dims["s"])


def expect_pool_script(script_nj: torch.Tensor, tables: int) -> None:
    """Raise unless every line is a `PoolAction` on tables that exist and no negative number of tokens."""
    expect_shape("script_nj", script_nj, "nj", {"j": 3})
    expect_dtype("script_nj", script_nj, torch.int32)
    expect_in_range("script_nj (action)", script_nj[:, 0], 0, len(PoolAction))
    first, second = script_nj[:, 1], script_nj[:, 2]
    on_block = (script_nj[:, 0] == PoolAction.PIN) | (script_nj[:, 0] == PoolAction.UNPIN)
    expect_in_range("script_nj (table)", first[~on_block], 0, tables)
    expect_in_range("script_nj (table)", second[script_nj[:, 0] == PoolAction.FORK], 0, tables)
    expect_in_range("script_nj (tokens)", second[script_nj[:, 0] != PoolAction.FORK], 0, 2**31 - 1)


def expect_store_script(script_nj: torch.Tensor, key_pk: torch.Tensor, payload_pq: torch.Tensor) -> None:
    """Raise unless every line is a `StoreAction` on an entry with a key of 32 bytes and a payload."""
    dims = {"j": 3, "k": 32}
    expect_shape("script_nj", script_nj, "nj", dims)
    expect_dtype("script_nj", script_nj, torch.int32)
    for name, x, letters in (("key_pk", key_pk, "pk"), ("payload_pq", payload_pq, "pq")):
        expect_shape(name, x, letters, dims)
        expect_dtype(name, x, torch.uint8)
    expect_in_range("script_nj (action)", script_nj[:, 0], 0, len(StoreAction))
    expect_in_range("script_nj (entry)", script_nj[:, 1], 0, dims["p"])
    expect_in_range("script_nj (number)", script_nj[:, 2], 0, 2**31 - 1)
    swaps = script_nj[script_nj[:, 0] == StoreAction.SWAP]
    expect_in_range("script_nj (entry)", swaps[:, 2], 0, dims["p"])
