"""Maps of the stream for every layer, for changes that weights carry: planted truth, what decides, every path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import make, merged, mergekit_yaml, recipe_for, state, write_state
from torch import Tensor

from rotation_merge.architectures import resolve
from rotation_merge.architectures.model import Architecture
from rotation_merge.matching.carry import Carrier
from rotation_merge.matching.factors import LowRank, dense
from rotation_merge.matching.layer_streams import LayerStreams
from rotation_merge.matching.model import Alignment
from rotation_merge.samples.functions import load

HALF = 16
"""Of the stream's coordinates: along the others the new base's layers have nothing in common with the old one's."""


def noisy(own: dict[str, Tensor], size: float, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=draw).to(t) for n, t in own.items()}


def half_of(own: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model whose layers are another one's along half of the stream."""
    mixed = {name: tensor.clone() for name, tensor in own.items()}
    for name in (name for name in own if "proj" in name):
        into = (slice(HALF, None),) if "o_proj" in name or "down_proj" in name else (slice(None), slice(HALF, None))
        mixed[name][into] = other[name][into]
    return mixed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, its fine-tune, and new bases: the same in part, and the same but for noise."""
    folder = tmp_path_factory.mktemp("streams")
    old = make("llama", folder / "old")
    own, other = state(old), state(make("llama", folder / "other", seed=9))
    made = {"tuned": noisy(own, 0.02), "part": half_of(own, other), "noisy": noisy(own, 0.2, seed=2)}
    return {"old": old, **{name: write_state(tensors, old, folder / name) for name, tensors in made.items()}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": [(7 * i + j * j) % 40 for j in range(8)]}) for i in range(32)))
    return file


def found(models: dict[str, Path], new: str, forced: bool = False) -> tuple[Architecture, LayerStreams]:
    """The maps from the old base to one that has its coordinates."""
    sources = [{name: tensor.double() for name, tensor in state(models[which]).items()} for which in (new, "old")]
    architecture = resolve(json.loads((models[new] / "config.json").read_text()), list(sources[0]), new)
    still = {name: architecture.stream_group(name, "rotation").identity() for name in architecture.streams}
    return architecture, LayerStreams(architecture, *sources, Alignment(still, tuple(still)), forced)


def test_what_the_bases_agree_in_stays_and_the_rest_becomes_small(models: dict[str, Path]) -> None:
    architecture, maps = found(models, "part")
    for block in architecture.layers("default"):
        own = maps(block.name)["residual"]
        same, other = own[:HALF, :HALF], own[HALF:, HALF:]
        assert float((same - torch.eye(HALF)).norm()) < 0.25 * HALF**0.5
        assert float(other.norm()) < 0.5 * HALF**0.5
        assert maps.told[block.name] > 1.2
    outside = next(block for block in architecture.blocks if block.index is None)
    assert maps(outside.name) == {}


def test_where_all_directions_agree_alike_the_shared_map_stays(models: dict[str, Path]) -> None:
    architecture, maps = found(models, "noisy")
    assert all(maps(block.name) == {} for block in architecture.layers("default"))
    assert "taken in 0 of 2" in maps.words()[0]
    assert all(0.5 < told <= 1 for told in maps.told.values())


def test_a_change_moves_along_what_reads_and_what_writes(models: dict[str, Path]) -> None:
    """Its factors, too."""
    architecture, maps = found(models, "part", forced=True)
    block = architecture.layers("default")[0]
    own, draw = maps(block.name)["residual"], torch.Generator().manual_seed(0)
    old, new = (state(models[name]) for name in ("old", "part"))
    carrier = Carrier(architecture, old, new, maps.alignment, layers=maps)
    for key in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        info = next(i for i in block.tensors if i.name.endswith(key))
        out, width = (axis.size or 0 for axis in info.axes)
        low = LowRank(*(torch.randn(s, generator=draw, dtype=torch.float64) for s in ((2, width), (out, 2))))
        change = dense(low, info)
        moved = carrier.moved(block, info, change)
        torch.testing.assert_close(moved, own @ change if "down" in key else change @ own.mT)
        factors, whole = (carrier.block(block, {info.key: one})[info.key] for one in (low, change))
        assert isinstance(factors, LowRank)
        torch.testing.assert_close(dense(factors, info), whole)


def carry(models: dict[str, Path], new: str, out: Path, *more: object) -> str:
    pair = ("--from", models["old"], "--to", models[new], "--residual", "rotation", "--heads", "permutation")
    done = parsed("carry", models["tuned"], out, *pair, *more)
    return " ".join(done["written"][0]["lines"])


def recipe(models: dict[str, Path], new: str, **parameters: Any) -> dict[str, Any]:
    made = recipe_for("task_arithmetic", models[new], models["tuned"], residual="rotation")
    own = {"weight": 1.0, "finetuned_from": str(models["old"]), **parameters}
    return {**made, "models": [{"model": str(models["tuned"]), "parameters": own}]}


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        return load(str(path))(torch.arange(12).view(2, 6)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("chosen", ["auto", "shared", "own"])
def test_recipe_and_command_agree(models: dict[str, Path], chosen: str, tmp_path: Path) -> None:
    lines = carry(models, "part", tmp_path / "out", "--stream-maps", chosen)
    merged(recipe(models, "part", stream_maps=chosen), tmp_path / "merged")
    report = (tmp_path / "merged" / "rotation_merge.json").read_text()
    said = {"auto": "taken in 2 of 2", "own": "taken in all 2"}.get(chosen, "")
    for text in (lines, report, (tmp_path / "out" / "README.md").read_text()):
        assert said in text
        assert said or "map of the stream of its own" not in text
    assert float((logits(tmp_path / "merged") - logits(tmp_path / "out")).abs().max()) < 1e-4


def test_a_change_comes_home(models: dict[str, Path], tmp_path: Path) -> None:
    """The old base itself as the new one, every layer by a map of its own, which is the identity."""
    assert "taken in all 2" in carry(
        {**models, "part": models["old"]}, "part", tmp_path / "out", "--stream-maps", "own"
    )
    torch.testing.assert_close(logits(tmp_path / "out"), logits(models["tuned"]), atol=1e-5, rtol=1e-5)


def test_samples_choose(models: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    given = ("--scale", "auto", "--data", texts, "--samples", 32)
    lines = carry(models, "part", tmp_path / "out", *given)
    assert "tried beside the shared one; samples held out took" in lines
    made = recipe(models, "part", scale="auto", data=str(texts), samples=32)
    merged(made, tmp_path / "merged")
    assert "samples held out took" in (tmp_path / "merged" / "rotation_merge.json").read_text()
    assert float((logits(tmp_path / "merged") - logits(tmp_path / "out")).abs().max()) < 1e-4


def test_other_ways_go_by_none(models: dict[str, Path], tmp_path: Path) -> None:
    pair = ("--from", models["old"], "--to", models["part"], "--carry", "refit", "--stream-maps", "own")
    done = run("carry", models["tuned"], tmp_path / "out", *pair)
    assert done.exit_code == 2
    assert "leave out --carry refit" in done.output
    done = mergekit_yaml(recipe(models, "part", carry="refit", stream_maps="own"), tmp_path / "out")
    assert done.exit_code != 0
    assert "of a change that weights carry" in done.output
    assert not (tmp_path / "out").exists()
