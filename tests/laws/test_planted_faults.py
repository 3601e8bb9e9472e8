"""Doctor names every kind of planted fault (`faults_support.py`), and nothing in whole folders: through the command."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
from faults_support import FAMILIES, FAULTS, causes, whole
from subjects import scratch


@cache
def sound(family: str) -> Path:
    return whole(family, scratch() / f"whole-{family}")


def copies(family: str, folder: Path) -> tuple[Path, Path]:
    """A whole folder to be spoilt, and one that is not."""
    shutil.rmtree(folder / "merge", ignore_errors=True)
    return shutil.copytree(sound(family), folder / "merge"), sound(family)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str, tmp_path: Path) -> None:
    """In two of the families that can have it, other ones for the next fault."""
    fault, start = FAULTS[name], list(FAULTS).index(name)
    planted = 0
    for step in range(len(FAMILIES)):
        family = FAMILIES[(start + 7 * step) % len(FAMILIES)]
        merge, parent = copies(family, tmp_path)
        if planted < 2 and fault.plant(merge, family):
            planted += 1
            assert causes(merge, parent) & set(fault.kinds), family
    assert planted


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_folders_raise_no_alarm(family: str, tmp_path: Path) -> None:
    assert causes(*copies(family, tmp_path)) == set()
