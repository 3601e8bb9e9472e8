"""What doctor needs no command for: faults in numbers alone, every family whole, and what is mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_support import FAMILIES, FAULTS, UNSEEN
from test_planted_faults import copies
from tiny_models import ALL, Case, make

from rotation_merge.diagnose.doctor import open_case
from rotation_merge.diagnose.doctor.span import of_span
from rotation_merge.diagnose.doctor.weights import of_weights
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


def kinds(merge: Path, parent: Path, weights: bool) -> set[str]:
    """What is found in headers and small files alone, or in numbers of tensors alone."""
    if weights:
        case = open_case(str(merge), [str(parent)])
        return {cause.name for cause in (*of_span(case, None), *of_weights(case))}
    return {defect.kind for defect in check_folder(str(merge), [str(parent)])}


@pytest.mark.parametrize("weights", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_found(family: str, weights: bool, tmp_path: Path) -> None:
    """Each by its name, without the rest of doctor."""
    if weights and family in UNSEEN:
        return
    assert not kinds(*copies(family, tmp_path), weights)
    planted = 0
    for name, fault in FAULTS.items():
        merge, parent = copies(family, tmp_path)
        if fault.weights == weights and fault.plant(merge):
            planted += 1
            assert kinds(merge, parent, weights) & set(fault.kinds), name
    assert planted >= (1 if weights else 25)


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


def test_the_docs_count_the_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"plants {len(FAULTS)} kinds of faults in tiny models of {len(FAMILIES)} families" in page
