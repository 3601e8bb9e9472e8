"""What tests of searches share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rotation_merge.search.candidates import Planner


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let searches try no other candidates than those of some names."""
    real = Planner.candidates

    def chosen(*names: str) -> None:
        monkeypatch.setattr(Planner, "candidates", lambda self: [c for c in real(self) if c.name in names])

    return chosen
