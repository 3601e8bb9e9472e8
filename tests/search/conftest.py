"""What tests of searches share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rotation_merge.search import run as search
from rotation_merge.search.candidates import candidates_of


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let searches try no other candidates than those of some names, each at the scale that it begins with."""

    def chosen(*names: str) -> None:
        monkeypatch.setattr(
            search, "candidates_of", lambda parents: [c for c in candidates_of(parents) if c.name in names]
        )
        monkeypatch.setattr(search, "best_scale", lambda model, _, scale, measure, *__: (scale, measure(model)))

    return chosen
