"""`check_pair`, the only way into matching: what it refuses and warns of, over all families and on every path."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli_support import COMMANDS, run
from plugin_support import make, recipe_for, write_state
from plugin_support import state as stored
from tiny_models import ALL, Case, Planted, planted, save
from variants import FIRST, try_make

import rotation_merge
from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture import resolve
from rotation_merge.architecture.registry import tied_head
from rotation_merge.matching.check_pair import CheckedPair, check_pair
from rotation_merge.matching.options import NOTHING
from rotation_merge.mergekit_plugin.run_recipe import merge_recipe
from rotation_merge.model.paired_model import PairedModel

SOME = [case for case in ALL if case in FIRST or "tie_word_embeddings" in case.config]
by_case = pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.family}-{case.name}")


def member(config: dict[str, Any], state: dict[str, torch.Tensor], name: str = "model", **how: bool) -> PairedModel:
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    architecture = resolve(config, list(state), name, **how)
    return PairedModel(name, config, architecture, shapes, tied_head(config, list(state), name))


def both(model: Planted, options: AlignConfig, **changes: Any) -> CheckedPair:
    """A model against itself, or against one whose config differs."""
    first = member(model.config, model.state, "anchor")
    return check_pair(first, member({**model.config, **changes}, model.state, "donor"), options)


# --- tied heads


@by_case
def test_laws_of_pairs(case: Case) -> None:
    """What is true of every model met by another that lacks a tensor, stores one more, or ties its head."""
    a_tied_head_forbids_rotations(case)
    what_one_lacks_may_not_stay_behind(case)
    the_unknown_may_not_stay_while_the_stream_moves(case)


def a_tied_head_forbids_rotations(case: Case) -> None:
    """Stored or not, what the config ties is one parameter: folding cannot serve it as a head and as an embedding."""
    model = planted(case)
    head, stream = tied_head(model.config, list(model.state), case.name) or ("", "")
    if stream not in model.rotatable:
        return
    own = model.untied
    for state in (model.state, own.state):
        alone = len(model.architecture.streams) > len(model.rotatable)
        for asked in [f"{stream}=rotation", *([] if alone else ["rotation"])]:
            one = member(model.config, state)
            with pytest.raises(RotationMergeError, match=rf"'{head}' is tied .*untie: true.*residual: \w*permutation"):
                check_pair(one, one, AlignConfig(residual=asked))
        assert stream not in check_pair(one, one, AlignConfig(residual="largest")).folded
        opened = member(model.config, state, untie=True)
        assert (
            check_pair(opened, opened, AlignConfig(residual="largest"), untie=True).folded[: len(model.rotatable)]
            == model.rotatable
        )
    free = member(own.config, own.state)
    assert check_pair(free, free, AlignConfig(residual="largest")).folded[: len(model.rotatable)] == model.rotatable


# --- stored extras


def what_one_lacks_may_not_stay_behind(case: Case) -> None:
    """Every tensor with an axis in a local space, left out of either model, is refused, or the model is incomplete."""
    model = planted(case)
    one = member(model.config, model.state)
    options = AlignConfig(heads="permutation", residual="largest")
    local = {
        info.name: info
        for info in one.architecture.tensors()
        if info.optional and any(part.space.kind != "stream" for axis in info.axes for part in axis.parts)
    }
    for name in list(local)[:3]:
        state = {key: tensor for key, tensor in model.state.items() if key not in local[name].names}
        try:
            other = member(model.config, state)
        except RotationMergeError:
            continue  # incomplete by itself
        for first, second in ((one, other), (other, one)):
            with pytest.raises(RotationMergeError, match="is missing, model has it"):
                check_pair(first, second, options)


def the_unknown_may_not_stay_while_the_stream_moves(case: Case) -> None:
    model = planted(case)
    size = next(iter(resolve(model.config, list(model.state), "x").streams.values())).sizes["size"]
    groups = model.architecture.stream_groups.values()
    for shape, refused in (((size, 3), True), ((size + 1,), False)):
        state = {**model.state, "surplus.weight": torch.zeros(shape)}
        one = member(model.config, state, keep_unknown=True)
        assert check_pair(one, one, AlignConfig()).unaligned == ("surplus.weight",)
        if all("permutation" in admitted for admitted in groups):
            moving = AlignConfig(residual="permutation")
            if refused:
                with pytest.raises(RotationMergeError, match=r"surplus\.weight.*would not move with"):
                    check_pair(one, one, moving)
            assert bool(check_pair(one, one, moving, excluded=lambda name: "surplus" in name)) or refused


# --- configs that differ


DIFFERENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotary or none": ("llama-smollm3", {"no_rope_layers": [1, 1]}, "rotary dimensions|no_rope_layers"),
    "sliding layers that switch rotary": ("cohere-", {"layer_types": ["full_attention"] * 2}, "rotary dimensions"),
    "ALiBi": ("falcon-", {"alibi": True}, "alibi|rotary"),
    "share of rotary dimensions": (
        "gpt_neox-parallel",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
        "rotary dimensions",
    ),
    "degree of the activation": ("bert-masked", {"hidden_act": "relu2"}, "degree of the activation"),
    "place of norms": ("gpt_neox-parallel", {"use_parallel_residual": False}, "use_parallel_residual"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_decides_a_symmetry_is_refused_with_both_values(what: str) -> None:
    start, change, wanted = DIFFERENT[what]
    found = 0
    for case in ALL:
        if not f"{case.family}-{case.name}".startswith(start):
            continue
        model = planted(case)
        other = {**model.config, **change}
        if resolve_safely(model, other) is None or other == model.config:
            continue
        with pytest.raises(RotationMergeError, match=wanted) as caught:
            both(model, AlignConfig(), **change)
        assert "against" in str(caught.value)
        found += 1
    assert found, f"{what}: no case shows it"


def resolve_safely(model: Planted, config: dict[str, Any]) -> Any:
    try:
        return resolve(config, list(model.state), "donor")
    except RotationMergeError:
        return None


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
    assert both(model, AlignConfig()).warnings == ()
    found = both(model, AlignConfig(), **change).warnings
    assert any(f"'{name}' is " in line and "against" in line for line in found), found


def test_quantised_weights_are_named_as_what_they_are() -> None:
    model = planted(next(case for case in ALL if case.family == "llama"))
    config = {**model.config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    with pytest.raises(RotationMergeError, match=r"^anchor: its weights are quantised \(bitsandbytes\).*dequantize"):
        rotation_merge.align((model.state, config), (model.state, config))


def test_a_module_that_transformers_read_from_gguf_is_of_floats(tmp_path: Path) -> None:
    """Its config names the file's codes, its weights are none, and it is written without; codes that it kept are
    refused as any others."""
    model = planted(next(case for case in ALL if case.family == "llama"))
    config = {**model.config, "quantization_config": {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf"}}
    donor = model.twin(), config
    moved = rotation_merge.align((model.state, config), donor).apply(donor)
    assert all(torch.allclose(moved[name], tensor) for name, tensor in model.state.items())
    moved.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {**model.state, "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 36, dtype=torch.uint8)}
    with pytest.raises(RotationMergeError, match=r"quantised \(uint8"):
        rotation_merge.align((kept, config), donor)


QUANTISED = {
    "fp8": ("float8_e4m3fn", r"quantised \(fp8, the first.*from_pretrained\(PATH, dtype='bfloat16'\)"),
    "int8": ("int8", r"quantised \(int8, the first.*'quantization_config' back"),
    "uint8": ("uint8", r"quantised \(uint8, the first.*'quantization_config' back"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_codes_are_known_by_their_types(kind: str, tmp_path: Path) -> None:
    """Where the config does not say that weights are quantised, on every path, and stored in either form."""
    dtype, wanted = getattr(torch, QUANTISED[kind][0]), QUANTISED[kind][1]
    anchor = make("llama", tmp_path / "anchor")
    tensors = {n: (10 * x).to(dtype) if x.ndim == 2 else x for n, x in stored(anchor).items()}
    if kind == "int8":
        tensors["model.layers.0.mlp.up_proj.SCB"] = torch.ones(48)
    donor = write_state(tensors, anchor, tmp_path / "donor")
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(recipe_for("linear", anchor, donor, unsupported="merge")))
    np.savez(tmp_path / "data.npz", input_ids=np.ones((4, 4), dtype=np.int64))
    data = ("--data", tmp_path / "data.npz")
    paths = [("align", anchor, donor, tmp_path / "out"), ("align", donor, anchor, tmp_path / "out")]
    paths += [
        ("compare", anchor, donor),
        ("verify", anchor, donor),
        ("inspect", donor, "--fingerprint"),
        ("inspect", donor),
    ]
    paths += [("check", recipe), ("inspect", recipe), ("measure", donor, *data), ("barrier", anchor, donor, *data)]
    paths += [("fit", anchor, donor, *data, "--alignment", tmp_path / "file"), ("evaluate", donor, *data)]
    paths += [("carry", donor, "--from", anchor, "--to", anchor, tmp_path / "out")]
    for asked in paths:
        done = run(*asked)
        assert done.exit_code in (1, 2), (asked, done.output)
        assert re.search(wanted, " ".join(done.output.split())), (asked, done.output)
    with pytest.raises(RotationMergeError, match=wanted):
        merge_recipe(recipe.read_text(), str(tmp_path / "merged"))
    config = json.loads((anchor / "config.json").read_text())
    with pytest.raises(RotationMergeError, match=wanted):
        rotation_merge.align((stored(anchor), config), (tensors, config))
    assert not (tmp_path / "out").exists()


# --- residual by stream


def test_residual_by_stream_and_the_largest() -> None:
    case = next(case for case in ALL if case.class_name == "Qwen2_5_VLForConditionalGeneration")
    model = planted(case)
    admitted = model.architecture.stream_groups
    assert len(admitted) == 2
    largest = both(model, AlignConfig(residual="largest"))
    assert largest.streams == {name: groups[-1] for name, groups in admitted.items()}
    first = next(iter(admitted))
    alone = both(model, AlignConfig(residual=f"{first}=permutation"))
    assert alone.streams == {first: "permutation"}
    with pytest.raises(RotationMergeError, match=r"no stream 'nosuch'; "):
        both(model, AlignConfig(residual="nosuch=permutation"))
    with pytest.raises(RotationMergeError, match="option 'residual'"):
        AlignConfig(residual=f"{first}=turning")


@by_case
def test_the_largest_groups_leave_outputs_alone(case: Case) -> None:
    """Through the Python API: a twin is moved back under `largest`, each stream by its own group, outputs kept."""
    model = planted(case)
    if case.images or len(model.architecture.stream_groups) < 2:
        return
    other = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state.items()}
    anchor, donor = (other, model.config), (model.state, model.config)
    alignment = rotation_merge.align(anchor, donor, residual="largest", heads="permutation")
    assert model.differs(alignment.apply(donor).state_dict()) <= 1e-9


# --- every path


class Asked(RotationMergeError):
    """check_pair was asked."""


PATHS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "api": lambda a, b, out: rotation_merge.align((_state(a), _config(a)), (_state(b), _config(b))),
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
    "recipe": lambda a, b, out: merge_recipe(_recipe(a, b, out).read_text(), str(out / "merged")),
    "recipe, residual": lambda a, b, out: merge_recipe(
        _recipe(a, b, out, residual="permutation").read_text(), str(out / "merged")
    ),
    "recipe, mean": lambda a, b, out: merge_recipe(_recipe(a, b, out, anchor="mean").read_text(), str(out / "merged")),
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
    "inspect a tensor": lambda a, b, out: run("inspect", _recipe(a, b, out), "--tensor", "lm_head.weight"),
}

SMALL = ("--samples", "8", "--length", "8", "--batch-size", "4")

APART = {
    "verify": "compares outputs",
    "polish": "trains a merge",
    "evaluate": "runs models",
    "measure": "runs one model",
    "gguf": "writes one model",
    "lora": "merges adapters, without their base",
    "push": "uploads a file",
    "pull": "downloads a file",
    "demo": "runs a recipe",
}
"""Commands that match nothing themselves, and what they do."""


def test_every_command_is_a_path_or_matches_nothing() -> None:
    assert {path.split()[0].strip(",") for path in PATHS} - {"api", "recipe"} == COMMANDS.keys() - APART.keys()


def _merge(a: Path, b: Path, folder: Path, **given: Any) -> None:
    """Merge with something said of the donor; transforms that have not been asked for are not applied."""
    document = yaml.safe_load(_recipe(a, b, folder, delegate="task_arithmetic").read_text())
    document["models"][-1]["parameters"] = {"weight": 1.0, **given}
    if "alignment" in given:  # options of matching have no effect
        document["parameters"] = {"delegate": "task_arithmetic"}
    merge_recipe(yaml.safe_dump(document), str(folder / "merged"))


def _carry(a: Path, b: Path, folder: Path, *options: object) -> Any:
    return run("carry", a.parent / "tuned", folder, "--from", b, "--to", a, *options)


def _state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


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
