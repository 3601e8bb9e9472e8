"""What every interruptible job relies on: one format of entries, and folders that are kept, replaced or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cli_support import hasten

from rotation_merge.errors import RotationMergeError, SpaceError
from rotation_merge.files import KEY, Store
from rotation_merge.matching.training import STATE, Training, kept_in
from rotation_merge.run.ledger import Ledger


@pytest.fixture(autouse=True)
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@dataclass
class Report:
    """Figures of a training run."""

    best: float = 0.1
    best_step: int = 0


def training() -> Training:
    """A small training run after two steps."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=9, cycle_momentum=False)
    for _ in range(2):
        module(torch.randn(4, 3)).square().sum().backward()
        optimiser.step()
        schedule.step()
    generator = torch.Generator().manual_seed(5)
    return Training(module, optimiser, schedule, generator, Report(1 / 3), float, lambda *_: False)


def interrupted(folder: Path, work: Callable[[Ledger], None]) -> None:
    """Do some work with what is kept in a folder, and interrupt it."""
    with kept_in(folder, lambda: "key") as ledger:
        work(ledger)
        raise KeyboardInterrupt


def kept(run: Training, folder: Path, best: dict[str, torch.Tensor]) -> None:
    """Interrupt a run after two steps, with its state in a folder."""
    with pytest.raises(KeyboardInterrupt):
        interrupted(folder, lambda ledger: ledger.keep(STATE, lambda: run.state(2, best), large=True))


def test_a_training_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    run, fresh = training(), training()
    best = {"weight": run.model.weight.detach().mT.contiguous().mT}
    kept(run, tmp_path / "state", best)
    with torch.no_grad():
        fresh.model.weight.zero_()
    fresh.optimiser.state.clear()
    fresh.generator.manual_seed(0)
    fresh.report.best = 0.0
    with kept_in(tmp_path / "state", lambda: "key") as ledger:
        step, restored = fresh.restored(ledger.get(STATE))
    assert (step, fresh.report.best) == (2, 1 / 3)
    assert torch.equal(restored["weight"], best["weight"])
    assert torch.equal(fresh.model.weight, run.model.weight)
    assert torch.equal(fresh.generator.get_state(), run.generator.get_state())
    before, after = run.optimiser.state_dict(), fresh.optimiser.state_dict()
    for number, moments in before["state"].items():
        assert all(torch.equal(x, after["state"][number][name]) for name, x in moments.items())
    assert [group["lr"] for group in before["param_groups"]] == [group["lr"] for group in after["param_groups"]]
    assert fresh.schedule.state_dict() == run.schedule.state_dict()
    assert not (tmp_path / "state").exists()


def test_a_torn_training_state_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "state"
    kept(training(), folder, {})
    path = next(folder.glob("*.pt"))
    whole = path.read_bytes()
    for length in (0, 7, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        taken: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            interrupted(folder, lambda ledger, taken=taken: taken.append(training().restored(ledger.get(STATE))[0]))
        assert taken == [0]
        assert "is damaged" in caplog.text
        caplog.clear()


def test_what_another_run_left_goes_with_its_folders(tmp_path: Path) -> None:
    killed = Store(str(tmp_path / "out"))
    killed.begin("one")
    killed.file("merge").mkdir()
    (killed.file("merge") / "model.safetensors").write_text("x")
    killed.put("record", {"x": 1})
    with Store(str(tmp_path / "out")) as work:
        work.begin("one")
        assert work.get("record") == {"x": 1}
        work.begin("other")
        assert work.is_empty()
        assert work.get("record") is None
    assert not work.path.exists()


@pytest.mark.parametrize(
    ("error", "parts", "stays"),
    [
        (KeyboardInterrupt(), True, True),
        (KeyboardInterrupt(), False, False),
        (RotationMergeError("bad data"), True, False),
        (SpaceError("the disk is full"), True, True),
    ],
)
def test_what_is_of_use_stays_after_an_interruption(
    error: BaseException, parts: bool, stays: bool, tmp_path: Path
) -> None:
    work = Store(str(tmp_path / "out"))

    def fail() -> None:
        work.begin("key")
        if parts:
            work.put("part", {})
        raise error

    with pytest.raises(type(error)), work:
        fail()
    assert work.path.exists() == stays


def test_a_run_that_is_killed_as_it_cleans_up_leaves_a_folder_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Store(str(tmp_path / "out"))
    work.begin("mark")
    for name in ("a", "z"):
        work.file(name).mkdir()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            work.remove()
    assert work.file(KEY).exists()
    again = Store(str(tmp_path / "out"))
    again.begin("mark")
    again.remove()
    assert not work.path.exists()
