"""What the README shows is what happens."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from deeptwin.parity.__main__ import app
from deeptwin.parity.card import card_names, load_card
from deeptwin.parity.house import HOUSE

README = (HOUSE / "README.md").read_text()


def blocks(language):
    """Bodies of the fenced blocks of a language; fences open and close in turn."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    return [parts[i + 1] for i in range(1, len(parts), 4) if parts[i] == language]


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (source,) = (block for block in blocks("python") if block.startswith("# my_attn.py"))
    (tmp_path / "my_attn.py").write_text(source)
    return tmp_path


def test_the_example_kernel_fails_as_shown_and_its_case_file_repeats_it(example):
    result = CliRunner().invoke(app, ["run", "sparse_attn", "--candidate", "my_attn.py:my_attn"])
    assert result.exit_code == 1
    shown = next(block for block in blocks("") if "deeptwin run sparse_attn --candidate my_attn.py" in block)
    minimal = next(line for line in shown.splitlines() if line.startswith("minimal failing case"))
    assert minimal in result.output.splitlines()
    (case,) = example.glob("deeptwin-failures/*.safetensors")
    assert case.name in shown
    assert CliRunner().invoke(app, ["run", "--case", str(case)]).exit_code == 1
    right = ["run", "--case", str(case), "--candidate", "right_block_64"]
    assert CliRunner().invoke(app, right).exit_code == 0


def test_every_component_and_command_is_listed():
    for name in card_names():
        assert f"| `{name}` |" in README
    for command in ("list", "show", "run", "gate", "shrink", "mutants", "golden verify", "demo"):
        assert f"deeptwin {command}" in README


def test_the_support_matrix_names_candidates_and_builds_of_the_cards():
    for name in card_names():
        (row,) = [line for line in README.splitlines() if line.startswith(f"| `{name}` |")]
        _, _, _, candidates, _, _, sm100, ascend, _ = row.split("|")
        card = load_card(name)
        assert set(re.findall(r"`([\w-]+)`", candidates)) == {c.name for op in card.ops for c in op.candidates}, name
        built = {arch for op in card.ops for build in op.builds for arch in build.expect}
        assert ("compiled" in sm100, "lowered" in ascend) == ("sm100" in built, "ascend950-simd" in built), name


def test_no_placeholder_is_left():
    assert not re.search(r"@[A-Z_]+@", README)
