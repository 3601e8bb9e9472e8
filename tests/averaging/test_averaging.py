"""Merges by statistics: twins give the anchor, whatever moved them; what does not fit is refused in one line."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import parsed, run
from plugin_support import (
    EVERYTHING,
    build,
    error_of_merge,
    from_file,
    lora,
    make,
    merged,
    recipe_for,
    save,
    twin,
)
from residual_support import Checkpoint, checkpoint
from safetensors.torch import load_file
from tiny_models import inputs
from torch import Tensor

import rotation_merge as rm

TOLERANCE, NAME = 2e-4, "statistics.safetensors"
TWINS = {
    **{"llama": "llama", "bert": "classifier", "gpt2": "untied", "t5": "plain", "phi3": "grouped", "gemma2": "tied"},
    **{"mixtral": "untied", "granitemoe": "plain", "llava": "llama", "nemotron_h": "latent experts"},
}
"""Among them experts that files have apart, and stacked."""


def data_for(model: Path | Checkpoint, file: Path, rows: int = 24) -> str:
    """A file of random inputs of a tiny checkpoint's kind; of a path's, which takes words, random words."""
    batches = [{"input_ids": torch.randint(3, 40, (rows, 12), generator=torch.Generator().manual_seed(0))}]
    if isinstance(model, Checkpoint):
        module = model.case.model_class.from_pretrained(model.path)
        takes = signature(module.forward).parameters
        batches = [inputs(model.case, module, seed) for seed in range(rows // 2)]
        batches = [{name: tensor for name, tensor in batch.items() if name in takes} for batch in batches]
    arrays = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}  # as processors give
    np.savez(file, **{name: (x.float() if x.is_floating_point() else x).numpy() for name, x in arrays.items()})
    return str(file)


def measure(path: Path, data: str, kinds: str = "gram,fisher") -> dict[str, Any]:
    return parsed("measure", path, "--data", data, "--kinds", kinds)


def state(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, and not the statistics beside them."""
    return load_file(folder / "model.safetensors")


def farthest(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to each one's size."""
    assert result.keys() == expected.keys()
    return max(float((result[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-6)) for n in expected)


# --- twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), TWINS.items(), ids=str)
def test_twins_give_the_anchor(family: str, name: str, tmp_path: Path) -> None:
    """Measured into files, carried, and averaged by whole merges; test_moved_values.py has the law of all families in
    memory. Some files have other names than what runs, and Nemotron-H's latent experts write into coordinates that
    nothing moves: stacked where they run, apart in files."""
    model = checkpoint(family, name, tmp_path / "anchor")
    anchor, data = model.path, data_for(model, tmp_path / "data.npz", rows=2)
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        measure(path, data, "gram")
    assert farthest(merged(recipe_for("regmean", anchor, moved), tmp_path / "out"), state(anchor)) < TOLERANCE


@pytest.mark.slow
def test_twins_give_the_anchor_by_fisher(tmp_path: Path) -> None:
    """One that is moved as far as diagonals survive; and no farther."""
    anchor = make("llama", tmp_path / "anchor")
    still = {"attention": "none", "heads": "permutation", "ffn": "permutation", "scaling": True}
    moved, monomial = twin(anchor, tmp_path / "twin"), twin(anchor, tmp_path / "monomial", seed=2, **still)
    for model in (anchor, moved, monomial):
        measure(model, data_for(anchor, tmp_path / "data.npz"), "fisher")
    result = merged(recipe_for("fisher", anchor, monomial, attention="none"), tmp_path / "out")
    assert farthest(result, state(anchor)) < TOLERANCE
    assert "attention: none" in error_of_merge(recipe_for("fisher", anchor, moved), tmp_path / "refused")


# --- the average of models that differ --------------------------------------------------------------------------------


STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False, "residual": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("gpt2", "untied"), ("mixtral", "untied")])
def test_statistics_go_along_with_a_donor_into_a_merge(family: str, name: str, tmp_path: Path) -> None:
    """Of models that differ: the same as of models that were aligned before they were measured. Gains are folded, the
    stream turned, experts reordered."""
    models = [checkpoint(family, name, tmp_path / str(seed), seed) for seed in range(2)]
    data, flags = data_for(models[0], tmp_path / "data.npz", 8), ("--residual", "rotation", "--heads", "permutation")
    paths, aligned = [model.path for model in models], [tmp_path / f"aligned {i}" for i in range(2)]
    for model, out in zip(paths, aligned, strict=True):
        assert run("align", paths[0], model, out, *flags, "--no-verify").exit_code == 0
        measure(model, data, "gram")
        measure(out, data, "gram")
    results = []
    for each, options in ((paths, {**EVERYTHING, "residual": "rotation"}), (aligned, STILL)):
        document = recipe_for("regmean", *each, **options, shrink=0.9)
        for share, entry in zip((0.3, 0.7), document["models"], strict=True):
            entry["parameters"]["weight"] = share
        results.append(merged(document, tmp_path / f"out {len(results)}"))
    assert farthest(results[0], results[1]) < 1e-4


@pytest.mark.parametrize(("shrink", "ridge"), [(1.0, 0.0), (0.8, 0.05)])
def test_regmean_is_the_least_squares_optimum(shrink: float, ridge: float) -> None:
    """Each map gives, on both models' inputs, what the two maps gave, as nearly as can be; but for shrinking, and for
    ridges on both sides."""
    models, samples = [build("llama", seed) for seed in (0, 1)], [{"input_ids": torch.arange(768).view(64, 12) % 37}]
    statistics, right, total = [rm.measure(model, samples) for model in models], 0.0, 0.0
    options = {"weights": [1.0, 2.0], "shrink": shrink, "ridge": ridge}
    result = rm.average(models, "regmean", statistics=statistics, **options)["model.layers.0.self_attn.k_proj.weight"]
    for weight, model in zip(options["weights"], models, strict=True):
        layer, inputs = model.model.layers[0].self_attn.k_proj, list[Tensor]()
        layer.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0].flatten(0, 1).double()))
        with torch.no_grad():
            model(**samples[0])
        gram = inputs[0].T @ inputs[0]
        diagonal = gram.diagonal()
        gram = weight * (shrink * gram + torch.diag((1 - shrink) * diagonal + ridge * diagonal.mean()))
        right, total = right + layer.weight.double() @ gram, total + gram
    expected = (right @ torch.linalg.inv(total)).detach()
    torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_statistics_of_an_adapter_lie_beside_it(tmp_path: Path) -> None:
    """A donor that is a model and its adapter merges as what the two make, in shards; so does one that a file of maps
    moves."""
    base, file = make("llama", tmp_path / "base"), tmp_path / "alignment.safetensors"
    tuned = lora(tmp_path / "adapter", base, target_modules=["q_proj", "up_proj"])
    whole = save(tuned.merge_and_unload(), tmp_path / "whole", max_shard_size="20KB")
    assert len(list(whole.glob("*.safetensors"))) > 1
    adapted = f"{base}+{tmp_path / 'adapter'}"
    for model in (base, whole, adapted):
        assert run("measure", model, "--data", "self", "--samples", 8, "--length", 12).exit_code == 0
    assert (tmp_path / "adapter" / NAME).exists()
    assert run("align", base, whole, "--alignment", file, "--heads", "permutation").exit_code == 0
    expected = merged(recipe_for("regmean", base, whole), tmp_path / "expected")
    for name, document in {
        "lora": recipe_for("regmean", base, adapted),
        "file": from_file(recipe_for("regmean", base, whole), file),
    }.items():
        assert farthest(merged(document, tmp_path / name), expected) < 1e-4


# --- what is refused: one line each, nothing half written -------------------------------------------------------------


def test_maps_that_run_in_parts(tmp_path: Path) -> None:
    """nomic-bert's file holds as one what runs as three maps."""
    anchor = checkpoint("nomic_bert", "classifier", tmp_path / "anchor").path
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        measure(path, data_for(path, tmp_path / "data.npz", rows=2), "gram")
    assert "runs it in parts, use 'refit'" in error_of_merge(recipe_for("regmean", anchor, moved), tmp_path / "out")


def test_samples_that_are_too_few_and_models_that_need_none(tmp_path: Path) -> None:
    """With too few samples sums are singular; a model without weight needs no statistics."""
    bare, bare_too = (save(build("llama", seed), tmp_path / str(seed)) for seed in (5, 6))
    for path in (bare, bare_too):
        assert "singular" in run("measure", path, "--data", "self", "--samples", 1, "--length", 4).output
    document = recipe_for("regmean", bare, bare_too)
    document["parameters"] |= {"shrink": 1.0, "ridge": 0.0}
    assert "set 'ridge'" in error_of_merge(document, tmp_path / "out")
    document = recipe_for("regmean", save(build("llama", 7), tmp_path / "third"), bare)
    document["models"][0]["parameters"]["weight"] = 0.0
    merged(document, tmp_path / "out")
