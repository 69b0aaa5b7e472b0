"""Golden vectors: missing, changed, truncated and unused ones fail and are named; updating is explicit and atomic."""

from __future__ import annotations

import json
import shutil

import pytest

from deeptwin.parity import goldens
from deeptwin.parity.card import card_names, load_card
from deeptwin.parity.house import HOUSE
from deeptwin.parity.outcome import Status

CARD = load_card("rope")


@pytest.fixture
def root(tmp_path):
    shutil.copytree(HOUSE / "golden" / "rope", tmp_path / "rope")
    return tmp_path


def problems(root):
    return [o for o in goldens.verify(CARD, root) if o.status is not Status.PASSED]


def test_every_component_stays_small():
    for name in card_names():
        size = sum(p.stat().st_size for p in (HOUSE / "golden" / name).iterdir())
        assert size <= 1_000_000, name


def test_a_fresh_copy_has_no_problem(root):
    assert problems(root) == []


def test_missing_files_are_named_with_the_fix(root):
    (root / "rope" / "manifest.json").unlink()
    (found,) = problems(root)
    assert "rope/manifest.json: missing; write it with 'deeptwin golden update'" in found.message


def test_an_edited_file_is_named_with_both_digests(root):
    data = root / "rope" / "vectors.safetensors"
    whole = bytearray(data.read_bytes())
    whole[-1] ^= 1
    data.write_bytes(whole)
    (found,) = problems(root)
    assert f"{data}: changed: expected SHA-256" in found.message
    assert found.message.count("SHA-256") == 1
    assert "got" in found.message


def test_a_truncated_file_is_named_with_both_digests(root):
    data = root / "rope" / "vectors.safetensors"
    data.write_bytes(data.read_bytes()[:40])
    (found,) = problems(root)
    assert str(data) in found.message
    assert "expected SHA-256" in found.message


def edit(root, change):
    path = root / "rope" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_vector_that_no_case_asks_for_is_unused(root):
    edit(root, lambda m: m["vectors"].update({"rope/retired": next(iter(m["vectors"].values()))}))
    (found,) = problems(root)
    assert "rope/retired is unused" in found.message


def test_a_missing_vector_fails(root):
    edit(root, lambda m: m["vectors"].pop(sorted(m["vectors"])[0]))
    (found,) = problems(root)
    assert "no vector" in found.message


def test_other_inputs_fail_with_both_digests(root):
    edit(root, lambda m: m["vectors"][sorted(m["vectors"])[0]].update(inputs="0" * 64))
    (found,) = problems(root)
    assert f"expected SHA-256 {'0' * 64}, got" in found.message


def test_a_stray_file_fails(root):
    (root / "rope" / "old.safetensors").write_bytes(b"x")
    (found,) = problems(root)
    assert "old.safetensors: unused file" in found.message


def test_update_writes_what_is_missing_and_says_so(root):
    edit(root, lambda m: m["vectors"].pop(sorted(m["vectors"])[0]))
    moved = goldens.update(CARD, new_only=True, root=root)
    assert len(moved) == 1
    assert problems(root) == []
    assert goldens.update(CARD, root=root) == []
    assert not list((root / "rope").glob("*.partial"))


def test_new_only_keeps_a_stored_vector_that_the_reference_no_longer_gives(root, monkeypatch):
    real = list(goldens.recompute(CARD))
    name = next(iter(real[0].outputs))
    changed = goldens.Vector(
        key=real[0].key, inputs=real[0].inputs, outputs=real[0].outputs | {name: real[0].outputs[name] * 0}
    )
    monkeypatch.setattr(goldens, "recompute", lambda card: iter([changed, *real[1:]]))
    assert goldens.update(CARD, new_only=True, root=root) == []
    (found,) = problems(root)
    assert found.diagnosis == "the reference moved"
    assert "reference against golden" in found.message


def test_new_only_refuses_damaged_files(root):
    (root / "rope" / "vectors.safetensors").write_bytes(b"")
    with pytest.raises(goldens.GoldenError, match=r"vectors\.safetensors"):
        goldens.update(CARD, new_only=True, root=root)
