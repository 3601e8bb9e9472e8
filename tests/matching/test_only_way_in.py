"""`check_pair` is the only way into matching: every path asks it, also of tensors that nobody knows."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import COMMANDS, run
from plugin_support import mergekit_yaml, recipe_for
from tiny_models import ALL, Case, planted, save
from variants import ONE, try_make

import rotation_merge
from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture import resolve
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.model.view import described

NOTHING = AlignConfig(attention="none", heads="none", ffn="none", scaling=False)


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_the_unknown_may_not_stay_while_the_stream_moves(case: Case) -> None:
    """What an architecture file does not name, which recipes alone admit."""
    model = planted(case)
    size = next(iter(model.architecture.streams.values())).sizes["size"]
    groups = model.architecture.stream_groups.values()
    for shape, refused in (((size, 3), True), ((size + 1,), False)):
        state = {**model.state, "surplus.weight": torch.zeros(shape)}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        architecture = resolve(model.config, list(state), "model", keep_unknown=True)
        one = described("model", model.config, architecture, shapes)
        assert check_pair(one, one, AlignConfig()).unaligned == ("surplus.weight",)
        if all("permutation" in admitted for admitted in groups):
            moving = AlignConfig(residual="permutation")
            if refused:
                with pytest.raises(RotationMergeError, match=r"surplus\.weight.*would not move with"):
                    check_pair(one, one, moving)
            assert bool(check_pair(one, one, moving, excluded=lambda name: "surplus" in name)) or refused


class Asked(RotationMergeError):
    """check_pair was asked."""


PATHS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "api": lambda a, b, out: rotation_merge.align(a, b),
    "align": lambda a, b, out: run("align", a, b, out),
    "align --alignment": lambda a, b, out: run("align", a, b, "--alignment", out),
    "compare": lambda a, b, out: run("compare", a, b),
    "barrier": lambda a, b, out: run("barrier", a, b, "--data", "self"),
    "fit": lambda a, b, out: run(
        "fit", a, b, "--data", "self", "--limit", "8", "--batch-size", "4", "--alignment", out / "file"
    ),
    "inspect": lambda a, b, out: run("inspect", _recipe(a, b, out)),
    "inspect model": lambda a, b, out: run("inspect", a),
    "check": lambda a, b, out: run("check", _recipe(a, b, out)),
    "recipe": lambda a, b, out: mergekit_yaml(_recipe(a, b, out).read_text(), out / "merged"),
    "recipe, residual": lambda a, b, out: mergekit_yaml(
        _recipe(a, b, out, residual="permutation").read_text(), out / "merged"
    ),
    "recipe, mean": lambda a, b, out: mergekit_yaml(_recipe(a, b, out, anchor="mean").read_text(), out / "merged"),
    "recipe, alignment": lambda a, b, out: _merge(a, b, out, alignment=str(a.parent / "map")),
    "recipe, finetuned_from": lambda a, b, out: _merge(a, a.parent / "tuned", out, finetuned_from=str(b)),
    "recipe, finetuned_from, alignment": lambda a, b, out: _merge(
        *(a, a.parent / "tuned", out), finetuned_from=str(b), alignment=str(a.parent / "map")
    ),
    "merge": lambda a, b, out: run("merge", a, b, out, *SMALL, "--data", "self", "--budget", "1m"),
    "carry": lambda a, b, out: _carry(a, b, out),
    "carry --alignment": lambda a, b, out: _carry(a, b, out, "--alignment", a.parent / "map"),
    "carry --carry refit": lambda a, b, out: _carry(a, b, out, "--carry", "refit", "--samples", "32"),
    "doctor": lambda a, b, out: run("doctor", a, a, b),
    "doctor RECIPE": lambda a, b, out: run("doctor", _recipe(a, b, out)),
}

SMALL = ("--samples", "8", "--length", "8", "--batch-size", "4")

APART = {
    "verify": "compares outputs",
    "polish": "trains a merge",
    "evaluate": "runs models",
    "measure": "runs one model",
    "lora": "merges adapters, without their base",
    "push": "uploads a file",
    "demo": "runs a recipe",
}
"""Commands that match nothing themselves, and what they do."""


def test_every_command_is_a_path_or_matches_nothing() -> None:
    assert {path.split()[0].strip(",") for path in PATHS} - {"api", "recipe"} == COMMANDS.keys() - APART.keys()


def _merge(a: Path, b: Path, folder: Path, **given: Any) -> Any:
    """Merge with something said of the donor; transforms that have not been asked for are not applied."""
    document = yaml.safe_load(_recipe(a, b, folder, delegate="task_arithmetic").read_text())
    document["models"][-1]["parameters"] = {"weight": 1.0, **given}
    if "alignment" in given:  # options of matching have no effect
        document["parameters"] = {"delegate": "task_arithmetic"}
    return mergekit_yaml(document, folder / "merged")


def _carry(a: Path, b: Path, folder: Path, *options: object) -> Any:
    return run("carry", a.parent / "tuned", folder, "--from", b, "--to", a, *options)


def _recipe(a: Path, b: Path, folder: Path, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = recipe_for("linear", a, b)
    document = yaml.safe_load(text) if isinstance(text, str) else dict(text)
    document["parameters"] = {**document.get("parameters", {}), **settings}
    (folder / "recipe.yml").write_text(yaml.safe_dump(document))
    return folder / "recipe.yml"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    case = next(case for case in ALL if case.family == "llama")
    for seed, name in enumerate("ab"):
        model = try_make(case)
        assert model is not None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed * torch.randn_like(parameter))
        save(model.float(), folder / name)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    save(model, folder / "tuned")
    assert run("align", folder / "a", folder / "b", "--alignment", folder / "map").exit_code == 0
    return folder / "a", folder / "b"


@pytest.mark.parametrize("path", PATHS)
def test_every_path_into_matching_asks(
    path: str, two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a `check_pair` that refuses everything, nothing is matched, and its one line is what the user sees.

    Nor with one that lets two models meet, and refuses to match any of their spaces.
    """
    matches = "alignment" not in path.replace("align --alignment", "")
    for whatever in (True, False) if matches else (True,):

        def refuse(*given: Any, whatever: bool = whatever, **named: Any) -> Any:
            options = given[2] if len(given) > 2 else named["options"]
            if whatever or options != NOTHING:
                raise Asked("refused by the test")
            return check_pair(*given, **named)

        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{path} matches without asking")

        with monkeypatch.context() as patch:
            for info in pkgutil.walk_packages(rotation_merge.__path__, "rotation_merge."):
                for name, other in (("check_pair", refuse), *((name, never) for name in MATCHING)):
                    if name in vars(importlib.import_module(info.name)):
                        patch.setattr(importlib.import_module(info.name), name, other)
            out = tmp_path / f"out-{whatever}"
            try:
                result = PATHS[path](*two, out)
            except Asked:
                result = None
            else:
                assert "refused by the test" in result.output, result.output
                assert result.exit_code != 0, result.output
        assert not (out / "merged").exists()
        assert not (out / "model.safetensors").exists()


MATCHING = ("match_model", "match_block", "match_to_mean")
