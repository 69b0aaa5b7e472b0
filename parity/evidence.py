"""The measurements that fix the limits of the rules: `python -m deeptwin.parity.evidence [KIND …] [--seeds 50]`.

For every output kind: many seeds of the four regimes are judged for several *right* implementations (the controls of
the card), and for a few seeds the mutants are judged in each regime. The result, `evidence/KIND.json`, says how many
judgements there were, how many were false alarms, how much of each limit was used at worst, and which regime kills
which mutant. A limit may change only together with its measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .card import Candidate, Op, case_rng, load_card, resolve
from .environment import facts, fixed_numerics
from .files import write_json
from .guard import accepted_parameters
from .judge import Verdict, judge
from .oracles import OracleSet
from .outcome import Status
from .rules import Rule, TopK

FOLDER = Path(__file__).with_name("evidence")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One output kind: which output of which operation stands for it, and the cases it is measured on."""

    component: str
    op: str
    output: str
    cases: Callable[[], Sequence[Any]]
    kill_seeds: int = 20  # fewer where the mutants are whole stacks
    control: str = ""  # measured alone, by the rules of its own

    @property
    def operation(self) -> Op:
        """The operation that the kind is measured on."""
        return load_card(self.component).op(self.op)


def _default_cases(component: str, op: str, **wanted: object) -> Callable[[], Sequence[Any]]:
    def cases() -> list[Any]:
        found = load_card(component).op(op).cases(False)
        nonempty = [c for c in found if c.tokens or getattr(c, "text", "")]
        return [c for c in nonempty if all(getattr(c, k) == v for k, v in wanted.items())]

    return cases


def _sparse_cases(dtype: str) -> Callable[[], Sequence[Any]]:
    def cases() -> list[Any]:
        from .cards.sparse_attn import SparseCase

        shapes = ((8, 4, 16, 64), (2, 4, 64, 7), (4, 8, 64, 1), (4, 8, 64, 2), (2, 16, 128, 128), (2, 16, 512, 256))
        regimes = ("normal", "peaked", "flat", "mean1", "huge")
        return [
            SparseCase(tokens=t, heads=h, dim=d, value_dim=d, keys=2 * k + 4, topk=k, dtype=dtype, regime=regime)
            for t, h, d, k in (*shapes, (1, 8, 512, 640))
            for regime in regimes
        ]

    return cases


def _fp8_cases(control: str) -> Callable[[], Sequence[Any]]:
    def cases() -> list[Any]:
        from .cards.linear import CODES

        row = next(row for row in CODES.controls if row.name == control)
        return [case for case in CODES.cases(False) if case.tokens and row.declines(case) is None]

    return cases


def _tf32_cases() -> list[Any]:
    from .cards.mhc import MIXES, outside_tf32_unit

    return [case for case in MIXES.cases(False) if outside_tf32_unit(case) is None]


def _product_cases(out: str) -> Callable[[], Sequence[Any]]:
    def cases() -> list[Any]:
        from .cards.linear import LinearCase

        shapes = ((4, 64, 64), (33, 40, 160), (40, 16, 1280), (34, 24, 5120))
        regimes = ("normal", "peaked", "flat", "mean1", "cancel", "constant")
        return [
            LinearCase(tokens=t, features=f, width=w, bias=w == 160, out=out, regime=regime)
            for t, f, w in shapes
            for regime in regimes
        ]

    return cases


def _swiglu_cases() -> list[Any]:
    from .cards.swiglu import SwigluCase

    return [
        SwigluCase(tokens=40, width=w, limit=limit, out="fp32", regime=regime)
        for w, limit in ((96, 10.0), (640, 0.0))
        for regime in ("normal", "peaked", "flat", "mean1", "edges")
    ]


def _stack_cases() -> list[Any]:
    found = _default_cases("csa2", "csa2_run", truncation="off")()
    return [case for case in found if case.tokens <= 9 or case.lengths == (12,)]


def _muon_cases() -> list[Any]:
    found = load_card("muon").op("newton_schulz").cases(True)
    return [case for case in found if case.regime not in ("zeros", "tiny")]


KINDS = {
    "bf16-attention": Kind(component="sparse_attn", op="sparse_attn", output="out_thu", cases=_sparse_cases("bf16")),
    "fp32-attention": Kind(component="sparse_attn", op="sparse_attn", output="out_thu", cases=_sparse_cases("fp32")),
    "lse": Kind(component="sparse_attn", op="sparse_attn", output="lse_th", cases=_sparse_cases("bf16")),
    "one-rounding-norm": Kind(
        component="rms_norm", op="rms_norm", output="y_tm", cases=_default_cases("rms_norm", "rms_norm", out="bf16")
    ),
    "one-rounding-rope": Kind(
        component="rope", op="rope", output="y_thd", cases=_default_cases("rope", "rope", dtype="bf16")
    ),
    "fp32-norm": Kind(
        component="rms_norm", op="rms_norm", output="y_tm", cases=_default_cases("rms_norm", "rms_norm", out="fp32")
    ),
    "fp32-rope": Kind(component="rope", op="rope", output="y_thd", cases=_default_cases("rope", "rope", out="fp32")),
    "bf16-mla-block": Kind(
        component="mla",
        op="mla_naive",
        output="y_tm",
        cases=_default_cases("mla", "mla_naive", dtype="bf16", config="tiny"),
    ),
    "fp32-mla-block": Kind(
        component="mla",
        op="mla_naive",
        output="y_tm",
        cases=_default_cases("mla", "mla_naive", dtype="fp32", config="tiny"),
    ),
    "bf16-product": Kind(component="linear", op="linear", output="y_tf", cases=_product_cases("bf16")),
    "fp32-product": Kind(component="linear", op="linear", output="y_tf", cases=_product_cases("fp32")),
    "fp32-swiglu": Kind(component="swiglu", op="swiglu", output="y_tf", cases=_swiglu_cases),
    "swiglu-codes": Kind(
        component="swiglu",
        op="swiglu_quant",
        output="codes",
        cases=_default_cases("swiglu", "swiglu_quant"),
    ),
    "mhc-coefficients": Kind(
        component="mhc", op="mhc_mixes", output="comb_tnn", cases=_default_cases("mhc", "mhc_mixes")
    ),
    **{
        f"fp8-product-{out}": Kind(
            component="linear", op="linear_codes", output="y_tf", cases=_fp8_cases(control), control=control
        )
        for out, control in (("bf16", "codes_of_fp8_unit"), ("fp32", "codes_of_fp8_unit_fp32"))
    },
    "mhc-coefficients-tf32": Kind(
        component="mhc", op="mhc_mixes", output="comb_tnn", cases=_tf32_cases, control="mixes_of_tf32_unit"
    ),
    "mhc-gates-tf32": Kind(
        component="mhc", op="mhc_mixes", output="pre_tn", cases=_tf32_cases, control="mixes_of_tf32_unit"
    ),
    "mhc-sinkhorn": Kind(
        component="mhc", op="mhc_sinkhorn", output="comb_tnn", cases=_default_cases("mhc", "mhc_sinkhorn")
    ),
    "one-rounding-mhc": Kind(
        component="mhc", op="mhc_post", output="stream_tnm", cases=_default_cases("mhc", "mhc_post")
    ),
    "bf16-engram-product": Kind(
        component="engram",
        op="engram_project",
        output="kv_tu",
        cases=_default_cases("engram", "engram_project"),
    ),
    "bf16-engram-layer": Kind(
        component="engram", op="engram", output="gated_tnm", cases=_default_cases("engram", "engram")
    ),
    "one-rounding-engram-gate": Kind(
        component="engram", op="engram_gate", output="gated_tnm", cases=_default_cases("engram", "engram_gate")
    ),
    "codes": Kind(
        component="rms_norm",
        op="rms_norm_quant",
        output="codes",
        cases=_default_cases("rms_norm", "rms_norm_quant"),
    ),
    "scales": Kind(
        component="rms_norm", op="rms_norm_quant", output="sf", cases=_default_cases("rms_norm", "rms_norm_quant")
    ),
    "fp32-index-scores": Kind(
        component="indexer",
        op="index_scores_fp32",
        output="scores_ts",
        cases=_default_cases("indexer", "index_scores_fp32"),
    ),
    "fp8-index-scores": Kind(
        component="dsa",
        op="dsa_index_scores",
        output="scores_ts",
        cases=_default_cases("dsa", "dsa_index_scores", dim=128),
        control="scores_of_fp8_unit",
    ),
    "release-index-scores": Kind(
        component="indexer",
        op="index_scores_release",
        output="scores_ts",
        cases=_default_cases("indexer", "index_scores_release"),
    ),
    "bf16-index-weights": Kind(
        component="indexer", op="index_weights", output="w_th", cases=_default_cases("indexer", "index_weights")
    ),
    "router-weights": Kind(
        component="router", op="route", output="weights_tk", cases=_default_cases("router", "route", dtype="fp32")
    ),
    "muon": Kind(component="muon", op="newton_schulz", output="orthogonal_ij", cases=_muon_cases, kill_seeds=5),
    "moe-block": Kind(component="moe", op="moe", output="y_tm", cases=_default_cases("moe", "moe", width=128)),
    "csa2-project-queries": Kind(
        component="csa2", op="csa2_project", output="q_thd", cases=_default_cases("csa2", "csa2_project")
    ),
    "csa2-project-keys": Kind(
        component="csa2", op="csa2_project", output="key_td", cases=_default_cases("csa2", "csa2_project")
    ),
    "csa2-project-latents": Kind(
        component="csa2", op="csa2_project", output="latent_ta", cases=_default_cases("csa2", "csa2_project")
    ),
    "csa2-output": Kind(component="csa2", op="csa2_output", output="y_tm", cases=_default_cases("csa2", "csa2_output")),
    "csa2-stack": Kind(component="csa2", op="csa2_run", output="h_tm", cases=_stack_cases, kill_seeds=5),
    "log-probabilities": Kind(
        component="sampling",
        op="sample_logits",
        output="logprobs_tv",
        cases=_default_cases("sampling", "sample_logits"),
    ),
    "csa2-pages": Kind(component="csa2", op="csa2_run", output="page_pq", cases=_stack_cases, kill_seeds=5),
    "v4-output": Kind(component="csa", op="v4_output", output="y_tm", cases=_default_cases("csa", "v4_output")),
    "v4-csa": Kind(
        component="csa", op="csa_attention", output="y_tm", cases=_default_cases("csa", "csa_attention"), kill_seeds=2
    ),
    "v4-hca": Kind(
        component="hca", op="hca_attention", output="y_tm", cases=_default_cases("hca", "hca_attention"), kill_seeds=2
    ),
    "v4-hca-steps": Kind(
        component="hca",
        op="hca_run",
        output="y_tm",
        cases=_default_cases("hca", "hca_run", regime="rotary"),
        kill_seeds=2,
    ),
    "v4-select": Kind(
        component="csa",
        op="csa_select",
        output="picks_tk",
        cases=_default_cases("csa", "csa_select"),
        kill_seeds=5,
    ),
    "block-v3": Kind(
        component="block", op="block_v3", output="h_tm", cases=_default_cases("block", "block_v3", dtype="bf16")
    ),
    "block-v4": Kind(component="block", op="block_v4", output="stream_tnm", cases=_default_cases("block", "block_v4")),
    "block-v41": Kind(
        component="block",
        op="blocks_v41",
        output="stream_tnm",
        cases=_default_cases("block", "blocks_v41"),
        kill_seeds=5,
    ),
    "model-v3": Kind(
        component="model", op="model_v3", output="logits_tv", cases=_default_cases("model", "model_v3"), kill_seeds=5
    ),
    "model-v4": Kind(
        component="model", op="model_v4", output="logits_tv", cases=_default_cases("model", "model_v4"), kill_seeds=5
    ),
    "model-v41": Kind(
        component="model", op="model_v41", output="logits_tv", cases=_default_cases("model", "model_v41"), kill_seeds=3
    ),
    "draft-hidden": Kind(
        component="dspark",
        op="draft_hidden",
        output="h_bjm",
        cases=_default_cases("dspark", "draft_hidden"),
        kill_seeds=2,
    ),
    "draft-keys": Kind(
        component="dspark", op="main_keys", output="keys_tid", cases=_default_cases("dspark", "main_keys"), kill_seeds=2
    ),
    "block-mtp": Kind(component="mtp", op="mtp_v4", output="logits_tv", cases=_default_cases("mtp", "mtp_v4")),
    "mtp-join": Kind(
        component="mtp", op="mtp_join", output="x_tm", cases=_default_cases("mtp", "mtp_join", dtype="bf16")
    ),
    "mtp-join-streams": Kind(
        component="mtp",
        op="mtp_join_streams",
        output="stream_tnm",
        cases=_default_cases("mtp", "mtp_join_streams"),
    ),
    "csa2-states": Kind(component="csa2", op="csa2_run", output="state_sq", cases=_stack_cases, kill_seeds=5),
}


def measure(kind: Kind, seeds: int) -> dict[str, Any]:
    """Judge every control on every case and seed, and every mutant on a few seeds by regime."""
    op = kind.operation
    # without a name those that the card's own rules judge
    controls = sorted(
        row.name for row in op.controls if row.name == kind.control or (not kind.control and not row.rules)
    )
    worst: dict[str, float] = defaultdict(float)
    rate: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    alarms: list[str] = []
    judgements = 0
    for case in kind.cases():
        for seed in range(seeds):
            for name, verdict in _verdicts(kind, case, 5000 + seed, "controls"):
                if name not in controls:
                    continue
                judgements += 1
                for key, value in verdict.metrics.items():
                    worst[key] = max(worst[key], value)
                if "ulps" in verdict.metrics:
                    rate[name][0] += verdict.metrics["differ"]
                    rate[name][1] += verdict.metrics["elements"]
                if verdict.status is not Status.PASSED:
                    alarms.append(f"{name} {case.id} seed {5000 + seed}: {verdict.message}")
    return {
        "output": f"{kind.component}.{kind.op}.{kind.output}",
        "rule": repr({str(k): v for k, v in (_rules(op, kind.output) | _own_rules(op, kind.control)).items()}),
        "seeds": seeds,
        "cases": len(kind.cases()),
        "controls": controls,
        "judgements": judgements,
        "false_alarms": len(alarms),
        "alarms": alarms[:20],
        "worst": {k: v for k, v in sorted(worst.items()) if k not in ("differ", "elements", "burst")},
        "share_of_elements_that_differ": {k: v[0] / v[1] for k, v in sorted(rate.items()) if v[1]},
        "kills": _kills(kind, op),
    }


def _rules(op: Op, output: str) -> dict[Any, Rule]:
    rule = next(o.rule for o in op.outputs if o.name == output)
    return {"any": rule} if not isinstance(rule, Mapping) else dict(rule)


def _verdicts(kind: Kind, case: Any, seed: int, rows: str) -> Iterator[tuple[str, Verdict]]:
    for name, verdicts in _judged(kind.component, kind.op, case, seed, rows, kind.control).items():
        yield name, next(v for v in verdicts if v.output == kind.output)


@cache  # kinds that are outputs of one operation share its runs
def _judged(component: str, op_name: str, case: Any, seed: int, rows: str, control: str) -> dict[str, list[Verdict]]:
    op = load_card(component).op(op_name)
    inputs = op.draw(case, case_rng(component, op.name, case.id, seed))
    oracles = OracleSet(op, inputs)
    names = [output.name for output in op.outputs]
    found = {}
    for row in op.controls if rows == "controls" else op.mutants:
        if isinstance(row, Candidate) and row.declines(case):
            continue
        function = resolve(row.function)
        accepted = accepted_parameters(function, op)
        result = function(**{k: _copy(v) for k, v in inputs.items() if k in accepted})
        outputs = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
        found[row.name] = judge(
            outputs, oracles, dict(row.rules) if isinstance(row, Candidate) else _own_rules(op, control)
        )
    return found


def _own_rules(op: Op, control: str) -> dict[str, Rule]:
    """The rules that a control brings along, by output."""
    return next((dict(row.rules) for row in op.controls if row.name == control), {})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _kills(kind: Kind, op: Op) -> dict[str, dict[str, str]]:
    """For each mutant and regime: in how many of the drawn seeds the output alone betrays it."""
    mutants = [m.name for m in op.mutants]
    table: dict[str, dict[str, str]] = defaultdict(dict)
    by_regime: dict[str, Any] = {}
    for case in op.cases(False):
        same_kind = getattr(case, "dtype", "bf16") == getattr(kind.cases()[0], "dtype", "bf16")
        if same_kind and getattr(case, "tokens", 1) > 1:
            by_regime.setdefault(case.regime, case)
    for regime in ("normal", "peaked", "flat", "mean1"):
        if regime not in by_regime:
            continue
        dead: dict[str, int] = defaultdict(int)
        for seed in range(kind.kill_seeds):
            for name, verdict in _verdicts(kind, by_regime[regime], seed, "mutants"):
                dead[name] += verdict.status is not Status.PASSED
        for name in mutants:
            table[name][regime] = f"{dead[name]}/{kind.kill_seeds}"
    return dict(table)


def measure_top_k(seeds: int) -> dict[str, Any]:
    """R9: fp32 selections against fp64 scores of an index-like product; right ones and three wrong ones."""
    wrong = {"ties_high": 0, "off_by_one": 0, "lowest": 0}
    alarms = judgements = 0
    for seed in range(seeds):
        rng = case_rng("evidence", "topk", "scores", seed)
        q, keys = (torch.from_numpy(rng.standard_normal((n, 128))).to(torch.bfloat16) for n in (16, 512))
        exact = torch.relu(q.double() @ keys.double().T).round(decimals=2)
        order = torch.sort(exact.float(), dim=-1, descending=True, stable=True).indices
        backwards = (511 - torch.sort(exact.float().flip(-1), dim=-1, descending=True, stable=True).indices)[:, :300]
        chosen = order[:, :300]
        judgements += 1
        alarms += not _top_k(exact, chosen, chosen)
        wrong["ties_high"] += not _top_k(exact, backwards, chosen)
        wrong["off_by_one"] += not _top_k(exact, order[:, 1:301], chosen)
        wrong["lowest"] += not _top_k(exact, order[:, -300:], chosen)
    kills = {name: {"relu scores with ties at zero": f"{count}/{seeds}"} for name, count in wrong.items()}
    return {"seeds": seeds, "judgements": judgements, "false_alarms": alarms, "kills": kills}


def measure_v4_scores(seeds: int) -> dict[str, Any]:
    """R9 behind honest queries: how far a last bit of V4's latents moves a score, as a share of 1 + the row's largest.

    One channel of the query latent goes to the next bf16 number. A score left out may exceed a chosen one by
    two such movements. RIVAL moves none of 800 scores.
    """
    from .cards.csa import cases_select, honest_scores

    op = load_card("csa").op("csa_select")
    cases = [case for case in cases_select(False) if case.tokens == 19]
    worst, moved, count = 0.0, 0, 0
    for case in cases:
        for seed in range(seeds):
            inputs = op.draw(case, case_rng("csa", op.name, case.id, 5000 + seed))
            latent = inputs["latent_ta"].clone()
            latent.view(torch.int16)[:, seed] += 1
            ours, theirs = (honest_scores(i).double() for i in (inputs, inputs | {"latent_ta": latent}))
            seen = ours.isfinite()
            largest = torch.where(seen, ours, 0.0).abs().amax(1, keepdim=True)
            move = torch.where(seen, ((theirs - ours) / (1 + largest)).abs(), 0.0)
            worst, moved, count = max(worst, move.max().item()), moved + int((move > 0).sum()), count + int(seen.sum())
    ids = [case.id for case in cases]
    return {
        "seeds": seeds,
        "cases": ids,
        "judgements": count,
        "false_alarms": 0,
        "worst": {"movement": worst},
        "moved": moved,
    }


@dataclass
class _Selection:
    contract: torch.Tensor
    arguments: dict[str, Any]
    semantic: torch.Tensor
    rival: torch.Tensor
    marks: list[tuple[str, torch.Tensor]]


def _top_k(scores: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> bool:
    oracles = _Selection(expected, {"scores": scores}, expected, expected, [])
    return TopK(scores="scores").judge(got, oracles).ok


OTHERS = {"top-k": measure_top_k, "v4-scores": measure_v4_scores}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named kinds (default all) and write `evidence/KIND.json`; 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.evidence", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join([*KINDS, 'top-k'])}")
    parser.add_argument("--seeds", type=int, default=50)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.kinds) - {*KINDS, *OTHERS}
    if unknown:
        parser.error(f"kinds: expected {', '.join([*KINDS, 'top-k'])}, got {', '.join(sorted(unknown))}")
    alarms = 0
    with fixed_numerics():
        for name in chosen.kinds or [*KINDS, *OTHERS]:
            record = OTHERS[name](chosen.seeds) if name in OTHERS else measure(KINDS[name], chosen.seeds)
            command = f"python -m deeptwin.parity.evidence {name} --seeds {chosen.seeds}"
            write_json(FOLDER / f"{name}.json", {"kind": name, "command": command, "environment": facts()} | record)
            sys.stdout.write(f"{name}: {record['judgements']} judgements, {record['false_alarms']} false alarms\n")
            alarms += record["false_alarms"]
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
