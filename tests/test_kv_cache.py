"""Caches as bytes: records, pages, sizes; laws of the reference, then what both sides refuse."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from deeptwin.optimized.kv_cache import load_records_triton, norm_rope_store_triton, store_records_triton
from deeptwin.parity import goldens
from deeptwin.parity.__main__ import app
from deeptwin.parity.card import load_card
from deeptwin.reference.cache_plan import (
    CachePlan,
    Piece,
    bytes_per_token,
    cache_view,
    page_bytes,
    page_pieces,
    state_bytes,
    state_pieces,
    v41_flash_caches,
)
from deeptwin.reference.config import (
    INDEX_FP4,
    INDEX_FP8_F32,
    KV_FP4,
    KV_FP8,
    KV_V32_FMLA,
    RECORD_WRITERS,
    FusedStore,
    PageLayout,
    RecordFormat,
    RecordTap,
    RopeConfig,
    WeightCast,
)
from deeptwin.reference.kv_cache import load_records, norm_rope_store, pack_records, store_records, unpack_records
from deeptwin.reference.numerics import CONTRACT, SEMANTIC
from deeptwin.reference.quant import fake_quantize
from deeptwin.reference.rms_norm import rms_norm
from deeptwin.reference.rope import rope_frequencies, rope_table

INTERLEAVED, SECTIONED = PageLayout.INTERLEAVED, PageLayout.SECTIONED
FORMATS = (KV_FP8, KV_FP4, INDEX_FP4)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
both_layouts = pytest.mark.parametrize("layout", PageLayout, ids=lambda layout: layout.value)
TABLE = rope_table(torch.arange(64), rope_frequencies(RopeConfig(rope_dim=64, theta=10000.0, yarn=None)))
CARD = load_card("kv_cache")


def normal(*shape: int, seed: int = 0) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)


def canary(pages: int, slots: int, fmt: RecordFormat, gap: int = 0) -> Tensor:
    """A cache of random bytes whose pages lie `gap` bytes apart."""
    rng = np.random.Generator(np.random.Philox(1))
    size = slots * fmt.record_bytes
    block = torch.from_numpy(rng.integers(0, 256, (pages, size + gap), dtype=np.uint8))
    return block[:, :size].unflatten(1, (slots, fmt.record_bytes))


def plan(tap: RecordTap = RecordTap.ROPE, layout: PageLayout = INTERLEAVED) -> FusedStore:
    return FusedStore(eps=1e-20, layout=layout, tap=tap)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.tolist() == b.tolist()


# properties of the reference


def test_bytes_of_a_record_by_hand() -> None:
    # 0.5 is e2m1 code 1, 6 is code 7; the even channel is in the low nibble: 0x71
    x = torch.zeros(1, 128)
    x[0, :2] = torch.tensor([0.5, 6.0])
    x[0, 32:34] = torch.tensor([1.0, 12.0])
    record = pack_records(x, fmt=INDEX_FP4)[0].tolist()
    assert record[:1] == [0x71]
    assert record[16:17] == [0x71]
    # scales 1, 2 and that of an all-zero group, 6 * 2^-126 / 6, in the order of the groups: little-endian in a word
    assert record[64:] == [127, 128, 1, 1]
    # amax 3.5 under an e4m3 scale: 3.5 / 6 is nearest to 0.5625 = 1.125 * 2^-1, byte 0x31
    x = torch.full((1, 512), 3.5)
    record = pack_records(x, fmt=KV_FP4)[0].tolist()
    assert record[:256] == [0x77] * 256
    assert record[256:] == [0x31] * 32


def test_a_zero_row_has_the_scale_of_the_floor() -> None:
    # P2(1e-4 / 448) = 2^-22, byte 105; 6 * 2^-9 / 6 = 2^-9, the smallest e4m3 number
    zeros = torch.zeros(1, 512)
    assert set(pack_records(zeros, fmt=KV_FP8)[0, 512:].tolist()) == {105}
    assert set(pack_records(zeros, fmt=KV_FP4)[0, 256:].tolist()) == {1}
    assert set(pack_records(zeros[:, :128], fmt=INDEX_FP4)[0, 64:].tolist()) == {1}


def test_values_that_are_quantised_again_have_other_bytes() -> None:
    # 3.515625 / 2^-6 = 225 lies between 224 and 232: scale byte 121 and code 224, again: 120 and 448
    x = torch.zeros(1, 512)
    x[0, 0] = 3.515625
    once = pack_records(x, fmt=KV_FP8)
    again = pack_records(unpack_records(once), fmt=KV_FP8)
    assert (once[0, 512].item(), once[0, :1].view(torch.float8_e4m3fn).item()) == (121, 224.0)
    assert (again[0, 512].item(), again[0, :1].view(torch.float8_e4m3fn).item()) == (120, 448.0)
    assert torch.equal(unpack_records(once), unpack_records(again))


@every_format
def test_records_are_the_round_trip_of_the_quantiser(fmt: RecordFormat) -> None:
    x = normal(9, fmt.channels) * torch.exp2(torch.arange(9) - 4.0)[:, None]
    records = pack_records(x, fmt=fmt)
    assert records.shape == (9, {"kv_fp8": 528, "kv_fp4": 288, "index_fp4": 68}[fmt.name])
    values = unpack_records(records)
    assert torch.equal(values, fake_quantize(x, fmt=fmt.quant))
    # code times scale is exact in bf16
    assert torch.equal(values, unpack_records(records, dtype=torch.float32))
    assert torch.equal(values, unpack_records(records, num=SEMANTIC))


@both_layouts
@every_format
@settings(max_examples=8, deadline=None)
@given(pages=st.integers(1, 3), slots=st.sampled_from([1, 5, 32, 64, 128, 133]), data=st.data())
def test_a_page_returns_what_was_stored_and_keeps_the_rest(
    fmt: RecordFormat, layout: PageLayout, pages: int, slots: int, data: st.DataObject
) -> None:
    cache = canary(pages, slots, fmt, gap=48)
    before = cache.clone()
    chosen = data.draw(st.lists(st.integers(-3, pages * slots + 2), max_size=6, unique=True))
    where = torch.tensor(chosen, dtype=torch.int64)
    x = normal(len(chosen), fmt.channels)
    store_records(cache, x, where, layout=layout)
    inside = (where >= 0) & (where < pages * slots)
    expected = fake_quantize(x, fmt=fmt.quant)
    expected[~inside] = 0
    assert torch.equal(load_records(cache, where, layout=layout), expected)
    others = torch.tensor([s for s in range(pages * slots) if s not in chosen], dtype=torch.int64)
    for untouched in (others[:3], others[-3:]):
        kept = load_records(before, untouched, layout=layout), load_records(cache, untouched, layout=layout)
        assert same_bits(kept[0].nan_to_num(), kept[1].nan_to_num())
    assert int((cache != before).sum()) <= int(inside.sum()) * fmt.record_bytes


@every_format
def test_the_two_layouts_of_a_page(fmt: RecordFormat) -> None:
    x, where = normal(3, fmt.channels), torch.tensor([0, 1, 2])
    pages = {layout: torch.zeros(1, 3, fmt.record_bytes, dtype=torch.uint8) for layout in PageLayout}
    for layout, cache in pages.items():
        store_records(cache, x, where, layout=layout)
    records = pack_records(x, fmt=fmt)
    assert torch.equal(pages[INTERLEAVED][0], records)
    sections = [records[:, : fmt.data_bytes].flatten(), records[:, fmt.data_bytes :].flatten()]
    assert torch.equal(pages[SECTIONED].flatten(), torch.cat(sections))
    # the number of bytes does not tell them apart, and the wrong one reads other values
    wrong = load_records(pages[SECTIONED], where, layout=INTERLEAVED)
    assert not torch.equal(wrong.nan_to_num(), fake_quantize(x, fmt=fmt.quant))


def test_scales_of_a_page_of_256_come_back_in_place() -> None:
    # every entry has a scale of its own, 2^(t mod 8)
    x = torch.exp2(torch.arange(256) % 8).to(torch.bfloat16)[:, None].expand(256, 128) * 6
    for layout in PageLayout:
        cache = canary(1, 256, INDEX_FP4)
        store_records(cache, x, torch.arange(256), layout=layout)
        assert torch.equal(load_records(cache, torch.arange(256), layout=layout), x.to(torch.float64))


def test_rows_without_a_slot_and_memory_without_a_name_may_hold_nan() -> None:
    x = normal(3, 512)
    x[1] = torch.nan
    cache = torch.full((2, 4, 528), 0xFF, dtype=torch.uint8)
    store_records(cache, x, torch.tensor([5, -1, 6]), layout=SECTIONED)
    loaded = load_records(cache, torch.tensor([6, -1, 8, 5, -(2**31)], dtype=torch.int32), layout=SECTIONED)
    assert loaded.isfinite().all()
    assert loaded[1].abs().max() == loaded[2].abs().max() == loaded[4].abs().max() == 0
    assert load_records(cache, torch.tensor([0]), layout=SECTIONED).isnan().all()


def test_a_nan_code_spoils_its_element_and_a_nan_scale_its_group() -> None:
    records = pack_records(normal(2, 512), fmt=KV_FP8)
    records[0, 3], records[1, 512] = 0x7F, 0xFF
    values = unpack_records(records)
    assert values.isnan().nonzero().tolist() == [[0, 3], *([1, i] for i in range(32))]


def test_pieces_of_a_shared_block_do_not_touch_each_other() -> None:
    plan_ = v41_flash_caches()
    block = torch.full((2, page_bytes(plan_)), 7, dtype=torch.uint8)
    piece = next(p for p in page_pieces(plan_) if (p.layer, p.name) == (14, "main"))
    store_records(cache_view(block, piece), normal(2, 512), torch.tensor([63, 64]), layout=INTERLEAVED)
    changed = (block != 7).nonzero()
    assert changed[:, 1].min() >= piece.offset
    assert changed[:, 1].max() < piece.offset + piece.size
    assert set(changed[:, 0].tolist()) == {0, 1}


@every_format
def test_the_fused_store_is_norm_then_rope_then_store(fmt: RecordFormat) -> None:
    x, weight, positions = normal(5, fmt.channels), normal(fmt.channels, seed=1), torch.tensor([0, 1, 2, 31, 63])
    where = torch.tensor([4, -1, 0, 2, 99])
    taps = {}
    for tap in RecordTap:
        cache = canary(1, 5, fmt)
        got, taps[tap] = norm_rope_store(cache, x, weight, TABLE, positions, where, store=plan(tap))
        assert got is cache
    assert taps[RecordTap.NONE].shape == (5, 0)
    assert torch.equal(taps[RecordTap.NORM], rms_norm(x, weight, eps=1e-20, cast=WeightCast.AFTER_WEIGHT))
    # position 0 turns nothing, and the channels before the last 64 never turn
    assert torch.equal(taps[RecordTap.ROPE][0], taps[RecordTap.NORM][0])
    assert torch.equal(taps[RecordTap.ROPE][:, :-64], taps[RecordTap.NORM][:, :-64])
    assert not torch.equal(taps[RecordTap.ROPE][1:, -64:], taps[RecordTap.NORM][1:, -64:])
    assert torch.equal(taps[RecordTap.CAST_BACK], fake_quantize(taps[RecordTap.ROPE], fmt=fmt.quant))
    # the tail is quantised like the rest
    assert not torch.equal(taps[RecordTap.CAST_BACK][:, -64:], taps[RecordTap.ROPE][:, -64:])
    stored = load_records(cache, where, layout=INTERLEAVED)
    assert torch.equal(stored[[0, 2, 3]], taps[RecordTap.CAST_BACK][[0, 2, 3]])
    assert stored[[1, 4]].abs().max() == 0


def test_rope_turns_neighbouring_channels_of_the_tail() -> None:
    # a unit vector in channel 448 at position 1 moves into channel 449, by cos 1 and sin 1
    x = torch.zeros(1, 512)
    x[0, 448] = 1.0
    cache = torch.zeros(1, 1, 528, dtype=torch.uint8)
    _, turned = norm_rope_store(
        cache,
        x,
        torch.full((512,), 512.0**-0.5),
        TABLE,
        torch.tensor([1]),
        torch.tensor([0]),
        store=plan(),
        num=SEMANTIC,
    )
    assert turned[0, 448:450].tolist() == pytest.approx([0.5403023, 0.8414710], rel=1e-6)
    assert turned[0, 450:].abs().max() == turned[0, :448].abs().max() == 0


def test_zero_rows_and_no_rows() -> None:
    cache = canary(1, 2, KV_FP4)
    weight, none = torch.ones(512), torch.zeros(0, dtype=torch.int64)
    for num in (SEMANTIC, CONTRACT):
        _, tap = norm_rope_store(
            cache, torch.zeros(1, 512), weight, TABLE, torch.tensor([9]), torch.tensor([1]), store=plan(), num=num
        )
        assert tap.abs().max() == 0
    before = cache.clone()
    _, tap = norm_rope_store(cache, torch.zeros(0, 512), weight, TABLE, none, none, store=plan())
    store_records(cache, torch.zeros(0, 512), none, layout=INTERLEAVED)
    assert tap.shape == load_records(cache, none, layout=INTERLEAVED).shape == (0, 512)
    assert torch.equal(cache, before)


# the sizes of v41-attention.md section 7


def test_a_token_costs_890_bytes() -> None:
    assert [fmt.record_bytes for fmt in FORMATS] == [528, 288, 68]
    assert bytes_per_token(v41_flash_caches()) == 890 == Fraction(5, 2) * (288 + 68)
    assert bytes_per_token(v41_flash_caches(main=KV_FP8)) == 1490


def test_the_page_of_128_tokens() -> None:
    found = [(p.layer, p.name, p.offset, p.size) for p in page_pieces(v41_flash_caches())]
    assert found == [
        (2, "index", 0, 4352),
        (2, "main", 4352, 18432),
        (8, "index", 22784, 4352),
        (8, "main", 27136, 18432),
        (14, "index", 45568, 4352),
        (14, "main", 49920, 18432),
        (20, "index", 68352, 8704),
        (20, "main", 77056, 36864),
    ]
    assert found[-1][2] + found[-1][3] == 113920 == 128 * 890
    assert page_bytes(v41_flash_caches()) == 114048


def test_the_state_of_a_sequence() -> None:
    caches = v41_flash_caches()
    pieces = state_pieces(caches)
    rings, compressors = [p for p in pieces if p.name == "ring"], [p for p in pieces if p.name == "compressor"]
    assert (len(rings), rings[0].size, rings[0].entries) == (43, 70752, 134)
    assert [(p.layer, p.size, p.entries) for p in compressors] == [(layer, 28672, 7) for layer in (2, 8, 14)]
    assert rings[caches.encoder_layers].offset == 1415040 == 20 * 70752
    assert 1713312 == 23 * 70752 + 3 * 28672 == pieces[-1].offset + pieces[-1].size - 1415040
    assert pieces[-1].offset + pieces[-1].size == 3128352
    assert state_bytes(caches) == 3128928


def test_sizes_follow_the_layer_map() -> None:
    # one more owner of ratio 2 costs 178 bytes a token; a model without ratio 1 has no decoder
    caches = v41_flash_caches()
    assert bytes_per_token(replace(caches, owners=(2, 5, 8, 14, 20))) == 890 + 178
    tiny = CachePlan(
        ratios=(0, 2, 2, 0), owners=(1,), draft_layers=1, page_tokens=16, window=4, backtracking=6, main=KV_FP4
    )
    assert (tiny.encoder_layers, tiny.ring, page_bytes(tiny)) == (3, 10, 3456)
    assert [p.offset % 32 for p in page_pieces(replace(tiny, page_tokens=2))] == [0, 0]


def test_show_prints_the_computed_sizes() -> None:
    shown = CliRunner().invoke(app, ["show", "kv_cache"])
    assert shown.exit_code == 0
    for number in ("890", "1490", "114048", "3128928", "70752"):
        assert number in shown.output


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("kv_cache") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("kv_cache", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

SLOT = torch.tensor([0])
KNOWN = r"528 \(kv_fp8\), 288 \(kv_fp4\), 68 \(index_fp4\), .* bytes"


@pytest.mark.parametrize("width", [583, 592, 0])
def test_unknown_record_widths_are_refused_by_naming_the_known_ones(width: int) -> None:
    cache, x = torch.zeros(1, 2, width, dtype=torch.uint8), torch.zeros(1, 512)
    for store in (store_records, store_records_triton):
        with pytest.raises(ValueError, match=f"cache_pow_: expected records of {KNOWN}, got {width}"):
            store(cache, x, SLOT, layout=INTERLEAVED)
    for load in (load_records, load_records_triton):
        with pytest.raises(ValueError, match=f"cache_pow: expected records of {KNOWN}, got {width}"):
            load(cache, SLOT, layout=INTERLEAVED)
    with pytest.raises(ValueError, match=f"records_tw: expected records of {KNOWN}, got {width}"):
        unpack_records(cache[0])


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match="x_td: expected d=512, got d=128"):
        pack_records(torch.zeros(1, 128), fmt=KV_FP8)
    with pytest.raises(ValueError, match="expected finite values, got nan"):
        pack_records(torch.full((1, 512), torch.nan), fmt=KV_FP8)
    with pytest.raises(TypeError, match="x_tm: expected"):
        pack_records(torch.zeros(1, 512, dtype=torch.int32), fmt=KV_FP8)
    with pytest.raises(TypeError, match="records_tw: expected torch.uint8"):
        unpack_records(torch.zeros(1, 528, dtype=torch.int8))
    with pytest.raises(TypeError, match="dtype: expected"):
        unpack_records(torch.zeros(1, 528, dtype=torch.uint8), dtype=torch.float64)


def test_bad_input_of_a_store_is_refused() -> None:
    cache, x = torch.zeros(2, 2, 528, dtype=torch.uint8), torch.zeros(1, 512)
    for store in (store_records, store_records_triton):
        with pytest.raises(ValueError, match="x_td: expected d=512, got d=511"):
            store(cache, x[:, 1:], SLOT, layout=INTERLEAVED)
        with pytest.raises(ValueError, match="slots_t: expected t=1, got t=2"):
            store(cache, x, torch.tensor([0, 1]), layout=INTERLEAVED)
        with pytest.raises(ValueError, match="cache_pow_: expected pages of 1056 bytes in a row, got strides"):
            store(cache.transpose(0, 1), x, SLOT, layout=INTERLEAVED)
        with pytest.raises(TypeError, match="cache_pow_: expected torch.uint8"):
            store(cache.view(torch.int8), x, SLOT, layout=INTERLEAVED)
        with pytest.raises(TypeError, match="slots_t: expected"):
            store(cache, x, torch.tensor([0.0]), layout=INTERLEAVED)
        with pytest.raises(TypeError, match="x_t.: expected"):
            store(cache, x.to(torch.int32), SLOT, layout=INTERLEAVED)
    with pytest.raises(ValueError, match="slots_t: expected distinct slots, got"):
        store_records(cache, torch.zeros(2, 512), torch.tensor([3, 3]), layout=INTERLEAVED)
    with pytest.raises(ValueError, match="expected finite values"):
        store_records(cache, x * torch.nan, SLOT, layout=INTERLEAVED)
    # slots that name nothing may repeat
    store_records(cache, torch.zeros(2, 512), torch.tensor([-1, -1]), layout=INTERLEAVED)
    assert cache.max() == 0


def test_bad_input_of_a_load_is_refused() -> None:
    cache = torch.zeros(2, 2, 528, dtype=torch.uint8)
    for load in (load_records, load_records_triton):
        with pytest.raises(TypeError, match="cache_pow: expected torch.uint8"):
            load(cache.view(torch.int8), SLOT, layout=INTERLEAVED)
        with pytest.raises(TypeError, match="slots_t: expected"):
            load(cache, torch.tensor([0.0]), layout=INTERLEAVED)
        with pytest.raises(TypeError, match="dtype: expected"):
            load(cache, SLOT, layout=INTERLEAVED, dtype=torch.float64)
        with pytest.raises(ValueError, match="slots_t: expected 1 dims"):
            load(cache, torch.zeros(1, 1, dtype=torch.int64), layout=INTERLEAVED)
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="out: expected contiguous"):
        load_records_triton(cache, SLOT, layout=INTERLEAVED, out=torch.empty(2, 512, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        load_records_triton(cache, SLOT, layout=INTERLEAVED, out=torch.empty(1, 512))


def test_bad_input_of_the_fused_store_is_refused() -> None:
    cache, x, weight = torch.zeros(1, 2, 528, dtype=torch.uint8), torch.zeros(1, 512), torch.ones(512)
    for fused in (norm_rope_store, norm_rope_store_triton):
        with pytest.raises(ValueError, match="weight_m: expected m=512, got m=7|weight_d: expected d=512, got d=7"):
            fused(cache, x, torch.ones(7), TABLE, SLOT, SLOT, store=plan())
        with pytest.raises(ValueError, match="table_sr: expected an even width up to d=512, got r=63"):
            fused(cache, x, weight, TABLE[:, 1:], SLOT, SLOT, store=plan())
        with pytest.raises(ValueError, match="positions_t: expected t=1, got t=2"):
            fused(cache, x, weight, TABLE, torch.tensor([0, 1]), SLOT, store=plan())
        with pytest.raises(TypeError, match="table_sr: expected torch.float32"):
            fused(cache, x, weight, TABLE.double(), SLOT, SLOT, store=plan())
        with pytest.raises(TypeError, match="positions_t: expected"):
            fused(cache, x, weight, TABLE, torch.tensor([0.0]), SLOT, store=plan())
        with pytest.raises(TypeError, match="cache_pow_: expected torch.uint8"):
            fused(cache.view(torch.int8), x, weight, TABLE, SLOT, SLOT, store=plan())
        with pytest.raises(TypeError, match="weight_.: expected"):
            fused(cache, x, weight.to(torch.int32), TABLE, SLOT, SLOT, store=plan())
    with pytest.raises(ValueError, match=r"positions_t: expected values in \[0, 64\), got 64"):
        norm_rope_store(cache, x, weight, TABLE, torch.tensor([64]), SLOT, store=plan())
    with pytest.raises(ValueError, match="slots_t: expected distinct slots"):
        norm_rope_store(
            cache, x.expand(2, 512), weight, TABLE, torch.tensor([0, 1]), torch.tensor([1, 1]), store=plan()
        )
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        FusedStore(eps=0.0, layout=INTERLEAVED, tap=RecordTap.NONE)


def test_bad_plans_are_refused() -> None:
    caches = v41_flash_caches()
    with pytest.raises(ValueError, match="owners: expected layers with a compression ratio, got 0"):
        replace(caches, owners=(0, 2))
    with pytest.raises(ValueError, match="owners: expected ascending layers"):
        replace(caches, owners=(8, 2))
    with pytest.raises(ValueError, match="page_tokens: expected a multiple of 2, got 127"):
        replace(caches, page_tokens=127)
    with pytest.raises(ValueError, match="main: expected a known record format, got mine"):
        replace(caches, main=RecordFormat(name="mine", channels=64, quant=KV_FP8.quant))
    block = torch.zeros(2, 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block_pq: expected 528 bytes or more, got 100"):
        cache_view(block, Piece(name="main", layer=0, offset=0, size=528, entries=1))
    with pytest.raises(ValueError, match="piece: expected records, got the compressor state of layer 2"):
        cache_view(block, Piece(name="compressor", layer=2, offset=0, size=56, entries=7))


def test_a_store_is_told_its_writer() -> None:
    cache, x, slot = torch.zeros(1, 2, 656, dtype=torch.uint8), torch.zeros(1, 576), torch.tensor([0])
    for store in (store_records, store_records_triton):
        for fmt in (None, KV_FP8, INDEX_FP8_F32):
            with pytest.raises(ValueError, match=r"^fmt: expected kv_v32_fmla, kv_v32_demo for records of 656 bytes"):
                store(cache, x, slot, layout=INTERLEAVED, fmt=fmt)
        with pytest.raises(ValueError, match=r"^fmt: expected kv_fp8 "):
            store(torch.zeros(1, 2, 528, dtype=torch.uint8), x[:, :512], slot, layout=INTERLEAVED, fmt=KV_V32_FMLA)
    fused = FusedStore(eps=1e-6, layout=INTERLEAVED, tap=RecordTap.NONE)
    for function in (norm_rope_store, norm_rope_store_triton):
        with pytest.raises(ValueError, match=r"^fmt: "):
            function(cache, x, torch.ones(576), torch.zeros(1, 64), slot, slot, store=fused)
    assert set(RECORD_WRITERS) == {656, 132, 584}


def test_wide_records_are_refused() -> None:
    pytest.importorskip("triton")
    askew = torch.zeros(2 * 656 + 1, dtype=torch.uint8)[1:].view(1, 2, 656)
    with pytest.raises(NotImplementedError, match=r"^cache_pow_: "):
        store_records_triton(askew, normal(1, 576), torch.tensor([0]), layout=INTERLEAVED, fmt=KV_V32_FMLA)
    with pytest.raises(NotImplementedError, match=r"^cache_pow: "):
        load_records_triton(askew, torch.tensor([0]), layout=INTERLEAVED)
    cache, store = (
        torch.zeros(1, 2, 656, dtype=torch.uint8),
        FusedStore(eps=1e-6, layout=INTERLEAVED, tap=RecordTap.NONE, fmt=KV_V32_FMLA),
    )
    with pytest.raises(NotImplementedError, match=r"^cache_pow_: expected records with scales of one byte"):
        norm_rope_store_triton(
            cache,
            normal(1, 576),
            torch.ones(576),
            torch.zeros(1, 64),
            torch.tensor([0]),
            torch.tensor([0]),
            store=store,
        )
    with pytest.raises(ValueError, match=r"^records_tw: expected w=656"):
        unpack_records(torch.zeros(1, 132, dtype=torch.uint8), fmt=KV_V32_FMLA)
    with pytest.raises(TypeError, match=r"^records_tw: "):
        unpack_records(torch.zeros(1, 656), fmt=KV_V32_FMLA)
    with pytest.raises(ValueError, match=r"^tail: "):
        replace(KV_V32_FMLA, tail=-1)
