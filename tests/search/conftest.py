"""What tests of searches share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rotation_merge.search.candidates import Candidates


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let searches try no other candidates than those of some names."""
    real = Candidates.all

    def chosen(*names: str) -> None:
        monkeypatch.setattr(Candidates, "all", lambda self: [c for c in real(self) if c.name in names])

    return chosen
