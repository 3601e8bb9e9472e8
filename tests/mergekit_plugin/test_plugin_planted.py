"""Planted truth through the stock command: a moved twin merged with the anchor gives the anchor back."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_support import FAMILIES, make, merged, recipe_for, relative_distances, state, twin

DELEGATES = {
    "linear": {},
    "slerp": {"t": 0.5},
    "ties": {"density": 0.5},
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    anchor = make(request.param, folder / "anchor")
    return anchor, twin(anchor, folder / "donor")


def test_twin_is_far_before(pair: tuple[Path, Path]) -> None:
    distances = relative_distances(state(pair[1]), state(pair[0]))
    assert sum(d > 0.3 for d in distances.values()) >= len(distances) // 2


@pytest.mark.parametrize("delegate", sorted(DELEGATES))
def test_merge_gives_anchor_back(pair: tuple[Path, Path], delegate: str, tmp_path: Path) -> None:
    anchor, donor = pair
    result = merged(recipe_for(delegate, anchor, donor, **DELEGATES[delegate]), tmp_path / "out")
    distances = relative_distances(result, state(anchor))
    assert max(distances.values()) <= 1e-5, sorted(distances.items(), key=lambda item: -item[1])[:5]
