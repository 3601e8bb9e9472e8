"""A smaller model in a larger one's sizes computes what it did, and the way back to where it was planted is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import load as load_model
from plugin_support import make as make_checkpoint
from plugin_support import merged, recipe_for, relative_distances, state, twin, write_state
from tiny_models import ALL, Case, difference, inputs, load, make, outputs, reload, save
from widths_support import CASES, LARGE, doubled, of_sizes, widened

import rotation_merge as rm


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_a_model_of_twice_the_sizes_computes_the_same(case: Case, tmp_path: Path) -> None:
    model = make(case)
    config, own = save(model, tmp_path)
    given = inputs(case, model)
    before = outputs(load(case, tmp_path), given)
    wide = doubled(config)
    view = widened(of_sizes(case, wide, tmp_path / "large"), (own, config)).apply((own, config))
    tensors = {name: tensor.contiguous() for name, tensor in view.items()}
    (tmp_path / "config.json").write_text(json.dumps({**wide, **view.config}))
    after = outputs(reload(case, tmp_path, tensors), given)
    assert difference(before, after) < 1e-9
    assert sum(t.numel() for t in tensors.values()) > 1.5 * sum(t.numel() for t in own.values())
    assert view.config.items() >= {key: value for key, value in wide.items() if value != config[key]}.items()


def refused() -> Iterator[Any]:
    """Models whose sizes cannot change, which of them, and what is said."""
    yield pytest.param("bert", "masked words", (), "zeros would change its mean", id="post-norm")
    yield pytest.param("bert", "bare", (), "is an output of the model", id="output")
    yield pytest.param("gpt2", "tied", (), "add 'untie'", id="tied and centred")
    yield pytest.param("qwen3_next", "moe", ("linear_value_head_dim",), "is normalised", id="normalised")
    yield pytest.param("t5", "tokens", ("num_heads",), "roles depend on their number", id="shared biases")


@pytest.mark.parametrize(("family", "name", "only", "words"), list(refused()))
def test_sizes_that_decide_a_function_stay(
    family: str, name: str, only: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    case = next(case for case in ALL if case.family == family and case.name == name)
    config, own = save(make(case), tmp_path)
    wide = doubled(config, *only)
    with pytest.raises(rm.RotationMergeError, match=words):
        widened(of_sizes(case, wide, tmp_path / "large"), (own, config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small Llama, and a large one that is it in other coordinates."""
    folder = tmp_path_factory.mktemp("widths")
    small = make_checkpoint("llama", folder / "small")
    large = make_checkpoint("llama", folder / "large", seed=5, **LARGE)
    inner = folder / "inner"
    widened(str(large), str(small)).apply(str(small)).save_pretrained(inner)
    return small, twin(inner, folder / "planted", residual="rotation", heads="permutation")


def test_a_planted_model_is_found_in_a_larger_one(models: tuple[Path, Path], tmp_path: Path) -> None:
    small, planted = models
    found = parsed(
        "align", planted, small, tmp_path / "out", "--widths", "--residual", "rotation", "--heads", "permutation"
    )
    assert max(relative_distances(state(planted), state(tmp_path / "out")).values()) < 1e-3
    assert found["proof"]["difference"] <= found["proof"]["allowed"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in LARGE} == LARGE
    assert "was widened to the sizes of" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_widened_can_be_merged(models: tuple[Path, Path], tmp_path: Path, dtype: str) -> None:
    small, planted = models
    out = tmp_path / "out"
    assert run("align", planted, small, out, "--widths", "--dtype", dtype, "--shard-size", "40K").exit_code == 0
    assert merged(recipe_for("linear", planted, out), tmp_path / "merged").keys() == state(planted).keys()


def test_modules_are_widened_in_memory(models: tuple[Path, Path]) -> None:
    small, planted = (load_model(str(path)) for path in models)
    alignment = rm.align(planted, small, widths=True, residual="rotation", heads="permutation")
    moved = alignment.apply(small).state_dict()
    assert max(relative_distances(planted.state_dict(), moved).values()) < 1e-3
    assert any("was widened" in line for line in alignment.report.notes)


def test_a_tied_head_is_widened_with_its_embedding_or_by_itself(tmp_path: Path) -> None:
    small = make_checkpoint("qwen2", tmp_path / "small")
    large = make_checkpoint("qwen2", tmp_path / "large", seed=5, **LARGE)
    for number, options in enumerate((("--residual", "signed_permutation"), ("--residual", "rotation", "--untie"))):
        proof = parsed("align", large, small, tmp_path / str(number), "--widths", *options)["proof"]
        assert proof["difference"] <= proof["allowed"]
        assert ("lm_head.weight" in state(tmp_path / str(number))) == bool(number)


@pytest.mark.parametrize("lora", [0, 32])
def test_a_fine_tune_of_a_smaller_base_computes_at_the_larger_one_what_it_did(
    models: tuple[Path, Path], tmp_path: Path, lora: int
) -> None:
    """The larger base is the smaller one in other coordinates; so is what is carried there."""
    small, planted = models
    draw = torch.Generator().manual_seed(0)
    change = {
        n: 0.05 * torch.randn(t.shape, generator=draw) for n, t in state(small).items() if n.endswith("proj.weight")
    }
    tuned = write_state({n: t + change.get(n, 0.0) for n, t in state(small).items()}, small, tmp_path / "tuned")
    words = ["--lora", lora] if lora else []
    options = ("--widths", "--heads", "permutation", "--residual", "rotation", *words)
    found = run("carry", tuned, tmp_path / "out", "--from", small, "--to", planted, *options)
    assert found.exit_code == 0, found.output
    there = f"{planted}+{tmp_path / 'out'}" if lora else str(tmp_path / "out")
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        home, here, base = (load_model(str(path))(ids).logits for path in (tuned, there, planted))
    assert float((here - home).abs().max()) < 1e-3 * float((base - home).abs().max())


def test_what_cannot_be_widened_is_one_line(models: tuple[Path, Path], tmp_path: Path) -> None:
    small, planted = models
    for arguments, words in (
        ((small, planted, tmp_path / "out", "--widths"), "more than"),
        ((planted, small, tmp_path / "out", "--widths", "--no-verify"), "--widths"),
        ((planted, small, tmp_path / "out"), "aligning it with 'widths'"),
        ((make_checkpoint("vit", tmp_path / "vit"), small, tmp_path / "out", "--widths"), "another architecture"),
    ):
        found = run("align", *arguments)
        assert found.exit_code == 2, found.output
        assert words in found.output
        assert "Traceback" not in found.output
        assert not (tmp_path / "out").exists()
