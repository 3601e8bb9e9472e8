"""Measuring one layer at a time finds what measuring the whole model does, in the memory of a layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_support import run
from memory_support import alive, forget
from plugin_support import make as make_checkpoint
from plugin_support import one_error
from rounding import assert_equal_up_to_rounding
from safetensors.torch import load_file
from tiny_models import ALL, Case, inputs, keep_float64, make, save

from rotation_merge import MeasureConfig, RotationMergeError
from rotation_merge.architecture import resolve
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.open import open_model
from rotation_merge.run.data import Data
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.layers import LayerwiseMeasurement
from rotation_merge.run.measure import ModelMeasurement
from rotation_merge.run.measuring import record
from rotation_merge.run.passes import StatisticsPass, UnfinishedMeasurement, run_passes
from rotation_merge.run.runner import Runner, streamed_model
from rotation_merge.run.statistics import NAME, Statistics, write_error

HARD = ("gpt2", "bart", "t5", "clip", "gemma2", "dinov2", "qwen3_next")
FAMILIES = list({case.family: case for case in reversed(ALL) if case.family in HARD}.values())
OPTIONS = MeasureConfig(("gram",))


def both(case: Case, where: Path) -> tuple[Statistics, Statistics]:
    """What is found of the whole model, and layer by layer."""
    model = make(case)
    given: Any = inputs(case, model)
    config, state = save(model, where / "model")
    own = transformers.AutoConfig.from_pretrained(where / "model")
    stored = resolve(config, list(state), case.name)
    with keep_float64():
        runner = Runner(own, state, stored, [given], dtype=torch.float64)
        by_layer = LayerwiseMeasurement(runner, UnfinishedMeasurement(where / "layers", {}), lambda *_: None).run()
        whole = ModelMeasurement(model, architecture_of(model), [given], "none")
        return whole.run(OPTIONS, UnfinishedMeasurement(where / "whole", {}), lambda *_: None), by_layer


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_layer_by_layer_finds_what_the_whole_model_shows(case: Case, tmp_path: Path) -> None:
    whole, found = both(case, tmp_path)
    assert found.axes == whole.axes
    assert found.uncalled == whole.uncalled
    assert found.tensors.keys() == whole.tensors.keys()
    apart = whole.split - found.split  # behind the layers of a tower that is not the last
    assert found.split <= whole.split
    assert not any(".layers." in axis for axis in apart)
    for key, wanted in whole.tensors.items():
        if key.rpartition(".")[0] not in apart:
            torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """Two layers or eight: weights of one, sums of one."""
    peaks = []
    for layers in (2, 5):
        path = make_checkpoint("llama", tmp_path / str(layers), num_hidden_layers=layers, intermediate_size=96)
        data = Data([{"input_ids": torch.arange(24).view(2, 12)}], "none", 2)
        options, out, seen = MeasureConfig(("gram",)), tmp_path / f"{layers}.safetensors", list[int]()
        forget()
        record(
            open_model(str(path), any_base=True), None, data, "data", options, out, lambda *_, s=seen: s.append(alive())
        )
        peaks.append(max(seen))
    assert 0 < peaks[1] <= 1.02 * peaks[0]


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit is run by layer: the same statistics, the same after an interruption; or one line."""
    path = make_checkpoint("llama", tmp_path / "model")
    np.savez(tmp_path / "data.npz", input_ids=np.arange(48).reshape(4, 12) % 40)
    given = ("measure", path, "--data", tmp_path / "data.npz", "--batch-size", "2")
    assert run(*given).exit_code == 0
    whole = load_file(path / NAME)
    assert run(*given, "--by-layer", "--out", tmp_path / "once").exit_code == 0
    (path / NAME).unlink()
    monkeypatch.setattr("rotation_merge.run.passes.room", lambda: 1)
    stock, calls = LayerwiseMeasurement._outputs, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return stock(self, *arguments)

    monkeypatch.setattr(LayerwiseMeasurement, "_outputs", interrupted)
    assert run(*given).exit_code != 0
    assert not (path / NAME).exists()
    assert run(*given).exit_code == 0
    assert (path / NAME).read_bytes() == (tmp_path / "once").read_bytes()
    found = load_file(path / NAME)
    assert found.keys() == whole.keys()
    for key in whole:
        torch.testing.assert_close(found[key], whole[key])
    assert sorted(p.name for p in path.iterdir() if "unfinished" in p.name) == []
    wanted = [*given[:2], "--data", "self", "--samples", "3", "--length", "12"]
    for how in ("whole", "by-layer"):
        assert run(*wanted, f"--{how}", "--out", tmp_path / how).exit_code == 0
    assert_equal_up_to_rounding(load_file(tmp_path / "by-layer"), load_file(tmp_path / "whole"), units=4096)


@pytest.mark.parametrize("fits", [True, False])
def test_a_fisher_diagonal_needs_the_whole_model(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    if not fits:
        monkeypatch.setattr("rotation_merge.run.passes.room", lambda: 1)
    done = run("measure", path, "--data", "self", "--kinds", "gram,fisher", *(["--by-layer"] if fits else []))
    assert done.exit_code == 2
    assert "a Fisher diagonal needs the whole model in memory; measure the kind 'gram', or" in one_error(done.output)
    assert not (path / NAME).exists()


class Counted(dict[str, torch.Tensor]):
    """A source that counts how often each tensor is read."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(state)
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return super().__getitem__(name)


def test_weights_are_read_on_every_run_and_let_go_after_it(tmp_path: Path) -> None:
    case = next(case for case in ALL if case.family == "llama")
    config, state = save(make(case), tmp_path / "model")
    own = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    source = Counted(state)
    model = streamed_model(own, source, resolve(config, list(state), case.name), torch.float64)
    weights = [name for name in state if name.endswith("down_proj.weight")]
    assert all(source.reads[name] == 0 for name in weights)
    ids = torch.ones(1, 3, dtype=torch.int64)
    for count in (1, 2):
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        assert all(source.reads[name] == count for name in weights)
        assert all(model.get_parameter(name).isnan().all() for name in weights)
        assert logits.isfinite().all()


def counting(stop: BaseException | None = None, within: bool = False) -> StatisticsPass:
    """A pass of three steps that add one and two; it is stopped in the second, between the two or before both."""

    def run(step: int, sums: dict[str, torch.Tensor]) -> None:
        for number in (1, 2):
            if stop is not None and step == 1 and number == 1 + within:
                raise stop
            sums.setdefault("a", torch.zeros(()))
            sums["a"] += number

    return StatisticsPass("counting", frozenset({"a"}), 3, run, dict)


@pytest.mark.parametrize("within", [False, True])
def test_what_is_stopped_within_a_step_counts_nothing_twice(within: bool, tmp_path: Path) -> None:
    state = UnfinishedMeasurement(tmp_path / "out", {})
    with pytest.raises(KeyboardInterrupt), state:
        run_passes([counting(KeyboardInterrupt(), within)], state, lambda *_: None)
    assert state.begun(counting())[0] == (0 if within else 1)
    with UnfinishedMeasurement(tmp_path / "out", {}) as again:
        found = run_passes([counting()], again, lambda *_: None)
        assert float(found["a"]) == 9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("done", "kept"), [(True, True), (False, False)])
def test_a_full_disk_leaves_what_is_done(done: bool, kept: bool, tmp_path: Path) -> None:
    """The folder stays where a next run can use it, and goes where there is nothing in it."""
    state = UnfinishedMeasurement(tmp_path / "out", {})
    full = write_error(tmp_path / "out", OSError(28, "No space left on device"))
    if done:
        run_passes([counting()], state, lambda *_: None)
    with pytest.raises(RotationMergeError, match=r"no space left.*the same command continues"), state:
        raise full
    assert state.path.exists() == kept


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RotationMergeError, match=f"^{tmp_path}: the disk is full.*TMPDIR"), TemporaryFolder():
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
