"""How hyper-connections are checked: copies and reads, coefficients, the update, and all of it in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import MHC_V4, MHC_V41, MhcConfig
from deeptwin.reference.numerics import Numerics
from deeptwin.reference.weights import MhcSite

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..relations import CallFn, Context, Variant, row_chunks
from ..rules import Bitwise, Budget, OfStored, OneRounding

FAST = "deeptwin.optimized.mhc"
KERNELS = "deeptwin.kernels.triton_ops.mhc"
_mutant, _control = variants("mhc")
PEERS = "deeptwin.parity.peers.mhc"

# five fp32 terms may cancel: a result is off by up to 2^-21 of the larger ones, which are of the size of the row
FOUR_STREAMS = OneRounding(cancellation=2.0**-13)
# a coefficient inherits the error of its logit, times its size: RIVAL may be lucky, so its distance counts as at least
# one unit. 2 100 judgements of fp32 torch (one sum, 16 ascending splits; 16 cases of mixes, 14 of Sinkhorn, 50 seeds):
# worst element 0.37 of 4 RIVAL + 6, row 2.4, total 2.3, bias 0.78. One iteration more or fewer on logits of deviation 4
# or a projection in TF32 exceed it in 20 of 20 draws
COEFFICIENTS = Budget(
    kind="mhc coefficients", floor=1.0, row=6.0, total=4.0, element_factor=4.0, element_slack=6.0, bias=2.0
)


def _read_again(arguments: dict[str, Any], outputs: Mapping[str, Tensor], num: Numerics) -> Tensor:
    """x of the single pass, from the stream and, where it is not shifted, the coefficients that were stored."""
    from deeptwin.reference.mhc import mhc_apply

    pre_tn = (arguments if arguments["config"].shifted else outputs)["pre_tn"]
    return mhc_apply(pre_tn, outputs["stream_tnm"], num=num)


def _coefficients_again(kind: int, arguments: dict[str, Any], outputs: Mapping[str, Tensor], num: Numerics) -> Tensor:
    """One kind of coefficients of the single pass, from the stream that was stored."""
    from deeptwin.reference.mhc import mhc_mixes

    return mhc_mixes(outputs["stream_tnm"], arguments["site"], config=arguments["config"], num=num)[kind]


def tf32_site(site: MhcSite) -> MhcSite:
    """The weights that the TF32 unit multiplies: rounded to eleven significant bits, to nearest even."""
    bits = site.fn_wx.contiguous().view(torch.int32)
    return replace(site, fn_wx=((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32))


def _by_tf32(kind: int, arguments: dict[str, Any], outputs: Mapping[str, Tensor], num: Numerics) -> Tensor:
    """One kind of coefficients of weights in TF32."""
    from deeptwin.reference.mhc import mhc_mixes

    return mhc_mixes(arguments["stream_tnm"], tf32_site(arguments["site"]), config=arguments["config"], num=num)[kind]


LOGITS = ("mild", "peaked", "training", "faint")


@dataclass(frozen=True, kw_only=True)
class MhcCase:
    """`tokens` rows of four streams of `width`; `logits` says how large the coefficients get before their gates."""

    tokens: int
    width: int
    regime: str = "normal"
    logits: str = "mild"
    config: str = "v41"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-{self.regime}-{self.logits}-{self.config}"


@dataclass(frozen=True, kw_only=True)
class SinkhornCase:
    """`tokens` matrices of logits with standard deviation `sigma`."""

    tokens: int
    sigma: float
    iters: int = 20
    eps: float = 1e-6
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-sigma{self.sigma:g}-i{self.iters}-eps{self.eps:g}-{self.regime}"


def config_of(case: MhcCase) -> MhcConfig:
    """The released configuration that a case names."""
    return {"v41": MHC_V41, "v4": MHC_V4}[case.config]


def draw_stream(case: MhcCase, rng: np.random.Generator) -> Tensor:
    """Four streams of unlike size, as a strided view."""
    rows = draws.rows(rng, case.tokens * 4, case.width, dtype=torch.float32, regime=case.regime)
    sizes = torch.tensor([1.0, 0.5, -2.0, 0.25])[None, :, None]
    return draws.strided((rows.view(case.tokens, 4, case.width) * sizes).to(torch.bfloat16), pad=8)


def draw_site(case: MhcCase, rng: np.random.Generator, outputs: int = 24, kinds: int = 3) -> MhcSite:
    """Weights that give unlike coefficients to every stream; the projected logits have a deviation near one."""
    fn = draws.normal(rng, outputs, 4 * case.width, dtype=torch.float32, scale=(4 * case.width) ** -0.5)
    base = draws.normal(rng, outputs, dtype=torch.float32)
    scale = torch.tensor([1.25, 0.75, 1.5])
    if case.logits == "peaked":
        scale, base = torch.tensor([2.0, -2.0, 6.0]), base * 4
    elif case.logits == "training":
        scale = torch.tensor([0.01, 0.02, 0.03])
        identity = (6 * torch.eye(4) - 3).flatten()
        base = torch.cat([torch.tensor([3.0, -3, -3, -3]), torch.zeros(4), identity])[:outputs]
    elif case.logits == "faint":
        base = base - torch.tensor([16.0] * 8 + [0.0] * 16)[:outputs]
    return MhcSite(fn_wx=draws.strided(fn, pad=4), scale_z=scale[:kinds].clone(), base_w=base)


def draw_pre(case: MhcCase, rng: np.random.Generator) -> Tensor:
    """Coefficients of a read in (eps, 1 + eps), among them one-hot rows and a row of eps alone."""
    drawn = draws.normal(rng, case.tokens, 4, dtype=torch.float32, scale=2.0).sigmoid() + 1e-6
    drawn[3::4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    drawn[4::5] = 1e-6
    return draws.strided(drawn, pad=3)


def draw_comb(case: MhcCase, rng: np.random.Generator) -> Tensor:
    """Matrices with columns that add up to one and rows that do not: nothing hides a transposition."""
    drawn = draws.normal(rng, case.tokens, 4, 4, dtype=torch.float32, scale=2.0).softmax(-2)
    return draws.strided(drawn, pad=2)


def draw_expand(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Embedding rows."""
    rows = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=case.regime)
    return {"x_tm": draws.strided(rows, pad=8), "config": config_of(case)}


def draw_apply(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Coefficients and streams."""
    return {"pre_tn": draw_pre(case, rng), "stream_tnm": draw_stream(case, rng)}


def draw_tap(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Streams."""
    return {"stream_tnm": draw_stream(case, rng)}


def draw_sinkhorn(case: SinkhornCase, rng: np.random.Generator) -> Inputs:
    """Logits that no matrix equals the transposed of; `huge` ones overflow an exponential without its maximum."""
    shape = (case.tokens, 4, 4)
    logits = draws.normal(rng, *shape, dtype=torch.float32, scale=case.sigma)
    if case.regime == "flat":
        logits = draws.normal(rng, *shape, dtype=torch.float32, scale=case.sigma * 0.01)
    elif case.regime == "mean1":
        logits = logits + 1
    elif case.regime == "peaked":
        logits[:, :, 1] += 4 * case.sigma
    elif case.regime == "huge":
        logits = logits * 40 + 100
    elif case.regime == "zeros":
        logits = logits * 0
    return {"logits_tnn": draws.strided(logits, pad=4), "iters": case.iters, "eps": case.eps}


def draw_mixes(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Streams and the weights of a site."""
    return {"stream_tnm": draw_stream(case, rng), "site": draw_site(case, rng), "config": config_of(case)}


def draw_post(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Streams, the output of a sub-layer and how it is written."""
    y = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=case.regime)
    post = draws.normal(rng, case.tokens, 4, dtype=torch.float32).sigmoid() * 2
    return {
        "stream_tnm": draw_stream(case, rng),
        "y_tm": draws.strided(y, pad=8),
        "post_tn": draws.strided(post, pad=3),
        "comb_tnn": draw_comb(case, rng),
    }


def draw_boundary(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Everything that meets between two sub-layers."""
    update = draw_post(case, rng)
    site = {"pre_tn": draw_pre(case, rng), "site": draw_site(case, rng), "config": config_of(case)}
    return update | site


def draw_head(case: MhcCase, rng: np.random.Generator) -> Inputs:
    """Streams and the weights of a head."""
    return {"stream_tnm": draw_stream(case, rng), "site": draw_site(case, rng, 4, 1), "config": config_of(case)}


def _unique(found: list[Any]) -> list[Any]:
    return list({case.id: case for case in found}.values())


def cases_expand(full: bool) -> list[MhcCase]:
    """Production and awkward widths, no tokens."""
    found = [MhcCase(tokens=2, width=w) for w in (1, 48, 5120)] + [MhcCase(tokens=0, width=64)]
    return found + ([MhcCase(tokens=3, width=w) for w in (7168, 1024, 1025)] if full else [])


def cases_read(full: bool) -> list[MhcCase]:
    """Every regime with enough elements for the rate rule, production and awkward widths, no tokens."""
    found = [MhcCase(tokens=5, width=2048, regime=r) for r in (*REGIMES, "zeros", "tiny")]
    found += [MhcCase(tokens=2, width=5120), MhcCase(tokens=6, width=48), MhcCase(tokens=1, width=1)]
    found += [MhcCase(tokens=0, width=64), MhcCase(tokens=2, width=1025), MhcCase(tokens=1, width=128, regime="huge")]
    found += [MhcCase(tokens=6, width=128)]
    if full:
        found += [MhcCase(tokens=9, width=w, regime=r) for w, r in product((1024, 4096, 5120, 7168), REGIMES)]
    return _unique(found)


def cases_sinkhorn(full: bool) -> list[SinkhornCase]:
    """Peaked logits see the number of iterations, flat ones do not; both epsilons, one iteration, no tokens."""
    base = SinkhornCase(tokens=40, sigma=4)
    found = [replace(base, regime=r) for r in (*REGIMES, "huge", "zeros")]
    found += [replace(base, sigma=s) for s in (1, 2, 16)]
    found += [replace(base, tokens=n) for n in (0, 3, 33)]
    found += [replace(base, tokens=33, iters=i) for i in (1, 2)] + [replace(base, eps=1e-3)]
    if full:
        found += [
            replace(base, sigma=s, iters=i, regime=r) for s, i, r in product((0.5, 1, 4, 40), (1, 19, 20, 21), REGIMES)
        ]
    return _unique(found)


WIDE = (
    *(MhcCase(tokens=65, width=256, regime=r) for r in (*REGIMES, "tiny", "cancel")),
    *(MhcCase(tokens=65, width=272, logits=logits, config="v4") for logits in LOGITS[1:]),
    MhcCase(tokens=5, width=256),
)


def cases_mixes(full: bool) -> list[MhcCase]:
    """Regimes of the stream, sizes of the logits, production and awkward widths, no tokens."""
    base = MhcCase(tokens=17, width=128)
    found = [replace(base, regime=r) for r in (*REGIMES, "tiny", "cancel")]
    found += [replace(base, logits=logits) for logits in LOGITS[1:]]
    found += [replace(base, tokens=3, regime="zeros"), replace(base, tokens=2, width=32), replace(base, tokens=0)]
    found += [replace(base, tokens=33, width=72, config="v4"), replace(base, config="v4", regime="flat", tokens=9)]
    found += [MhcCase(tokens=2, width=5120), *WIDE]
    if full:
        found += [
            MhcCase(tokens=40, width=512, regime=r, logits=g, config=c)
            for r, g, c in product(REGIMES, ("mild", "peaked"), ("v41", "v4"))
        ]
        found += [MhcCase(tokens=33, width=200, logits=g) for g in LOGITS]
    return _unique(found)


def cases_post(full: bool) -> list[MhcCase]:
    """Every regime with enough elements for the rate rule, production and awkward widths, no tokens."""
    found = [MhcCase(tokens=2, width=2048, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny")]
    found += [MhcCase(tokens=1, width=5120), MhcCase(tokens=6, width=48), MhcCase(tokens=2, width=1)]
    found += [MhcCase(tokens=0, width=64), MhcCase(tokens=1, width=1025), MhcCase(tokens=6, width=128)]
    if full:
        found += [MhcCase(tokens=9, width=w, regime=r) for w, r in product((1024, 4096, 5120, 7168), REGIMES)]
    return _unique(found)


def cases_boundary(full: bool) -> list[MhcCase]:
    """Both schedules, regimes, peaked coefficients, a production width, no tokens."""
    base = MhcCase(tokens=32, width=320)
    found = [replace(base, regime=r) for r in REGIMES] + [replace(base, config="v4", logits="peaked")]
    found += [replace(base, tokens=2, width=48), replace(base, tokens=2, width=48, config="v4")]
    found += [replace(base, tokens=0), MhcCase(tokens=1, width=1024), MhcCase(tokens=6, width=128, config="v4")]
    found += [MhcCase(tokens=5, width=512, config="v4", regime=r) for r in ("normal", "mean1")]
    if full:
        found += [MhcCase(tokens=2, width=5120, config=c) for c in ("v41", "v4")]
        found += [
            MhcCase(tokens=33, width=200, regime=r, logits=g, config=c)
            for r, g, c in product(REGIMES, ("mild", "training"), ("v41", "v4"))
        ]
    return _unique(found)


def cases_head(full: bool) -> list[MhcCase]:
    """Regimes, faint coefficients, no tokens; a head belongs to the schedule of V4."""
    base = MhcCase(tokens=32, width=320, config="v4")
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, logits="faint", tokens=8), replace(base, tokens=0)]
    found += [replace(base, tokens=2, width=48), replace(base, tokens=6, width=128)]
    found += [replace(base, tokens=5, width=512, regime=r) for r in REGIMES]
    if full:
        found += [replace(base, tokens=33, width=w, regime=r) for w, r in product((200, 512), REGIMES)]
    return _unique(found)


def outside_tf32_unit(case: MhcCase) -> str | None:
    """Why the product in TF32 does not take a case: sixteen splits of whole blocks of 64 channels."""
    wide = case.width % 16 == 0 and case.width >= 256
    return None if case.tokens and wide else f"tokens of four streams of 16·n channels, n from 16 up, got {case.id}"


def on_silicon(case: MhcCase) -> str | None:
    """Widths for the product in TF32, which others are judged on elsewhere."""
    return "as wide as sixteen splits need it: an interpreter is judged on other widths" if case in WIDE else None


def narrow(case: Any) -> bool:
    """Relations make many calls: they run on narrow streams, where no width changes what they say."""
    return case.regime in ("normal", "file") and (_least_of_a_vendor(case) or case.width <= 48 and case.config == "v41")


def _least_of_a_vendor(case: MhcCase) -> bool:
    """The narrowest streams that TileKernels takes."""
    return case.width == 128 and case.tokens == 6


def few_matrices(case: Any) -> bool:
    """Relations of Sinkhorn run on a few matrices of each kind."""
    return case.regime in ("normal", "file") and getattr(case, "tokens", 1) <= 3


def outside_tile_kernels(case: MhcCase) -> str | None:
    """Why TileKernels' kernels over whole streams do not take a case."""
    return None if case.tokens and case.width % 128 == 0 else "a token at least, streams of 128·n channels"


def outside_big_fuse(case: MhcCase) -> str | None:
    """Why its fused kernel does not."""
    shifted = "the fused kernel reads with its own coefficients: the schedule of V4 alone"
    return outside_tile_kernels(case) if case.config == "v4" else shifted


def no_token(case: Any) -> str | None:
    """Its kernels on coefficients alone take any width, and a token at least."""
    return None if case.tokens else "a token at least"


def scaled(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A stream times a power of two has the same coefficients, bit by bit: the norm divides it out again."""
    for power in (-8, 20):
        stream_tnm = inputs["stream_tnm"] * 2.0**power
        yield Variant(label=f"stream times 2^{power}", calls=(inputs | {"stream_tnm": stream_tnm},))


def permuted_streams(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Streams, columns of fn, coefficients of base and results in another order: only sums are added differently."""
    order = torch.tensor([2, 0, 3, 1])
    site: MhcSite = inputs["site"]
    mixed = (8 + 4 * order[:, None] + order[None, :]).flatten()
    rows = torch.cat([order, 4 + order, mixed])
    fn_wx = site.fn_wx.unflatten(1, (4, -1))[rows][:, order].flatten(1)
    permuted = MhcSite(fn_wx=fn_wx, scale_z=site.scale_z, base_w=site.base_w[rows])
    back = order.argsort()

    def restored(results: list[Outputs]) -> Outputs:
        found = results[0]
        comb_tnn = found["comb_tnn"][:, back][:, :, back]
        return {"pre_tn": found["pre_tn"][:, back], "post_tn": found["post_tn"][:, back], "comb_tnn": comb_tnn}

    calls = (inputs | {"stream_tnm": inputs["stream_tnm"][:, order], "site": permuted},)
    yield Variant(label="streams in the order 2, 0, 3, 1", calls=calls, join=restored)


def saturated(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A stream whose square sum overflows fp32 has the coefficients of a zero stream: those of base alone."""
    signs = torch.from_numpy(context.rng.choice([-1.0, 1.0], inputs["stream_tnm"].shape))
    yield Variant(
        label="square sum beyond fp32", calls=(inputs | {"stream_tnm": (signs * 2.0**65).to(torch.bfloat16)},)
    )


def update_alone(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """Eager and lazy are the same: the stream of the single pass is that of the update alone, byte by byte."""
    assert partner is not None
    names = ("stream_tnm", "y_tm", "post_tn", "comb_tnn")
    return {"stream_tnm": outputs["stream_tnm"]}, partner({name: inputs[name] for name in names})


def coefficients_alone(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """The coefficients of the single pass are those of the stored stream, byte by byte."""
    assert partner is not None
    alone = partner({"stream_tnm": outputs["stream_tnm"], "site": inputs["site"], "config": inputs["config"]})
    return {name: outputs[name] for name in alone}, alone


def _relations(only: Callable[[Any], bool] = narrow) -> tuple[Relation, ...]:
    return (
        Relation(name="batch_invariant", axis="tokens", only=only),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=only),
        Relation(name="run_to_run", axis="repeats", only=only),
    )


COEFFICIENT_OUTPUTS = tuple(
    Output(name=name, rule=COEFFICIENTS, dtype=torch.float32) for name in ("pre_tn", "post_tn", "comb_tnn")
)
COEFFICIENT_ROWS = {"pre_tn": 0, "post_tn": 0, "comb_tnn": 0}

TWO_PROGRAMS = Expect(
    mma="wgmma",
    max_stack=16,
    reason="128 registers a thread let two programs share a core; a few words of addresses spill",
)
AT_ONCE = Expect(
    mma=None,
    max_stack=96,
    reason="sixteen partial sums of 25 rows are loaded at once and fill the registers; up to 22 words spill",
)

EXPAND = Op(
    name="mhc_expand",
    reference="deeptwin.reference.mhc:mhc_expand",
    outputs=(
        Output(name="stream_tnm", rule=Bitwise(), dtype=torch.bfloat16),
        Output(name="pre_tn", rule=Bitwise(), dtype=torch.float32),
    ),
    cases=cases_expand,
    draw=draw_expand,
    rows={"x_tm": 0},
    out_rows={"stream_tnm": 0, "pre_tn": 0},
    relations=_relations(),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_expand_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_expand_tile_kernels",
            needs=("tile_kernels",),
            declines=no_token,
        ),
    ),
    builds=(
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.mhc:_expand",
            launch="deeptwin.parity.builds.launches.mhc:expand",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile_kernels",
            function="deeptwin.parity.peers.mhc:tile_kernels_expand",
            needs=("tile_kernels",),
            explains="expand_to_mhc_ref copies; the one-hot coefficients are ours on both sides",
        ),
    ),
    mutants=(
        _mutant("expand_scaled", "U39", "the copies are scaled"),
        _mutant("expand_first_only", "U39", "only the first stream holds the row"),
        _mutant("expand_pre_mean", "U39", "the first sub-layer reads the mean of the streams"),
        _mutant("expand_pre_eps", "U38", "eps is added to the one-hot coefficients"),
        _mutant("expand_pre_last", "U38", "the first sub-layer reads the last stream"),
    ),
    controls=(_control("right_expand"),),
    golden=lambda: [MhcCase(tokens=2, width=6)],
)

APPLY = Op(
    name="mhc_apply",
    reference="deeptwin.reference.mhc:mhc_apply",
    outputs=(Output(name="x_tm", rule=FOUR_STREAMS, dtype=torch.bfloat16),),
    cases=cases_read,
    draw=draw_apply,
    rows={"pre_tn": 0, "stream_tnm": 0},
    out_rows={"x_tm": 0},
    relations=_relations(),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_apply_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_apply_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.mhc:_apply",
            launch="deeptwin.parity.builds.launches.mhc:apply",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile_kernels",
            function="deeptwin.parity.peers.mhc:tile_kernels_apply",
            needs=("tile_kernels",),
            explains="mhc_pre_apply_mix_ref: fp32 products and sums of torch",
        ),
    ),
    mutants=(
        _mutant("apply_truncated", "R2", "x is truncated to bf16"),
        _mutant("apply_bf16_sum", "U09", "the sum over streams is kept in bf16"),
        _mutant("apply_bf16_pre", "U17", "the coefficients are rounded to bf16"),
        _mutant("apply_three_streams", "U26", "the last stream is left out"),
        _mutant("apply_normalised", "U39", "the coefficients are divided by their sum"),
        _mutant("apply_squared", "U39", "the coefficients are applied twice"),
        _mutant("apply_last_row_stale", "U75", "the last row is left unwritten"),
        _mutant("apply_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_apply"),),
    golden=lambda: [MhcCase(tokens=4, width=24, regime=r) for r in ("normal", "mean1")],
)

TAP = Op(
    name="mhc_tap",
    reference="deeptwin.reference.mhc:mhc_tap",
    outputs=(Output(name="x_tm", rule=FOUR_STREAMS, dtype=torch.bfloat16),),
    cases=cases_read,
    draw=draw_tap,
    rows={"stream_tnm": 0},
    out_rows={"x_tm": 0},
    relations=_relations(),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_tap_triton"),),
    mutants=(
        _mutant("tap_sum", "U39", "the sum of the streams instead of their mean"),
        _mutant("tap_bf16_sum", "U09", "the sum over streams is kept in bf16"),
        _mutant("tap_three_streams", "U26", "the last stream is left out"),
    ),
    controls=(_control("right_tap"),),
    golden=lambda: [MhcCase(tokens=2, width=24)],
)

SINKHORN = Op(
    name="mhc_sinkhorn",
    reference="deeptwin.reference.mhc:mhc_sinkhorn",
    outputs=(Output(name="comb_tnn", rule=COEFFICIENTS, dtype=torch.float32),),
    cases=cases_sinkhorn,
    draw=draw_sinkhorn,
    rows={"logits_tnn": 0},
    out_rows={"comb_tnn": 0},
    tile=32,
    relations=_relations(few_matrices),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_sinkhorn_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_sinkhorn_tile_kernels",
            needs=("tile_kernels",),
            declines=no_token,
        ),
    ),
    builds=(
        BuildCase(
            name="t4096",
            kernel="deeptwin.kernels.triton_ops.mhc:_normalise_matrices",
            launch="deeptwin.parity.builds.launches.mhc:sinkhorn",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="tilelang-20",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.mhc:mhc_sinkhorn_program",
            launch="deeptwin.parity.builds.launches.mhc_tilelang:ascend_sinkhorn_20",
            expect={"ascend950-simd": Expect(mma=None)},
        ),
    ),
    peers=(
        Peer(
            name="tile_kernels",
            function="deeptwin.parity.peers.mhc:tile_kernels_sinkhorn",
            needs=("tile_kernels",),
            explains="sinkhorn_normalize_ref: fp32 torch",
        ),
    ),
    mutants=(
        _mutant("sinkhorn_19", "U38", "one iteration too few"),
        _mutant("sinkhorn_10", "U38", "ten iterations"),
        _mutant("sinkhorn_21", "U39", "one iteration too many"),
        _mutant("sinkhorn_sigmoid", "U38", "starts from sigmoids instead of a softmax"),
        _mutant("sinkhorn_no_max", "U78", "the softmax does not subtract its maximum"),
        _mutant("sinkhorn_softmax_over_input", "U38", "the softmax is taken over the input stream"),
        _mutant("sinkhorn_rows_last", "U38", "a row step comes last"),
        _mutant("sinkhorn_eps_1e_5", "U39", "eps is 1e-5 whatever is asked for"),
        _mutant("sinkhorn_eps_not_on_entries", "U38", "eps is not added to the softmax"),
        _mutant("sinkhorn_eps_in_softmax", "U38", "eps goes into the denominator of the softmax, not on its entries"),
        _mutant("sinkhorn_eps_not_on_sums", "U39", "sums are divided by without eps"),
        _mutant("sinkhorn_transposed", "U38", "the result is transposed"),
        _mutant("sinkhorn_last_row_stale", "U75", "the last matrix is left unwritten"),
    ),
    controls=(_control("right_sinkhorn"),),
    golden=lambda: [SinkhornCase(tokens=2, sigma=s) for s in (1, 4, 16)],
)

# as COEFFICIENTS, of weights rounded to TF32, for sums that the unit cuts to 24 bits every eight products: 160 times in
# a sixteenth of 4 x 5120 channels, half a last bit each. Measured on that arithmetic (50 seeds, 11 cases, evidence/
# mhc-{coefficients,gates}-tf32.json): worst element 104 units, row and total 0.58 of their limits; the same of weights
# rounded to bf16 exceeds them a hundredfold
TF32_COEFFICIENTS = Budget(
    kind="mhc coefficients in TF32",
    floor=1.0,
    row=32.0,
    total=32.0,
    element_factor=4.0,
    element_slack=160.0,
    bias=32.0,
)
TF32_RULES = {
    name: OfStored(rule=TF32_COEFFICIENTS, again=partial(_by_tf32, kind)) for kind, name in enumerate(COEFFICIENT_ROWS)
}

MIXES = Op(
    name="mhc_mixes",
    reference="deeptwin.reference.mhc:mhc_mixes",
    outputs=COEFFICIENT_OUTPUTS,
    cases=cases_mixes,
    draw=draw_mixes,
    rows={"stream_tnm": 0},
    out_rows=COEFFICIENT_ROWS,
    tile=64,
    relations=(
        *_relations(lambda case: (narrow(case) and case.tokens < 30) or case == WIDE[-1]),
        Relation(name="scale_equivariance", axis="stream scale", hook=scaled, only=lambda case: case.regime == "mean1"),
        Relation(
            name="stream_permutation",
            axis="streams",
            promise="within contract",
            hook=permuted_streams,
            only=lambda case: case.regime == "normal" and case.width == 32,
        ),
        Relation(
            name="masked_equals_absent",
            axis="saturated streams",
            hook=saturated,
            only=lambda case: case.regime == "zeros",
        ),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_mixes_triton", interpreter_declines=on_silicon),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.mhc:mhc_mixes_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_tf32_unit,
            rules=TF32_RULES,
        ),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_mixes_tile_kernels",
            needs=("tile_kernels",),
            declines=no_token,
        ),
    ),
    builds=(
        BuildCase(
            name="project-m5120",
            kernel="deeptwin.kernels.triton_ops.mhc:_project",
            launch="deeptwin.parity.builds.launches.mhc:mixes",
            expect=PRODUCT | MATRIX | {"sm90": TWO_PROGRAMS},
        ),
        BuildCase(
            name="split-weights",
            kernel="deeptwin.kernels.triton_ops.mhc:_split_weights",
            launch="deeptwin.parity.builds.launches.mhc:mixes",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="finish",
            kernel="deeptwin.kernels.triton_ops.mhc:_finish",
            launch="deeptwin.parity.builds.launches.mhc:mixes",
            expect=NO_PRODUCT | VECTOR | {"sm100": AT_ONCE},
        ),
    ),
    peers=(
        Peer(
            name="tile_kernels",
            function="deeptwin.parity.peers.mhc:tile_kernels_mixes",
            needs=("tile_kernels",),
            explains="mhc_pre_norm_fn_ref, mhc_pre_split_mixes_ref and sinkhorn_normalize_ref in fp32 torch",
            only=lambda case: case.tokens > 0,
        ),
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.mhc:transformers_mixes",
            needs=("transformers",),
            explains="DeepseekV4HyperConnection normalises before it projects; pre is solved for from its product",
            only=lambda case: case.tokens and case.width >= 72 and case.regime in ("normal", "mean1", "flat"),
        ),
    ),
    mutants=(
        _mutant("mixes_post_sigma_eps", "U38", "post is sigmoid + eps"),
        _mutant("mixes_post_sigma", "U38", "post is one sigmoid, not two"),
        _mutant("mixes_post_plus_eps", "U38", "eps is added to post"),
        _mutant("mixes_pre_without_eps", "U39", "eps is not added to pre"),
        _mutant("mixes_pre_eps_1e_5", "U39", "1e-5 is added to pre"),
        _mutant("mixes_19_iterations", "U38", "one iteration too few"),
        _mutant("mixes_sigmoid_start", "U38", "comb starts from sigmoids"),
        _mutant("mixes_comb_transposed", "U38", "comb is [output, input]"),
        _mutant("mixes_fn_tf32", "U17", "fn is rounded to TF32"),
        _mutant("mixes_fn_bf16", "U17", "fn is rounded to bf16"),
        _mutant("mixes_interleaved_streams", "U23", "the flat stream is channel-major"),
        _mutant("mixes_norm_missing", "U39", "the projection is not normalised"),
        _mutant("mixes_norm_of_first_stream", "U39", "the norm is that of one stream"),
        _mutant("mixes_norm_over_width", "U39", "the mean divides by m, not by 4 m"),
        _mutant("mixes_norm_over_batch", "U76", "the mean square is taken over the batch"),
        _mutant("mixes_norm_eps_1e_6", "U39", "the norm's eps is 1e-6"),
        _mutant("mixes_rstd_bf16", "U17", "1 / rms is rounded to bf16"),
        _mutant("mixes_rstd_12_bits", "U17", "1 / rms has 12 correct bits"),
        _mutant("mixes_one_scale", "U38", "one scale for all kinds of coefficients"),
        _mutant("mixes_scale_after_base", "U38", "the scale multiplies base too"),
        _mutant("mixes_pre_and_post_swapped", "U38", "post comes before pre"),
        _mutant("mixes_split_depends_on_batch", "U73", "the order of summation depends on the number of tokens"),
        _mutant("mixes_not_deterministic", "U10", "a counter leaks into the output"),
        _mutant("mixes_last_row_stale", "U75", "the last row is left unwritten"),
    ),
    controls=(
        _control("right_mixes"),
        _control("right_mixes_16_lanes"),
        replace(_control("mixes_of_tf32_unit"), rules=TF32_RULES, declines=outside_tf32_unit),
    ),
    golden=lambda: [MhcCase(tokens=2, width=16, logits=logits) for logits in ("mild", "training")],
)

POST = Op(
    name="mhc_post",
    reference="deeptwin.reference.mhc:mhc_post",
    outputs=(Output(name="stream_tnm", rule=FOUR_STREAMS, dtype=torch.bfloat16),),
    cases=cases_post,
    draw=draw_post,
    rows={"stream_tnm": 0, "y_tm": 0, "post_tn": 0, "comb_tnn": 0},
    out_rows={"stream_tnm": 0},
    relations=_relations(),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_post_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_post_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.mhc:_update",
            launch="deeptwin.parity.builds.launches.mhc:post",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="tilelang-m5120",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.mhc:mhc_post_apply_program",
            launch="deeptwin.parity.builds.launches.mhc_tilelang:ascend_post_apply_5120",
            expect={"ascend950-simd": Expect(mma=None)},
        ),
    ),
    peers=(
        Peer(
            name="tile_kernels",
            function="deeptwin.parity.peers.mhc:tile_kernels_post",
            needs=("tile_kernels",),
            explains="mhc_post_ref: fp32 torch, rounded once",
        ),
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.mhc:transformers_post",
            needs=("transformers",),
            explains="DeepseekV4DecoderLayer on fp32 streams; on bf16 ones it rounds post and comb to bf16 first",
        ),
    ),
    mutants=(
        _mutant("post_transposed", "U38", "comb is read as [output, input]"),
        _mutant("post_bf16_comb", "U17", "comb is rounded to bf16, as transformers V4 does"),
        _mutant("post_bf16_post", "U17", "post is rounded to bf16, as transformers V4 does"),
        _mutant("post_bf16_sum", "U09", "the sum over streams is kept in bf16"),
        _mutant("post_bf16_product", "U86", "the product with y is rounded to bf16"),
        _mutant("post_without_y", "U28", "the output of the sub-layer is not written"),
        _mutant("post_in_place", "U36", "a new stream overwrites the old one before the next is computed"),
        _mutant("post_comb_of_first_token", "U75", "every token uses the matrix of the first"),
        _mutant("post_truncated", "R2", "the stream is truncated to bf16"),
        _mutant("post_last_row_stale", "U75", "the last row is left unwritten"),
    ),
    controls=(_control("right_post"),),
    golden=lambda: [MhcCase(tokens=2, width=16, regime=r) for r in ("normal", "peaked")],
)

BOUNDARY = Op(
    name="mhc_boundary",
    reference="deeptwin.reference.mhc:mhc_boundary",
    outputs=(
        Output(name="stream_tnm", rule=FOUR_STREAMS, dtype=torch.bfloat16),
        Output(name="x_tm", rule=OfStored(rule=FOUR_STREAMS, again=_read_again), dtype=torch.bfloat16),
        *(
            Output(
                name=name,
                rule=OfStored(rule=COEFFICIENTS, again=partial(_coefficients_again, kind)),
                dtype=torch.float32,
            )
            for kind, name in enumerate(COEFFICIENT_ROWS)
        ),
    ),
    cases=cases_boundary,
    draw=draw_boundary,
    rows={"stream_tnm": 0, "y_tm": 0, "pre_tn": 0, "post_tn": 0, "comb_tnn": 0},
    out_rows={"stream_tnm": 0, "x_tm": 0, **COEFFICIENT_ROWS},
    tile=64,
    relations=(
        *_relations(),
        Relation(
            name="layout_round_trip",
            axis="update alone",
            hook=update_alone,
            partner="mhc_post",
            only=lambda case: case.width <= 48 or case.regime == "peaked" or _least_of_a_vendor(case),
        ),
        Relation(
            name="fused_equals_steps",
            axis="coefficients of the stored stream",
            hook=coefficients_alone,
            partner="mhc_mixes",
            only=lambda case: case.width <= 48 or _least_of_a_vendor(case),
        ),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_boundary_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_boundary_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_big_fuse,
        ),
    ),
    builds=(
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.mhc:_update",
            launch="deeptwin.parity.builds.launches.mhc:boundary",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("boundary_reads_unrounded", "U86", "x comes from the stream before its rounding"),
        _mutant("boundary_reads_old_stream", "U61", "x comes from the stream before its update"),
        _mutant("boundary_mixes_of_unrounded", "U86", "the coefficients come from the stream before its rounding"),
        _mutant("boundary_mixes_of_old_stream", "U61", "the coefficients come from the stream before its update"),
        _mutant("boundary_other_schedule", "U61", "the shifted and the other schedule are swapped"),
        _mutant("boundary_truncated", "R2", "the stream is truncated to bf16"),
        _mutant("boundary_transposed", "U38", "comb is read as [output, input]"),
        _mutant("boundary_split_depends_on_batch", "U73", "the order of summation depends on the number of tokens"),
    ),
    controls=(_control("right_boundary"), _control("right_boundary_16_lanes")),
    golden=lambda: [MhcCase(tokens=2, width=16, config=c) for c in ("v41", "v4")],
)

HEAD = Op(
    name="mhc_head",
    reference="deeptwin.reference.mhc:mhc_head",
    outputs=(Output(name="x_tm", rule=FOUR_STREAMS, dtype=torch.bfloat16),),
    cases=cases_head,
    draw=draw_head,
    rows={"stream_tnm": 0},
    out_rows={"x_tm": 0},
    tile=64,
    relations=_relations(lambda case: narrow(replace(case, config="v41"))),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mhc:mhc_head_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.mhc:mhc_head_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="finish-m7168",
            kernel="deeptwin.kernels.triton_ops.mhc:_finish",
            launch="deeptwin.parity.builds.launches.mhc:head_v4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.mhc:transformers_head",
            needs=("transformers",),
            explains="DeepseekV4HyperHead normalises before it projects; fp32 products with the streams",
        ),
    ),
    mutants=(
        _mutant("head_without_eps", "U39", "eps is not added to the coefficients"),
        _mutant("head_softmax", "U39", "a softmax instead of sigmoids"),
        _mutant("head_two_sigma", "U38", "two sigmoids, as post has"),
        _mutant("head_norm_eps_1e_20", "U39", "the norm's eps is that of V4.1"),
        _mutant("head_scale_after_base", "U38", "the scale multiplies base too"),
        _mutant("head_norm_missing", "U39", "the projection is not normalised"),
    ),
    controls=(_control("right_head"), _control("right_head_16_lanes")),
    golden=lambda: [MhcCase(tokens=2, width=16, config="v4")],
)

CARD = Card(
    component="mhc",
    summary="hyper-connections: residual streams, their coefficients by Sinkhorn, reads and updates",
    contract={
        "dtypes": "streams, x and y bf16; fn, scale, base, pre, post, comb fp32; comb is [input stream, output stream]",
        "rounding": "the new stream once, and everything after reads the rounded one; x once; coefficients in fp32",
        "projection": "fp32: TF32 or bf16 weights break the contract; one norm over all streams, eps inside the root",
        "sinkhorn": "softmax + eps, columns, then rows and columns iters - 1 times; eps is added to every sum",
        "schedule": "shifted: x is read with the pre of the sub-layer before; else with that of its own site",
        "saturation": "a square sum beyond fp32 counts as infinite: the coefficients are those of base alone",
    },
    ops=(EXPAND, APPLY, TAP, SINKHORN, MIXES, POST, BOUNDARY, HEAD),
    equivalents=(
        Equivalent(
            name="row step before the first column step",
            reason="the softmax is a row step already: another one moves the result by less than 2e-7",
        ),
        Equivalent(
            name="multiplication by 1 / (4 m)",
            reason="one rounding of a factor near 1: below the honest error of a square sum",
        ),
        Equivalent(name="order of summation", reason="the contract rounds each sum once; honest orders stay within it"),
    ),
)
