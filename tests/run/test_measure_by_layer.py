"""Measuring one layer at a time finds what a forward of the whole model shows, in the memory of a layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import error_of, output_of, run
from memory_support import alive, forget
from plugin_support import make as make_checkpoint
from rounding import assert_equal_up_to_rounding
from safetensors.torch import load_file
from tiny_models import ALL, keep_float64, planted

from rotation_merge import MeasureConfig, RotationMergeError
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Data
from rotation_merge.run.functions import empty_model, streamed_model
from rotation_merge.run.measure import grams, measured
from rotation_merge.run.recorder import Products, WatchedBlocks
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics import NAME, first_readers

HARD = ("gpt2", "bart", "t5", "clip", "gemma2", "dinov2", "qwen3_next")
CASES = {case.family: case for case in reversed(ALL)}


@pytest.mark.parametrize("family", HARD)
def test_layer_by_layer_finds_what_the_whole_model_shows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs as they are, of one forward of the whole model."""
    subject = planted(CASES[family])
    model, batch = subject.module, subject.given
    view = View(family, subject.config, subject.architecture, as_tensors(subject.state))
    monkeypatch.setattr(WatchedBlocks, "_norm", lambda *_: None)
    with keep_float64(), torch.no_grad():
        found = grams(Runner(view, [batch], dtype=torch.float64))
        whole = Runner(view, [batch], dtype=torch.float64)
        watched, whole.model = WatchedBlocks(whole), model
        seen = defaultdict[tuple[str, int | None], list[torch.Tensor]](list)
        with Products(watched, lambda name, expert, x, _: seen[name, expert].append(x.flatten(0, -2))):
            model(**batch)
    assert found.tensors.keys() == {f"{axis}.{kind}" for axis in found.axes.values() for kind in ("gram", "count")}
    for axis, name in first_readers(found.axes).items():
        gram, counts = found[f"{axis}.gram"], found[f"{axis}.count"].flatten().tolist()
        for expert, (one, count) in enumerate(zip(gram.reshape(-1, *gram.shape[-2:]), counts, strict=True)):
            rows = torch.cat([one.new_zeros(0, len(one) - 1), *seen[name, expert if gram.ndim == 3 else None]])
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            torch.testing.assert_close(one * count, rows.T @ rows, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """Two layers or five: weights of one, sums of one."""
    peaks = []
    for layers in (2, 5):
        path = make_checkpoint("llama", tmp_path / str(layers), num_hidden_layers=layers, intermediate_size=96)
        data = Data([{"input_ids": torch.arange(24).view(2, 12)}], "none", 2)
        options, out, seen = MeasureConfig(("gram",)), tmp_path / f"{layers}.safetensors", list[int]()
        forget()
        view = open_model(str(path))
        measured(view, empty_model(view), data, options, out, lambda *_, s=seen: s.append(alive()))
        peaks.append(max(seen))
    assert 0 < peaks[1] <= 1.02 * peaks[0]


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same statistics after an interruption, and of text that a model writes by layer or as a whole."""
    path = make_checkpoint("llama", tmp_path / "model")
    np.savez(tmp_path / "data.npz", input_ids=np.arange(48).reshape(4, 12) % 40)
    of_file = ("measure", path, "--data", tmp_path / "data.npz", "--batch-size", "2")
    output_of(*of_file, "--out", tmp_path / "once")
    stock, calls = WatchedBlocks.advance, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return stock(self, *arguments)

    monkeypatch.setattr(WatchedBlocks, "advance", interrupted)
    assert run(*of_file).exit_code != 0
    assert not (path / NAME).exists()
    assert list(path.glob("*unfinished*"))
    output_of(*of_file)
    assert (path / NAME).read_bytes() == (tmp_path / "once").read_bytes()
    assert not list(path.glob("*unfinished*"))
    for how in ("whole", "by-layer"):
        options = ("--data", "self", "--samples", "3", "--length", "12", "--out", tmp_path / how)
        output_of("measure", path, *options, f"--{how}")
    assert_equal_up_to_rounding(load_file(tmp_path / "by-layer"), load_file(tmp_path / "whole"), units=4096)


@pytest.mark.parametrize("fits", [True, False])
def test_a_fisher_diagonal_needs_the_whole_model(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    if not fits:
        monkeypatch.setattr("rotation_merge.run.measure.free_memory", lambda: 1)
    assert "a Fisher diagonal needs the whole model in memory; measure the kind 'gram', or" in error_of(
        "measure", path, "--data", "self", "--kinds", "gram,fisher", *(["--by-layer"] if fits else [])
    )
    assert not (path / NAME).exists()


def test_weights_are_read_on_every_run_and_let_go_after_it() -> None:
    subject, reads = planted(CASES["llama"]), Counter[str]()
    state = dict(subject.state)
    source = as_tensors(state).map(lambda name, tensor: (reads.update([name]), tensor.float())[1])
    model = streamed_model(View("llama", subject.config, subject.architecture, source), "cpu")
    weights = [name for name in state if name.endswith("down_proj.weight")]
    for count in (1, 2):
        with torch.no_grad():
            assert model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()
        assert all(reads[name] == count for name in weights)
        assert all(model.get_parameter(name).is_meta for name in state)
    del state[weights[0]]
    with pytest.raises(RotationMergeError, match=rf"no weight {weights[0]}"):
        streamed_model(View("llama", subject.config, subject.architecture, as_tensors(state)), "cpu")


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RotationMergeError, match=f"^{tmp_path}: the disk is full.*TMPDIR"), TemporaryFolder():
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
