"""mergekit-evolve: genomes may name rotation_merge, and the recipes they make run."""

from __future__ import annotations

from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from plugin_support import make, relative_distances, state, twin


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
