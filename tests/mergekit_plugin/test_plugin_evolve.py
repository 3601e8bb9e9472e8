"""mergekit-evolve: genomes may name rotation_merge, and the recipes they make run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.merge import _model_out_config, run_merge
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from plugin_support import make, recipe_for, relative_distances, state, twin

from rotation_merge import RotationMergeError


def test_a_genomes_recipe_merges_aligned_models(tmp_path: Path):
    from mergekit.evo.genome import ModelGenome, ModelGenomeDefinition

    anchor = make("llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", heads="none")
    definition = ModelGenomeDefinition(
        models=[str(anchor), str(donor)], base_model=str(anchor), merge_method="rotation_merge", normalize=True
    )
    config = ModelGenome(definition).genotype_merge_config(torch.tensor([0.3, 0.7]).view(1, 2, 1, 1))
    assert isinstance(config, MergeConfiguration)
    run_merge(config, str(tmp_path / "out"), MergeOptions(copy_tokenizer=False, quiet=True))
    distances = relative_distances(state(tmp_path / "out"), state(anchor))
    assert set(distances) == set(state(anchor))
    assert max(distances.values()) <= 0.01  # the recipe's dtype is bfloat16


def test_what_is_no_number_ends_a_merge_in_memory(tmp_path: Path):
    """Which is how mergekit-evolve merges when it is asked to."""
    anchor = make("llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", heads="none")
    given = recipe_for("linear", anchor, donor, normalize=True)
    for weights, wanted in (((0.5, 0.5), None), ((0.5, -0.5), "would hold NaN or infinity")):
        for entry, weight in zip(given["models"], weights, strict=True):
            entry["parameters"]["weight"] = weight
        config, options = MergeConfiguration.model_validate(given), MergeOptions(quiet=True)
        info = get_architecture_info(config, options)
        tasks = MergePlanner(config, info, options, _model_out_config(config, info)).plan_in_memory()
        with pytest.raises(RotationMergeError, match=wanted) if wanted else nullcontext():
            found = list(Executor(tasks, "cpu", "cpu").run(quiet=True))
            assert len(found) == len(state(anchor))
