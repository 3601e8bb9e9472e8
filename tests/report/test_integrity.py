"""What doctor needs no command for: every family is whole, and what is mended (laws plant every fault)."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_support import FAMILIES, FAULTS
from test_planted_faults import copies
from tiny_models import ALL, Case, make

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


def test_a_small_file_that_is_damaged_stays(tmp_path: Path) -> None:
    """Others are mended beside it."""
    merge, parent = copies("llama", tmp_path)
    (merge / "generation_config.json").write_text("[]")
    assert mend(str(merge), [str(parent)]) == ["config.json: end of text"]
    assert [defect.kind for defect in check_folder(str(merge), [str(parent)])] == ["damaged file"]


def test_the_docs_count_the_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"plants {len(FAULTS)} kinds of faults in tiny models of {len(FAMILIES)} families" in page
