"""What averages with data and what carries, through files and whole merges, in families of 2026.

One family for each kind of space that older families lack: experts with biases and sinks (gpt-oss), latents and groups
of experts (DeepSeek), a gated delta rule with gated heads (Qwen3-Next), keys that span layers (Gemma 4), Mamba-2 mixers
with squared neurons (Nemotron-H), short convolutions (LFM2). The laws of all families are tried in memory
(carrying/test_carry.py, averaging/test_refit.py) and by regmean through files (averaging/test_averaging.py);
here each of these goes through fisher, refit and a carried fine-tune as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import parsed
from plugin_support import merged, recipe_for
from plugin_support import twin as moved
from residual_support import Checkpoint, checkpoint, transport, twin
from test_averaging import state, worst
from test_transport import tuned

KINDS = {
    "gpt_oss": "",
    "deepseek": "",
    "qwen3_next": "",
    "gemma4": "shared keys",
    "nemotron_h": "",
    "lfm2": "",
}

Models = tuple[Checkpoint, Checkpoint, Checkpoint, Path, Path]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An anchor, a twin moved in every local space, its fine-tune, one moved as far as diagonals survive, and data."""
    from tiny_models import ALL

    family: str = request.param
    name = KINDS[family] or next(case.name for case in ALL if case.family == family)
    folder = tmp_path_factory.mktemp(family)
    anchor = checkpoint(family, name, folder / "anchor")
    other = twin(anchor, folder / "twin", "none")
    fine = tuned(other, folder / "fine")
    still: dict[str, Any] = {"attention": "none", "heads": "permutation", "ffn": "permutation", "scaling": True}
    monomial = moved(anchor.path, folder / "monomial", **still)
    data = folder / "data.npz"
    np.savez(data, input_ids=np.random.default_rng(0).integers(3, 50, (2, 7)))
    for path, kinds in ((anchor.path, "gram,fisher"), (other.path, "gram"), (monomial, "fisher")):
        parsed("measure", path, "--data", data, "--kinds", kinds)
    return anchor, other, fine, monomial, data


@pytest.mark.slow
def test_twins_give_the_anchor_by_every_average(models: Models, tmp_path: Path) -> None:
    anchor, other, _, monomial, data = models
    for delegate, donor, options in (
        ("regmean", other.path, {}),
        ("fisher", monomial, {"attention": "none"}),
        ("refit", other.path, {"data": str(data), "samples": 2}),
    ):
        recipe = recipe_for("linear", anchor.path, donor, **options)
        recipe["parameters"]["delegate"] = delegate
        found = merged(recipe, tmp_path / delegate)
        assert worst(found, state(anchor.path)) < 2e-4, delegate


@pytest.mark.slow
def test_a_fine_tune_of_the_twin_arrives(models: Models, tmp_path: Path) -> None:
    anchor, other, fine, _, _ = models
    merged(transport(anchor, (fine, other), residual="none"), tmp_path / "out")
    assert fine.differs(anchor.path) > 1e-2
    assert fine.differs(tmp_path / "out") <= 1e-3
