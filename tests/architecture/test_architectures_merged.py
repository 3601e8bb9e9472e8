"""Every architecture end to end: a moved twin merged with its anchor by mergekit-yaml gives the anchor back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
from plugin_support import merged, recipe_for
from safetensors.torch import save_file
from tiny_models import ALL, Case, difference, inputs, load, make, outputs, save, twin_of


def planted(anchor: Path, donor: Path) -> None:
    """A twin of the anchor: other weights, same function."""
    shutil.copytree(anchor, donor)
    save_file(twin_of(anchor, heads="permutation"), donor / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_planted_twin_is_recovered(case: Case, tmp_path: Path) -> None:
    """(c) and (d): the merge has every tensor, each as in the anchor, and loads with the anchor's outputs."""
    model = make(case).float()
    _, state = save(model, tmp_path / "anchor")
    planted(tmp_path / "anchor", tmp_path / "donor")
    result = merged(recipe_for("linear", tmp_path / "anchor", tmp_path / "donor"), tmp_path / "out")
    assert set(result) == set(state)
    off = {name: float((result[name] - state[name]).norm() / (state[name].norm() + 1e-9)) for name in state}
    assert max(off.values()) <= 1e-5, sorted(off.items(), key=lambda item: -item[1])[:5]
    given = inputs(case, model)
    assert difference(outputs(load(case, tmp_path / "out"), given), outputs(model.double(), given)) <= 1e-3
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").model_type == model.config.model_type
