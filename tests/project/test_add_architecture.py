"""docs/add-architecture.md, followed to the letter with an architecture that the package lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_architectures as contract
import test_laws
from measure import residual_groups
from subjects import Pair, subject_of
from tiny_models import Case, cases

from rotation_merge.architecture import find
from rotation_merge.architecture.registry import FOLDERS

DOCS = Path(__file__).parents[2] / "docs"
ADDING = (DOCS / "add-architecture.md").read_text(encoding="utf-8")
ARCHITECTURE, CONFIG = re.findall(r"```json\n(.*?)```", ADDING, flags=re.DOTALL)


@pytest.fixture(params=["one key", "many keys"])
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The page's two files in place."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "gpt_bigcode.json").write_text(ARCHITECTURE, encoding="utf-8")
    (tmp_path / "gpt_bigcode.json").write_text(CONFIG, encoding="utf-8")
    monkeypatch.setenv(FOLDERS, str(tmp_path / "mine"))
    found = {case.name: case for case in cases(tmp_path / "gpt_bigcode.json")}
    return found[request.param]


def test_it_is_known_only_once_it_is_added(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
    assert getattr(find(config), "family", None) == "gpt_bigcode"
    monkeypatch.delenv(FOLDERS)
    assert find(config) is None


def test_it_passes_the_contract(case: Case) -> None:
    contract.test_every_tensor_is_covered_and_every_axis_labelled(case)
    subject = subject_of(case)
    for residual in ("", *residual_groups(subject)):
        assert test_laws.function(subject, Pair(case.name, "function", residual, 1e-9, 12, "")) <= 1e-9
        assert test_laws.planted(subject, Pair(case.name, "planted", residual, 1e-5, 0, "")) <= 1e-5


def test_it_got_wrong_is_found_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    contract.test_a_wrong_file_is_found_out(case, monkeypatch)


def test_the_page_names_every_word_and_role() -> None:
    from rotation_merge.architecture.schema import OUTSIDE
    from rotation_merge.symmetry import ROLES

    for word in (*OUTSIDE, *(role for roles in ROLES.values() for role in roles)):
        assert f"`{word}`" in ADDING, word
