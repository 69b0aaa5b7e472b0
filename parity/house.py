"""Where the rooms are and which components have no twin."""

from __future__ import annotations

import os
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[1]
ROOMS = ("reference", "optimized", "parity", "kernels", "golden")

# components without a fast twin, and one without a reference (design.md §2)
UNPAIRED = ("block", "model", "checkpoint", "accounting", "muon", "load_bias", "dspark_loss", "engine")
# modules of reference/ and optimized/ that are not components
SUPPORT = (
    *("numerics", "config", "presets", "checks", "weights", "layouts", "images", "cache_plan", "linear_slots"),
    *("topology", "csa2_config", "csa2_state", "csa2_layer", "engram_vocab", "engram_table"),
    *("providers", "plan", "steps", "steps_ffn", "steps_v3", "steps_v4", "steps_v41", "steps_state", "runners"),
    *("block_pool", "prefix_toy"),
    *("taps", "block_ffn", "block_v41", "block_weights", "ffn_weights", "mtp_weights", "model_weights"),
    *("dsa_index", "dsa_state", "dsa_rows", "dsa_step", "mla_step"),
    *(
        "v4_attend",
        "v4_layer",
        "v4_state",
        "v4_weights",
        "attention_v3",
        "attention_v32",
        "attention_v4",
        "attention_v41",
        "attention_window",
        "products_v4",
    ),
    *("account_terms", "account_v3", "account_v4", "account_v41", "account_claims"),
    *("dspark_weights", "dspark_curve", "dspark_step", "dspark_state", "dspark_layer", "dspark_chain", "dspark_pool"),
    *("checkpoint_file", "checkpoint_fields", "checkpoint_config", "checkpoint_v41"),
    *("checkpoint_names", "checkpoint_names_v41", "checkpoint_write"),
    *("philox", "sampling_filter", "sampling_rows"),
    *("engine_device", "engine_store"),
    *("verification", "drafter", "drafter_dspark", "drafter_mtp", "drafters"),
    *("serving_checks", "toy_model", "byte_grammar", "grammar_text", "grammar_json", "grammar_pool"),
)


def worker_environment(device: str) -> dict[str, str]:
    """Environment of a process that imports candidates: one BLAS thread, the house importable, interpreter on a CPU."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join([str(HOUSE / "src"), *inherited]),
    }
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
    return environment
