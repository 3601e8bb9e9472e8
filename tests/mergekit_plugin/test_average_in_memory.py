"""`rotation_merge.average`: any delegate on models in memory gives what its recipe writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import build, merged, recipe_for, state
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import rotation_merge as rm

Pair = tuple[Path, Path]

SAMPLES = [{"input_ids": torch.arange(40).reshape(4, 10)}, {"input_ids": torch.arange(39, -1, -1).reshape(4, 10)}]


def recipe_of(delegate: str, pair: Pair, **parameters: Any) -> dict[str, Any]:
    """Nothing moves in it."""
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    recipe = recipe_for(delegate, *pair, **still, **parameters)
    for entry in recipe["models"]:
        entry["parameters"] = {"weight": 1.0}
    return recipe


def assert_same(view: rm.View, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(view[name], tensor), name


@pytest.mark.parametrize(
    ("delegate", "parameters"),
    [
        *(("task_arithmetic", {"lambda": 0.5}), ("wudi", {"ridge": 0.2}), ("tsv", {"lambda": 0.7}), ("iso", {})),
        ("ot_fusion", {"plan": "hard"}),
    ],
)
def test_it_gives_what_the_recipe_writes(delegate: str, parameters: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    """Of modules."""
    python = {f"{name}_" if name == "lambda" else name: value for name, value in parameters.items()}
    written = merged(recipe_of(delegate, pair, **parameters), tmp_path / "out")
    modules = [AutoModelForCausalLM.from_pretrained(path) for path in pair]
    assert_same(rm.average(modules, delegate, **python), written)


@pytest.mark.slow
@pytest.mark.parametrize("delegate", ["regmean", "fisher"])
def test_statistics_measured_in_memory_are_those_of_the_file(delegate: str, pair: Pair, tmp_path: Path) -> None:
    paths, kinds = [str(path) for path in pair], ("fisher",) if delegate == "fisher" else ("gram",)
    measured = [rm.measure(path, SAMPLES, rm.MeasureConfig(kinds=kinds)) for path in paths]
    recipe, files = recipe_of(delegate, pair), [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    for entry, file, statistics in zip(recipe["models"], files, measured, strict=True):
        statistics.save(file)
        entry["parameters"]["statistics"] = file
    written = merged(recipe, tmp_path / "out")
    for statistics in (files, measured):
        assert_same(rm.average(paths, delegate, statistics=statistics), written)


@pytest.mark.parametrize("source", ["file", "self"])
def test_refit_gives_what_the_recipe_writes(source: str, pair: Pair, tmp_path: Path) -> None:
    """Some of a file's samples judge; text that a model writes is answered by it alone."""
    file, paths = tmp_path / "texts.jsonl", [str(path) for path in pair]
    file.write_text("\n".join(json.dumps({"input_ids": [(7 * i + j * j) % 40 for j in range(10)]}) for i in range(32)))
    data = str(file) if source == "file" else "self"
    written = merged(recipe_of("refit", pair, data=data, samples=6, ridge=0.1), tmp_path / "out")
    assert_same(rm.refit(paths, data, rm.RefitConfig(samples=6, ridge=0.1)), written)
    assert_same(rm.average(paths, "refit", samples=data, limit=6, ridge=0.1), written)


def test_refit_takes_all_batches_in_memory(pair: Pair) -> None:
    """`samples` is of sources by name."""
    few, many = (rm.refit([*map(str, pair)], SAMPLES, rm.RefitConfig(samples=count, ridge=0.1)) for count in (1, 64))
    assert_same(few, many.state_dict())


def test_refit_is_solved_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer runs again for the other tensors."""
    passes, forward = [], LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: passes.append(self) or forward(self, x))
    view = rm.average([str(path) for path in pair], "refit", samples=SAMPLES, ridge=0.1)
    name = "model.layers.0.mlp.up_proj.weight"
    first, solved = view[name], len(passes)
    assert torch.equal(view.state_dict()[name], first)
    assert len(passes) == solved > 0
    assert not torch.equal(first, state(pair[0])[name])


def test_gradients_flow_through_an_average(pair: Pair) -> None:
    module, name = AutoModelForCausalLM.from_pretrained(pair[1]), "model.layers.1.mlp.down_proj.weight"
    tensors = {key: tensor.detach().clone().requires_grad_() for key, tensor in module.state_dict().items()}
    rm.average([str(pair[0]), (tensors, module.config)])[name].sum().backward()
    torch.testing.assert_close(tensors[name].grad, torch.full_like(tensors[name], 0.5))


def test_averages_of_averages(pair: Pair) -> None:
    first, second = (state(path)["lm_head.weight"] for path in pair)
    nested = rm.average([rm.average([str(path) for path in pair]), str(pair[0])])
    torch.testing.assert_close(nested["lm_head.weight"], 0.75 * first + 0.25 * second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "ties", "densty": 0.5}, "did you mean 'density'"),
        ({"method": "ties", "density": 3}, "from 0 to 1"),
        ({"method": [0.5, 0.5]}, "the keyword 'weights'"),
        ({"heads": "permutation"}, "give options of aligning to rotation_merge.align"),
        ({"heads_of": "all"}, "base, each"),
        ({"method": "refit", "heads_of": "each", "samples": SAMPLES}, "a recipe for mergekit-yaml"),
        ({"save_alignment": True}, "a recipe for mergekit-yaml"),
        ({"method": "regmean"}, "add 'samples'"),
        ({"method": "wudi", "ridge": -1.0}, "at least 0"),
        ({"samples": [{}]}, "have no effect with linear"),
        ({"method": "regmean", "samples": __file__}, "give batches of input_ids"),
        ({"weights": [1.0]}, "1 weights for 2 models"),
        ({"weights": ["a", "b"]}, r"'weights' are \['a', 'b'\]; give one number for each model"),
        ({"weights": [float("nan"), 1]}, r"models\[0\].weight: parameter 'weight' is nan"),
        ({"weights": [3e38, 3e38], "normalize": False}, "would hold NaN or infinity"),
        ({"method": "task_arithmetic", "weights": [3e38, 3e38], "lambda_": 10.0}, "would hold NaN or infinity"),
        ({"statistics": ["a", "b"]}, "'statistics' have no effect with linear; leave them out"),
        ({"seed": "a"}, "option 'seed' is 'a'; it must be a whole number"),
        ({"samples": SAMPLES, "method": "refit", "limit": 0}, "option 'limit' is 0; it must be a whole"),
        ({"models": "folder"}, "one str stands where models belong; give a list of models"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(rm.RotationMergeError, match=words) as error:
        rm.average(**{"models": [build("llama"), build("llama", seed=1)], **options}).state_dict()
    assert "\n" not in str(error.value)


def test_values_replace_files_of_their_own_kind_alone(pair: Pair, tmp_path: Path) -> None:
    for value in (rm.align(str(pair[0]), str(pair[1])), rm.measure(str(pair[0]), SAMPLES)):
        with pytest.raises(rm.RotationMergeError, match="already exists; name another file"):
            value.save(str(pair[0] / "model.safetensors"))
        for _ in range(2):
            value.save(str(tmp_path / type(value).__name__))


@pytest.mark.parametrize("delegate", ["dare_ties", "della"])
def test_what_a_delegate_draws_depends_on_the_seed_alone(delegate: str) -> None:
    models = [build("llama", seed=seed) for seed in range(2)]
    state_of_caller = torch.random.get_rng_state()
    view = rm.average(models, delegate, density=0.5)
    first = view.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state_of_caller)
    assert_same(view, dict(reversed(first.items())))
    assert_same(rm.average(models, delegate, density=0.5), first)
    reseeded = rm.average(models, delegate, density=0.5, seed=1)
    assert any(not torch.equal(reseeded[name], tensor) for name, tensor in first.items())
