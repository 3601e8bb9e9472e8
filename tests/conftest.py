"""What several test files begin with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and a twin of it in other coordinates."""
    from plugin_support import make, twin

    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor")
    return anchor, twin(anchor, folder / "donor")
