"""Doctor names every kind of planted fault (`faults_support.py`), and nothing in whole folders: through the command."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
from faults_support import FAMILIES, FAULTS, causes, whole
from subjects import scratch

UNSEEN = ("vit", "qwen2_5_vl")
"""Families whose sizes are too small for faults of numbers to be told from chance."""


@cache
def sound(family: str) -> Path:
    return whole(family, scratch() / f"whole-{family}")


def copies(family: str, folder: Path) -> tuple[Path, Path]:
    places = folder / "merge", folder / "parent"
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound(family), place)
    return places


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str, tmp_path: Path) -> None:
    """In two of the families that can have it, other ones for the next fault."""
    fault, start = FAULTS[name], list(FAULTS).index(name)
    families = (FAMILIES[(start + 7 * step) % len(FAMILIES)] for step in range(len(FAMILIES)))
    planted = 0
    for family in families:
        merge, parent = copies(family, tmp_path)
        if (fault.weights and family in UNSEEN) or fault.plant(merge, parent) is False:
            continue
        planted += 1
        assert causes(merge, parent) & set(fault.kinds), family
        if planted == 2:
            break
    assert planted


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_folders_raise_no_alarm(family: str, tmp_path: Path) -> None:
    assert causes(*copies(family, tmp_path)) == set()


def test_no_kind_is_missing() -> None:
    """Kinds that doctor has always named."""
    assert len(FAULTS) >= 60
    assert len({kind for fault in FAULTS.values() for kind in fault.kinds}) >= 30
