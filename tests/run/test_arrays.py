"""Arrays as processors give them: pictures go to the examples whose words stand for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ALL, make

from rotation_merge import RotationMergeError
from rotation_merge.run.data import Data, described, read_samples, unpadded

IMAGE = 50
GRIDS = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])
"""Of three pictures: 16, 32 and 16 patches, which 4, 8 and 4 words stand for."""


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {
        name: make(next(c for c in ALL if c.family == name)).float() for name in ("qwen2_5_vl", "llava", "mistral3")
    }


def words(*texts: list[int]) -> torch.Tensor:
    """Texts of one length, in each of which so many words stand for its pictures."""
    rows = [[word for count in counts for word in (3, *[IMAGE] * count)] for counts in texts]
    long = max(map(len, rows)) + 3
    return torch.tensor([row + [4] * (long - len(row)) for row in rows])


def qwen() -> dict[str, torch.Tensor]:
    """Two pictures, none, and one."""
    ids = words([4, 8], [], [4])
    return {
        "pixel_values": torch.randn(64, 4, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": GRIDS,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def read(arrays: dict[str, torch.Tensor], model: Any, where: Path, **options: Any) -> Data:
    np.savez(where / "data.npz", **{name: array.numpy() for name, array in arrays.items()})
    return read_samples("", str(where / "data.npz"), module=model, **options)


def logits(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**{n: x for n, x in b.items() if n != "labels"}).logits for b in batches]


def test_patches_go_to_the_examples_whose_words_stand_for_them(models: dict[str, Any], tmp_path: Path):
    """Each example by itself, in order, says what it says among the others; so it does once padding is cut."""
    model, arrays = models["qwen2_5_vl"], qwen()
    arrays["attention_mask"][2, -3:] = 0
    data = read(arrays, model, tmp_path)
    assert data.task == "next token"
    assert [len(batch.get("pixel_values", ())) for batch in data.batches] == [48, 0, 16]
    whole = torch.cat(logits(model, [arrays]))
    for row, found in enumerate(logits(model, data.batches)):
        torch.testing.assert_close(found[0], whole[row], rtol=1e-4, atol=1e-4)
    cut = unpadded(data.batches, "data")
    for found, row, long in zip(logits(model, cut), (0, 1, 2), (17, 17, 14), strict=True):
        torch.testing.assert_close(found[0], whole[row, :long], rtol=1e-4, atol=1e-4)
    assert [batch["labels"].ne(-100).sum().item() for batch in data.batches] == [5, 17, 10]
    assert len(read(arrays, model, tmp_path, limit=2).batches) == 2


SIZES = torch.tensor([[8, 8], [4, 8], [8, 8]])


@pytest.mark.parametrize(
    ("family", "texts", "extra", "pictures"),
    [
        ("llava", ([16, 16], [16]), {}, [2, 1]),
        ("llava", ([16], [16], [16]), {}, [3]),
        ("mistral3", ([4, 2], [4]), {"image_sizes": SIZES}, [2, 1]),
    ],
)
def test_pictures_take_words_by_their_size(
    family: str, texts: tuple, extra: dict, pictures: list[int], models: dict[str, Any], tmp_path: Path
):
    """Of one size they are shared out evenly; where each example has one, examples stay together."""
    arrays = {"input_ids": words(*texts), "pixel_values": torch.arange(192.0).view(3, 1, 8, 8), **extra}
    batches = read(arrays, models[family], tmp_path).batches
    assert [len(batch["pixel_values"]) for batch in batches] == pictures
    for name in ("pixel_values", *extra):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), arrays[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_grid_thw": None}, "'image_grid_thw' is missing, although there are images"),
        ({"pixel_values": None}, "'pixel_values' is missing, although there are images"),
        ({"pixel_values": None, "image_grid_thw": None}, "'pixel_values' is missing, although there are images"),
        ({"mm_token_type_ids": None}, "'mm_token_type_ids' is missing"),
        ({"image_grid_th": GRIDS}, "does not take image_grid_th; did you mean 'image_grid_thw'"),
        ({"pixel_values": torch.zeros(63, 4)}, "'pixel_values' has 63 rows for images of [16, 32, 16] rows"),
        ({"image_grid_thw": GRIDS[[0, 2, 1]]}, "take [4, 4, 8] tokens; the texts have [12, 0, 4] tokens"),
        ({"image_grid_thw": GRIDS[[0, 1, 2, 2]], "pixel_values": torch.zeros(80, 4)}, "take [4, 8, 4, 4] tokens;"),
        ({"attention_mask": torch.ones(2, 17)}, "arrays of different lengths"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line(change: dict, said: str, models: dict[str, Any], tmp_path: Path):
    arrays = {name: array for name, array in {**qwen(), **change}.items() if array is not None}
    with pytest.raises(RotationMergeError, match=re.escape(said)) as caught:
        read(arrays, models["qwen2_5_vl"], tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("order", [("pixel_values", "labels"), ("labels", "pixel_values")])
def test_an_image_counts_once_wherever_its_label_stands(order: tuple[str, str]) -> None:
    """`merge` hands regmean arrays whose labels stand first."""
    given = {"pixel_values": torch.zeros(5, 3, 4, 4), "labels": torch.zeros(5, dtype=torch.long)}
    found = described(Data([{name: given[name] for name in order}], "label", 5, "digits.npz"))
    assert (found["samples"], found["tokens"]) == (5, 5)


def test_examples_with_and_without_a_picture_stay_apart(models: dict[str, Any], tmp_path: Path) -> None:
    """No picture is lost where only some examples have one; pictures that no text speaks of are refused."""
    arrays = {"input_ids": words([16], []), "pixel_values": torch.randn(1, 1, 8, 8)}
    batches = read(arrays, models["llava"], tmp_path, batch_size=2).batches
    assert [len(batch.get("pixel_values", ())) for batch in batches] == [1, 0]
    with pytest.raises(RotationMergeError, match=r"the texts have .0, 0. tokens for images"):
        read({**arrays, "input_ids": words([], [])}, models["llava"], tmp_path)
