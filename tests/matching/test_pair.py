"""What pairs of models are refused for and warned of, over all families; every path into matching asks `check_pair`."""

from __future__ import annotations

import importlib
import json
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
from variants import FIRST, ONE, try_make

import rotation_merge as rm
from rotation_merge.architecture import resolve
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import check_pair
from rotation_merge.model.view import described

UNKNOWN = "Not aligned, because the architecture does not list them: 1 tensors (surplus.weight)."
STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
SOME = [case for case in ALL if case in FIRST or "tie_word_embeddings" in case.config]
by_case = pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.family}-{case.name}")


@pytest.mark.slow
@by_case
def test_a_tied_head_forbids_rotations(case: Case) -> None:
    """Stored or not, what the config ties is one parameter: folding cannot serve it as a head and as an embedding."""
    model = planted(case)
    head, stream = model.tied or ("", "")
    if stream not in model.rotatable:
        return

    def folded(one: Any, **options: Any) -> tuple[str, ...]:
        return rm.Alignment.random(one, residual="largest", **options, **STILL).folded[: len(model.rotatable)]

    own, words = model.untied, rf"'{head}' is tied .*untie: true.*residual: \w*permutation"
    for one in ((model.state, model.config), (own.state, model.config)):
        alone = len(model.architecture.streams) > len(model.rotatable)
        for asked in [f"{stream}=rotation", *([] if alone else ["rotation"])]:
            with pytest.raises(rm.RotationMergeError, match=words):
                rm.Alignment.random(one, residual=asked)
        assert stream not in folded(one)
        assert folded(one, untie=True) == model.rotatable
    assert folded(own.pair) == model.rotatable


@pytest.mark.slow
@by_case
def test_what_one_lacks_may_not_stay_behind(case: Case) -> None:
    """Every tensor with an axis in a local space, left out of either model, is refused, or the model is incomplete."""
    model = planted(case)
    infos = [info for info in model.architecture.tensors() if info.optional]
    local = [i for i in infos if any(part.space.kind != "stream" for axis in i.axes for part in axis.parts)]
    for info in local[:3]:
        other = {key: tensor for key, tensor in model.state.items() if key not in info.names}, model.config
        try:
            rm.average([other])
        except rm.RotationMergeError:
            continue  # refused by itself
        for first, second in ((model.pair, other), (other, model.pair)):
            with pytest.raises(rm.RotationMergeError, match=r"is missing, (anchor|donor) has it|is only in one of"):
                rm.align(first, second, heads="permutation", residual="largest")


QUESTIONABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_parameters.rope_theta": ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "rms_norm_eps": ("llama", {"rms_norm_eps": 1e-3}),
    "max_position_embeddings": ("llama", {"max_position_embeddings": 4096}),
    "hidden_act": ("bert", {"hidden_act": "gelu_new"}),
    "tie_word_embeddings": ("t5", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", QUESTIONABLE)
def test_what_makes_a_merge_questionable_is_a_warning(name: str) -> None:
    family, change = QUESTIONABLE[name]
    model = planted(next(case for case in ALL if case.family == family))
    for changes, warned in (({}, False), (change, True)):
        report = rm.align(model.pair, (model.state, {**model.config, **changes}), **STILL).report
        assert any("against" in note and f"'{name}' is " in note for note in report.notes) == warned, report.notes


def test_a_module_that_transformers_read_from_gguf_is_of_floats(tmp_path: Path) -> None:
    """Its config names the file's codes, its weights are none, and it is written without; codes that it kept are
    refused as any others."""
    model = planted(next(case for case in ALL if case.family == "llama"))
    config = {**model.config, "quantization_config": {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf"}}
    donor = model.twin(), config
    moved = rm.align((model.state, config), donor).apply(donor)
    assert all(torch.allclose(moved[name], tensor) for name, tensor in model.state.items())
    moved.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {**model.state, "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 36, dtype=torch.uint8)}
    with pytest.raises(rm.RotationMergeError, match=r"quantised \(uint8"):
        rm.align((kept, config), donor)


def test_residual_by_stream_and_the_largest() -> None:
    """Each stream by its own group, outputs kept."""
    model = planted(next(case for case in ALL if case.class_name == "Qwen2_5_VLForConditionalGeneration"))
    first, second = admitted = model.architecture.stream_groups
    assert [admitted[name][-1] for name in (first, second)] == ["rotation"] * 2
    for asked, wanted in (("largest", "rotation"), (f"{first}=permutation", f"{first}=permutation")):
        report = rm.align(model.pair, model.pair, residual=asked, **STILL).report
        assert yaml.safe_load(report.recipe)["residual"] == wanted
    other = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state.items()}
    alignment = rm.align((other, model.config), model.pair, residual="largest", heads="permutation")
    assert model.differs(alignment.apply(model.pair).state_dict()) <= 1e-9


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_the_unknown_may_not_stay_while_the_stream_moves(case: Case) -> None:
    """What an architecture file does not name, which recipes alone admit."""
    model = planted(case)
    size = next(iter(model.architecture.streams.values())).sizes["size"]
    groups, moving = model.architecture.stream_groups.values(), rm.AlignConfig(residual="permutation")
    for shape, refused in (((size, 3), True), ((size + 1,), False)):
        state = {**model.state, "surplus.weight": torch.zeros(shape)}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        architecture = resolve(model.config, list(state), "model", keep_unknown=True)
        one = described("model", model.config, architecture, shapes)
        assert check_pair(one, one, rm.AlignConfig()).notes == (UNKNOWN,)
        if refused and all("permutation" in admitted for admitted in groups):
            with pytest.raises(rm.RotationMergeError, match=r"surplus\.weight.*would not move with"):
                check_pair(one, one, moving)
            assert check_pair(one, one, moving, excluded=lambda name: "surplus" in name).streams


# --- every path asks


class Asked(rm.RotationMergeError):
    """check_pair was asked."""


def recipe(a: Path, b: Path, folder: Path, donor: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A recipe with something said of the donor; where that is a file of maps, options of matching have no effect."""
    folder.mkdir(exist_ok=True)
    document = dict(recipe_for("linear", a, b))
    document["parameters"] = {**document.get("parameters", {}), **settings}
    if donor:
        document["models"][-1]["parameters"] = {"weight": 1.0, **donor}
        document["parameters"] = {
            **({} if "alignment" in donor else document["parameters"]),
            "delegate": "task_arithmetic",
        }
    (folder / "recipe.yml").write_text(yaml.safe_dump(document))
    return folder / "recipe.yml"


def merge(a: Path, b: Path, out: Path, donor: dict[str, Any] | None = None, **settings: Any) -> Any:
    return mergekit_yaml(recipe(a, b, out, donor, **settings).read_text(), out / "merged")


def carry(a: Path, b: Path, out: Path, *options: object) -> Any:
    return run("carry", a.parent / "tuned", out, "--from", b, "--to", a, *options)


SMALL = ("--samples", "8", "--length", "8", "--batch-size", "4")
LEARN = ("--learn", "--data", "self", "--limit", "8", "--batch-size", "4")

PATHS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "api": lambda a, b, out: rm.align(a, b),
    "align": lambda a, b, out: run("align", a, b, out),
    "align --alignment": lambda a, b, out: run("align", a, b, "--alignment", out),
    "align without OUT": lambda a, b, out: run("align", a, b),
    "barrier": lambda a, b, out: run("barrier", a, b, "--data", "self"),
    "align --learn": lambda a, b, out: run("align", a, b, *LEARN, "--alignment", out / "file"),
    "inspect": lambda a, b, out: run("inspect", recipe(a, b, out)),
    "inspect model": lambda a, b, out: run("inspect", a),
    "check": lambda a, b, out: run("check", recipe(a, b, out)),
    "recipe": merge,
    "recipe, residual": lambda a, b, out: merge(a, b, out, residual="permutation"),
    "recipe, mean": lambda a, b, out: merge(a, b, out, anchor="mean"),
    "recipe, alignment": lambda a, b, out: merge(a, b, out, {"alignment": str(a.parent / "map")}),
    "recipe, finetuned_from": lambda a, b, out: merge(a, a.parent / "tuned", out, {"finetuned_from": str(b)}),
    "recipe, finetuned_from, alignment": lambda a, b, out: merge(
        a, a.parent / "tuned", out, {"finetuned_from": str(b), "alignment": str(a.parent / "map")}
    ),
    "merge": lambda a, b, out: run("merge", a, b, out, *SMALL, "--data", "self", "--budget", "1m"),
    "carry": carry,
    "carry --alignment": lambda a, b, out: carry(a, b, out, "--alignment", a.parent / "map"),
    "carry --carry refit": lambda a, b, out: carry(a, b, out, "--carry", "refit", "--samples", "32"),
    "doctor": lambda a, b, out: run("doctor", a, a, b),
    "doctor RECIPE": lambda a, b, out: run("doctor", recipe(a, b, out)),
}

APART = {"verify", "polish", "evaluate", "measure", "lora", "push", "pull", "demo"}
"""Commands that match nothing themselves."""


def test_every_command_is_a_path_or_matches_nothing() -> None:
    assert {path.split()[0].strip(",") for path in PATHS} - {"api", "recipe"} == COMMANDS.keys() - APART


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


MODULES = [importlib.import_module(info.name) for info in pkgutil.walk_packages(rm.__path__, "rotation_merge.")]
"""All of them, imported before any of their functions is replaced."""

MATCHING = ("match_model", "match_block", "match_to_mean")


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
            for name, other in (("check_pair", refuse), *((name, never) for name in MATCHING)):
                for module in (module for module in MODULES if name in vars(module)):
                    patch.setattr(module, name, other)
            out = tmp_path / f"out-{whatever}"
            try:
                result = PATHS[path](*two, out)
            except Asked:
                result = None
            assert result is None or (result.exit_code != 0 and "refused by the test" in result.output), result.output
        assert not (out / "merged").exists()
        assert not (out / "model.safetensors").exists()
