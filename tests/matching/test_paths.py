"""The law of every family on every path: what a donor computes survives `align` and recipes, from files to files.

Matching itself is left out: transforms are drawn from the largest groups, so that nothing is cheap to move. Merges that
match are tried over all families in laws/test_laws.py, the Python API in test_pair.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cli_support import run
from plugin_support import merged, state
from safetensors.torch import save_file
from tiny_models import Case, Planted, planted
from variants import ONE

from rotation_merge import AlignConfig, Alignment, align, transfer


def written(model: Planted, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint in float64, with the config of a tiny model."""
    folder.mkdir()
    (folder / "config.json").write_text((model.folder / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drawn_for(model: Planted) -> Mock:
    """In the place of the best alignment: any."""

    def drawn(architecture: Any, anchor: Any, donor: Any, options: AlignConfig, *_: Any, **__: Any) -> Alignment:
        return Alignment.random(model.pair, options, seed=5)

    return Mock(side_effect=drawn)


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_what_a_donor_computes_survives(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor is the tiny model, whose outputs are known; the anchor has other weights everywhere."""
    model = planted(case)
    draw = torch.Generator().manual_seed(7)
    other = {n: x + 0.3 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    anchor, donor = written(model, other, tmp_path / "anchor"), written(model, model.state, tmp_path / "donor")
    drew = drawn_for(model)
    monkeypatch.setattr("rotation_merge.matching.match.match_model", drew)
    options = ("--heads", "permutation", "--residual", "largest", "--no-verify", "--alignment", tmp_path / "map")
    done = run("align", anchor, donor, tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    drew.assert_called_once()
    after = state(tmp_path / "out")
    assert after.keys() == model.state.keys()
    assert any(not torch.equal(after[name], model.state[name]) for name in after)
    assert model.differs(after) <= 1e-9
    if case.family in FROM_FILES:
        the_file_does_the_same_in_a_recipe(model, anchor, donor, tmp_path)


FROM_FILES = ("llama", "bert", "clip", "deepseek", "falcon_h1", "mixtral", "qwen3_5_vlm", "qwen3_next", "t5", "vit")
"""Families that together have spaces of every kind, and streams of every group."""


def the_file_does_the_same_in_a_recipe(model: Planted, anchor: Path, donor: Path, tmp_path: Path) -> None:
    mapped = {"weight": 1.0, "alignment": str(tmp_path / "map")}
    document = {
        "merge_method": "rotation_merge",
        "base_model": str(anchor),
        "models": [{"model": str(anchor), "parameters": {"weight": 0.0}}, {"model": str(donor), "parameters": mapped}],
        "parameters": {"delegate": "linear"},
        "dtype": "float64",
    }
    tensors = merged(document, tmp_path / "merged")
    assert tensors.keys() == model.state.keys()
    assert model.differs(tensors) <= 1e-4, "transforms are stored in float32"


@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_layers_that_predict_further_tokens_stay_while_their_stream_does(
    residual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`align` copies what transformers does not read; where the stream moves, it says that it leaves it out."""
    model = planted(next(case for case in ONE if case.family == "qwen3_5"))
    further = {"mtp.fc.weight": torch.eye(4, dtype=torch.float64)}
    anchor, donor = (written(model, {**model.state, **further}, tmp_path / name) for name in "ab")
    monkeypatch.setattr("rotation_merge.matching.match.match_model", drawn_for(model))
    done = run("align", anchor, donor, tmp_path / "out", "--residual", residual, "--no-verify")
    assert done.exit_code == 0, done.output
    after, moves = state(tmp_path / "out"), residual != "none"
    assert ("mtp.fc.weight" in after) != moves
    assert ("Left out, because the model does not read them: mtp.fc.weight." in done.output) == moves
    assert ("mtp.fc.weight" in (tmp_path / "out" / "README.md").read_text()) == moves


@pytest.mark.parametrize(("family", "further"), [("qwen3_5", "mtp.fc.weight"), ("deepseek", "model.layers.2.eh_proj")])
def test_the_python_api_leaves_them_out_as_well(
    family: str, further: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not moved by `align`, which names what it leaves out; nor need the other model have it. `carry` turns nothing."""
    model = planted(next(case for case in ONE if case.family == family))
    whole = {**model.state, further: torch.eye(4, dtype=torch.float64)}
    monkeypatch.setattr("rotation_merge.api._matcher", lambda *_: drawn_for(model))
    for residual in ("none", "rotation"):
        moves = residual != "none"
        donor, anchor = (whole, model.config), (model.state, model.config)
        alignment = align(anchor, donor, residual=residual)
        aligned, again = alignment.apply(donor), transfer(donor, donor, donor, residual=residual)
        assert again.keys() == whole.keys()
        assert aligned.keys() == (model.state if moves else whole).keys()
        assert model.differs({name: aligned[name] for name in model.state}) <= 1e-9
        words = f"Left out, because the model does not read them: {further}."
        for notes in (alignment.report.notes, aligned.notes, caplog.messages):
            assert (words in notes) == moves
