"""Merge methods of our own are mergekit's `MergeMethod`s: told about the models, they merge groups of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mergekit.merge_methods.base import TensorGroup
from plugin_support import build

import rotation_merge as rm
from rotation_merge.averaging.average import averaged
from rotation_merge.averaging.methods import MergedModels
from rotation_merge.averaging.registry import METHODS
from rotation_merge.model.open import open_model

BY_NAME = {method.spec.name: method for method in METHODS if not method.whole_models}
MAP, NORM, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"


def views(count: int = 3, **changes: Any) -> list[rm.View]:
    return [open_model(build("llama", seed=seed, **changes), "abc"[seed]) for seed in range(count)]


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(40, (4, 10), generator=torch.Generator().manual_seed(3))}]


def statistics(models: list[rm.View], kind: str) -> dict[int, rm.Statistics]:
    if not kind:
        return {}
    config = rm.MeasureConfig(kinds=(kind,))
    return {i: rm.measure(model, samples(), config) for i, model in enumerate(models)}


def group(models: list[rm.View], name: str, dtype: torch.dtype = torch.float32, label: str = "") -> TensorGroup:
    tensors = [model[name].to(dtype) for model in models]
    return TensorGroup.from_tensors(tensors, base_index=0, name=label or name)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_group_is_merged_by_its_name(name: str) -> None:
    """By mergekit's own call, as the average of whole models has it."""
    models, method = views(), BY_NAME[name]
    measured = statistics(models, method.statistics)
    bound = method.on(MergedModels.of(models, statistics=measured))
    given = {"statistics": list(measured.values())} if measured else {}
    average = rm.average(models, name, weights=[0.5, 1.0, 2.0], **given)
    for tensor in (MAP, NORM, EMBEDDING):
        (merged,) = bound((group(models, tensor),), parameters={"weight": [0.5, 1.0, 2.0]})
        assert torch.equal(merged, average[tensor])
    lazy = averaged(models, bound, {"weight": [0.5, 1.0, 2.0]})
    assert torch.equal(lazy[MAP], average[MAP])


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_method_without_models_says_so_in_one_line(name: str) -> None:
    models = views(2)
    with pytest.raises(rm.RotationMergeError, match="use it in a recipe") as error:
        BY_NAME[name]((group(models, MAP),), parameters={"weight": 1.0})
    assert "\n" not in str(error.value)


def test_an_unknown_tensor_gets_the_weighted_mean() -> None:
    models = views(2)
    bound = BY_NAME["wudi"].on(MergedModels.of(models))
    (merged,) = bound((group(models, NORM, label="unknown"),), parameters={"weight": [1.0, 3.0]})
    torch.testing.assert_close(merged, (models[0][NORM] + 3 * models[1][NORM]) / 4)


def test_the_result_is_rounded_once() -> None:
    """To the dtype that the call names, that of the merge's storage, or the first tensor's."""
    models = views(2)
    facts = {"storage": lambda _: torch.bfloat16}
    plain, stored = (BY_NAME["wudi"].on(MergedModels.of(models, **part)) for part in ({}, facts))
    parameters = {"weight": 1.0}
    (exact,) = plain((group(models, MAP),), parameters=parameters, out_dtype=torch.float64)
    for merged in (
        *plain((group(models, MAP),), parameters=parameters, out_dtype=torch.bfloat16),
        *stored((group(models, MAP),), parameters=parameters),
    ):
        assert torch.equal(merged, exact.to(torch.bfloat16))
    (half,) = plain((group(models, MAP, torch.bfloat16),), parameters=parameters)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("wudi", [1.0, -0.5], "b: its weight is -0.5 .*delegate wudi takes none below 0"),
        ("regmean", [0.0, 0.0], "all weights of tensor .* are zero"),
        ("ot_fusion", [1.0, -1.0], "the weights of the models sum to zero"),
    ],
)
def test_weights_that_mean_nothing_are_one_line(name: str, weights: list[float], words: str) -> None:
    models = views(2)
    bound = BY_NAME[name].on(MergedModels.of(models))
    with pytest.raises(rm.RotationMergeError, match=words) as error:
        bound((group(models, MAP),), parameters={"weight": weights})
    assert "\n" not in str(error.value)


def test_an_embedding_that_is_the_head_is_a_map_of_changes() -> None:
    """Where it has no head of its own."""
    models = views(tie_word_embeddings=True)
    facts = MergedModels.of(models)
    tied, apart = BY_NAME["wudi"].on(facts), BY_NAME["wudi"].on(MergedModels.of(models, tied_head=None))
    results = [method((group(models, EMBEDDING),), parameters={})[0] for method in (tied, apart)]
    assert not torch.equal(*results)
    assert torch.equal(results[0], rm.average(models, "wudi")[EMBEDDING])


def test_activations_are_those_of_the_moved_models() -> None:
    """A model that was moved runs as it was moved, not as its files are."""
    models = views(2)
    alignment = rm.align(*models, residual="signed_permutation")
    aligned = [alignment.apply_anchor(models[0]), alignment.apply(models[1])]
    kinds = {"plan": "hard", "samples": samples()}
    in_memory = [(view.state_dict(), view.config) for view in aligned]
    result = rm.average(aligned, "ot_fusion", **kinds)
    for name, tensor in rm.average(in_memory, "ot_fusion", **kinds).state_dict().items():
        torch.testing.assert_close(result[name], tensor, atol=1e-6, rtol=1e-6)
