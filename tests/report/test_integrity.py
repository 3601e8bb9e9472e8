"""Every planted fault is found in every family that can have it; whole folders raise no alarm."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_support import FAMILIES, FAULTS, whole
from tiny_models import ALL, Case, make

from rotation_merge.diagnose.doctor import open_case
from rotation_merge.diagnose.doctor.weights import of_weights
from rotation_merge.report.integrity import check_folder
from rotation_merge.report.integrity.mending import mend

HEADERS = {name: fault for name, fault in FAULTS.items() if not fault.weights}
NUMBERS = {name: fault for name, fault in FAULTS.items() if fault.weights}
Copy = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole folders by family, made when asked for."""
    place = tmp_path_factory.mktemp("whole")

    class Made(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = whole(family, place / family)
            return self[family]

    return Made()


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Copy:
    """A merge of a family and its parent, both whole and of one content."""

    def copy(family: str) -> tuple[Path, Path]:
        places = tmp_path / f"{family}-merge", tmp_path / f"{family}-parent"
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folders[family], place)
        return places

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_found(family: str, copied: Copy) -> None:
    """By headers and small files alone, each by its name."""
    merge, parent = copied(family)
    assert check_folder(str(merge), [str(parent)]) == []
    missed, planted = [], 0
    for name, fault in HEADERS.items():
        merge, parent = copied(family)
        if fault.plant(merge, parent) is False:
            continue
        planted += 1
        kinds = [defect.kind for defect in check_folder(str(merge), [str(parent)])]
        if not set(fault.kinds) & set(kinds):
            missed.append((name, kinds))
    assert not missed, "\n".join(map(str, missed))
    assert planted >= 25


def test_kinds_and_families_are_many() -> None:
    assert len(FAULTS) >= 60
    assert len({kind for fault in FAULTS.values() for kind in fault.kinds}) >= 30
    assert len(FAMILIES) >= 10


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("vit", "qwen2_5_vl")])
def test_faults_of_numbers_are_found(family: str, copied: Copy) -> None:
    merge, parent = copied(family)
    assert not list(of_weights(open_case(str(merge), [str(parent)])))
    for name, fault in NUMBERS.items():
        merge, parent = copied(family)
        fault.plant(merge, parent)
        kinds = [cause.name for cause in of_weights(open_case(str(merge), [str(parent)]))]
        assert set(fault.kinds) & set(kinds), (name, kinds)


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_whole_models_raise_no_alarm(case: Case, tmp_path: Path) -> None:
    make(case).save_pretrained(tmp_path)
    assert check_folder(str(tmp_path), [str(tmp_path)]) == []


MENDED = (
    *("the index names another shard for a tensor", "the index lacks a tensor", "the index is not JSON"),
    *("there is no index", "total_size of another model", "headers without a format", "vocab_size too large"),
    *("names of a compiled model", "names without the base model's prefix", "another RoPE base", "no chat template"),
    *("a layer more in the config", "another dtype in the config", "no class in the config", "no tokenizer"),
    *("eos_token_id of the base, tokenizer of the chat model", "turns end with a token that ends nothing"),
    *("no tokenizer config", "no generation config", "quantisation in the config of plain weights"),
    "the config of a narrower model",
)
IN_TENSORS = ("a tensor left out", "the last layer left out", "a tensor that nobody reads", "a tied head stored")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_what_can_be_mended_is(family: str, copied: Copy) -> None:
    """Nothing is left to find, and what was done is said."""
    for name in MENDED:
        merge, parent = copied(family)
        if FAULTS[name].plant(merge, parent) is False:
            continue
        lines = mend(str(merge), [str(parent)])
        assert lines, name
        assert check_folder(str(merge), [str(parent)]) == [], name


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_tensors_are_not_mended(family: str, copied: Copy) -> None:
    """The folder stays as it is, and the remedy is another merge."""
    for name in IN_TENSORS:
        merge, parent = copied(family)
        if FAULTS[name].plant(merge, parent) is False:
            continue
        before = {path.name: path.read_bytes() for path in merge.iterdir()}
        assert mend(str(merge), [str(parent)]) == []
        assert {path.name: path.read_bytes() for path in merge.iterdir()} == before, name
        defects = check_folder(str(merge), [str(parent)])
        assert defects, name
        assert all("merge again" in defect.remedy for defect in defects), name


def test_the_docs_count_the_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"plants {len(FAULTS)} kinds of faults in tiny models of {len(FAMILIES)} families" in page
