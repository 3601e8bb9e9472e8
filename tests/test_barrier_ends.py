"""The ends of `barrier`'s paths are the parents, each under its own config."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_support import parsed, run
from tiny_models import ALL, make, save

from rotation_merge.cli import barrier
from rotation_merge.samples.data import read_batches
from rotation_merge.samples.evaluate import evaluate
from rotation_merge.samples.functions import load

DIFFERENT = {"rope_parameters": {"rope_theta": 20.0, "rope_type": "default"}, "rms_norm_eps": 0.5}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An anchor, a donor whose config differs where a merge becomes questionable, and data."""
    folder = tmp_path_factory.mktemp("ends")
    case = next(case for case in ALL if case.family == "llama" and not case.config.get("tie_word_embeddings"))
    for seed, name in enumerate(("anchor", "donor")):
        save(make(case, seed).float(), folder / name)
    file = folder / "donor" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **DIFFERENT}))
    np.savez(folder / "data.npz", input_ids=np.arange(40).reshape(2, 20) % 30 + 3)
    return folder / "anchor", folder / "donor", folder / "data.npz"


def loss(path: Path, data: Path, config: Path | None = None) -> float:
    """Of a model on its own, or with the weights of one and the config of another."""
    model = load(str(path))
    if config is not None:
        other = load(str(config))
        other.load_state_dict(model.state_dict())
        model = other
    return evaluate(model, read_batches(str(data), str(path), model))[0]


@pytest.mark.parametrize("residual", ["none", "permutation", "rotation"])
def test_each_end_is_the_parent_under_its_own_config(residual: str, two: tuple[Path, Path, Path]) -> None:
    anchor, donor, data = two
    own = loss(anchor, data), loss(donor, data)
    assert abs(loss(donor, data, config=anchor) - own[1]) > 1e-2  # its config matters
    for first, second, ends in ((anchor, donor, own), (donor, anchor, own[::-1])):
        found = parsed("barrier", first, second, "--data", data, "--points", 3, "--residual", residual)[0]
        for curve in found["curves"]:
            assert (curve["loss"][0], curve["loss"][-1]) == pytest.approx(ends, abs=1e-4), curve["name"]


def test_it_says_how_far_all_paths_are(two: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then, which counts up to all the models that are measured; none where it is quick."""
    anchor, donor, data = two
    given = ("barrier", anchor, donor, "--data", data, "--data", data, "--points", 4, "--anchors", "each")
    assert "models on the paths" not in run(*given).stderr
    monkeypatch.setattr(barrier, "EVERY", -1.0)
    said = [line for line in run(*given).stderr.splitlines() if "models on the paths, about " in line]
    counts = [int(line.split()[0]) for line in said]
    assert sorted(set(counts)) == list(range(barrier.ENOUGH, 25))
    assert {line.split()[2] for line in said} == {"24"}
