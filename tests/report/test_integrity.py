"""What doctor needs no command for: every family is whole, and what is mended (laws plant every fault)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_support import output_of
from faults_support import FAMILIES, FAULTS, INDEX, read, write
from plugin_support import files_of
from safetensors.torch import load_file, save_file
from test_planted_faults import copies
from tiny_models import ALL, Case, make
from transformers import AutoModelForCausalLM

from rotation_merge.model.open import open_model
from rotation_merge.report.integrity import Contents, check_folder
from rotation_merge.report.integrity.mending import mend

MENDED = (
    *("the index names another shard for a tensor", "the index lacks a tensor", "the index is not JSON"),
    *("there is no index", "total_size of another model", "headers without a format", "vocab_size too large"),
    *("names of a compiled model", "names without the base model's prefix", "another RoPE base", "no chat template"),
    *("a layer more in the config", "another dtype in the config", "no class in the config", "no tokenizer"),
    *("eos_token_id of the base, tokenizer of the chat model", "turns end with a token that ends nothing"),
    *("no tokenizer config", "no generation config", "quantisation in the config of plain weights"),
    *("the config of a narrower model", "names of a model with an adapter"),
)
IN_TENSORS = ("a tensor left out", "the last layer left out", "a tensor that nobody reads", "a tied head stored")


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_whole_models_raise_no_alarm(case: Case, tmp_path: Path) -> None:
    make(case).save_pretrained(tmp_path)
    assert check_folder(str(tmp_path), [str(tmp_path)]) == []


@pytest.mark.parametrize("name", [*IN_TENSORS, *(pytest.param(name, marks=pytest.mark.slow) for name in MENDED)])
def test_small_files_are_mended_and_tensors_are_not(name: str, tmp_path: Path) -> None:
    """Nothing is left to find, and what was done is said; or the folder stays, and the remedy is another merge."""
    for family in ("llama", "gemma"):
        merge, parent = copies(family, tmp_path)
        if FAULTS[name].plant(merge):
            before = {path.name: path.read_bytes() for path in merge.iterdir()}
            assert bool(mend(str(merge), [str(parent)])) == (name in MENDED)
            assert (before != {path.name: path.read_bytes() for path in merge.iterdir()}) == (name in MENDED)
            defects = check_folder(str(merge), [str(parent)])
            assert bool(defects) == (name in IN_TENSORS)
            assert defects or Contents(str(merge)).files.keys() == Contents(str(parent)).files.keys()
            assert all("merge again" in defect.remedy for defect in defects)


TWICE = "model.layers.1.mlp.up_proj.weight"


def overlaid(folder: Path) -> None:
    """A last file, which the index names for a tensor that a shard holds, too."""
    index = read(folder / INDEX)
    tensors = load_file(folder / index["weight_map"][TWICE])
    save_file({TWICE: tensors[TWICE] + 1}, folder / "overlay.safetensors", {"format": "pt"})
    index["weight_map"][TWICE] = "overlay.safetensors"
    write(folder / INDEX, index)


def prefixed(folder: Path) -> None:
    """Names of a compiled model, in files and index."""
    for file in folder.glob("*.safetensors"):
        save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    places = read(folder / INDEX)["weight_map"]
    write(folder / INDEX, {"metadata": {}, "weight_map": {f"_orig_mod.{name}": file for name, file in places.items()}})


def misplaced(folder: Path) -> None:
    """The index names a file that does not hold the tensor."""
    index = read(folder / INDEX)
    index["weight_map"][TWICE] = min(index["weight_map"].values())
    write(folder / INDEX, index)


@pytest.mark.parametrize(
    ("spoil", "clear"),
    [
        (lambda _: None, True),
        (FAULTS["the index lacks a tensor"].plant, True),
        (prefixed, True),
        (lambda folder: (folder / INDEX).unlink(), False),
        (lambda folder: (folder / INDEX).write_text("{"), False),
        (misplaced, False),
    ],
    ids=["sound", "lacks a tensor", "other names", "no index", "damaged index", "other shard"],
)
def test_a_correction_keeps_the_copy_that_the_index_names(
    spoil: Callable[[Path], object], clear: bool, tmp_path: Path
) -> None:
    """Which is the one that transformers reads; where the index names none of the copies, nothing is corrected."""
    merge, parent = copies("llama", tmp_path)
    overlaid(merge)
    spoil(merge)
    before = check_folder(str(merge), [str(parent)])
    assert bool(mend(str(merge), [str(parent)])) == bool(before and clear)
    defects = check_folder(str(merge), [str(parent)])
    assert bool(defects) != clear, defects
    assert all("in a single file" in defect.remedy for defect in defects)
    if clear:
        loaded = AutoModelForCausalLM.from_pretrained(merge).state_dict()[TWICE]
        assert torch.equal(loaded, open_model(merge)[TWICE])
        assert not torch.equal(loaded, open_model(parent)[TWICE])


def test_a_copy_is_mended_and_the_folder_stays(tmp_path: Path) -> None:
    merge, parent = copies("llama", tmp_path)
    FAULTS["there is no index"].plant(merge)
    before = files_of(merge)
    assert "corrected model.safetensors.index.json: no index" in output_of(
        "doctor", merge, parent, "--mend", "--out", tmp_path / "out"
    )
    assert files_of(merge) == before
    assert files_of(tmp_path / "out").keys() == before.keys() | {INDEX}
    assert check_folder(str(tmp_path / "out"), [str(parent)]) == []


def test_a_small_file_that_is_damaged_stays(tmp_path: Path) -> None:
    """Others are mended beside it."""
    merge, parent = copies("llama", tmp_path)
    (merge / "generation_config.json").write_text("[]")
    assert mend(str(merge), [str(parent)]) == ["config.json: end of text"]
    assert [defect.kind for defect in check_folder(str(merge), [str(parent)])] == ["damaged file"]


def test_the_docs_count_the_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"plants {len(FAULTS)} kinds of faults in tiny models of {len(FAMILIES)} families" in page
