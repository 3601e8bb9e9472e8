"""Layers that predict tokens further ahead (MTP): they stay while their stream does, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cli_support import output_of
from plugin_support import state
from safetensors.torch import save_file
from tiny_models import Planted, planted
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


@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_layers_that_predict_further_tokens_stay_while_their_stream_does(
    residual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`align` copies what transformers does not read; where the stream moves, it says that it leaves it out."""
    model = planted(next(case for case in ONE if case.family == "qwen3_5"))
    further = {"mtp.fc.weight": torch.eye(4, dtype=torch.float64)}
    anchor, donor = (written(model, {**model.state, **further}, tmp_path / name) for name in "ab")
    monkeypatch.setattr("rotation_merge.matching.match.match_model", drawn_for(model))
    output = output_of("align", anchor, donor, tmp_path / "out", "--residual", residual, "--no-verify")
    after, moves = state(tmp_path / "out"), residual != "none"
    assert ("mtp.fc.weight" in after) != moves
    assert ("Left out, because the model does not read them: mtp.fc.weight." in output) == moves
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


def test_carrying_a_whole_model_keeps_them(tmp_path: Path) -> None:
    """The new base's own stay, whatever turns in between: its norms are as they were."""
    model = planted(next(case for case in ONE if case.family == "qwen3_5"))
    tensors = {**model.state, "mtp.fc.weight": torch.eye(4, dtype=torch.float64)}
    base, tuned = (written(model, tensors, tmp_path / name) for name in "ab")
    groups = ("--residual", "rotation", "--heads", "permutation")
    output_of("carry", tuned, "--from", base, "--to", base, tmp_path / "out", *groups, "--force")
    assert state(tmp_path / "out").keys() == tensors.keys()
