"""Training that keeps the best state on held-out samples, and goes on where an interrupted run was."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rotation_merge.files import FOLDER, Output, check_output
from rotation_merge.run.ledger import Ledger, kept_beside

LOG = logging.getLogger(__name__)
S = TypeVar("S")

STATE = "state"
"""What a ledger calls the state of training."""

HELD_OUT = 0.15
"""Share of the samples that judges the model while it is trained."""


@dataclass(frozen=True)
class Training:
    """What is trained, and all that a run needs to go on.

    Attributes:
        model: its parameters that require gradients are trained.
        generator: of the random numbers that `step` draws.
        report: has held-out figures: `after` and `best_step` of the best state, and a `history` of all of them.
        step: takes one step.
        score: judges the model on held-out samples; the first figure is to fall.
        least_gain: a figure lower by less than this is no better.
    """

    model: nn.Module
    optimiser: Optimizer
    schedule: LRScheduler
    generator: torch.Generator
    report: Any
    step: Callable[[], object]
    score: Callable[[], Sequence[float]]
    least_gain: float = 0.0

    def restored(self, state: Mapping[str, Any] | None) -> tuple[int, dict[str, Tensor]]:
        """Go on from a state (None: from the start): the steps that are done, and the best parameters."""
        if state is None:
            return 0, copy.deepcopy(trained(self.model))
        self.model.load_state_dict(state["model"], strict=False)
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["random"])
        vars(self.report).update(state["report"])
        return state["done"], state["best"]

    def run(
        self,
        steps: int,
        looks: int,
        watch: Callable[[int], None],
        ledger: Ledger,
        patience: float = math.inf,
        seconds: float = math.inf,
    ) -> None:
        """Take the steps; the model is then what was best on held-out samples.

        Args:
            looks: how often it is judged.
            watch: told the steps that are done.
            ledger: keeps the state, from which the run goes on.
            patience: looks without a better state after which training stops.
            seconds: after which it stops.
        """
        (done, best), began = self.restored(ledger.get(STATE)), time.perf_counter()
        every = max(1, steps // looks)

        def state() -> dict[str, Any]:
            parts = {"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}
            facts = {"random": self.generator.get_state(), "report": asdict(self.report), "done": step, "best": best}
            return {"model": trained(self.model), **parts, **facts}

        for step in range(done + 1, steps + 1):
            if step > self.report.best_step + patience * every:
                break
            self.step()
            self.schedule.step()
            elapsed = time.perf_counter() - began
            late = elapsed > seconds
            if (step % every == 0 or step == steps or late) and self._is_best(step, elapsed):
                best = copy.deepcopy(trained(self.model))
            ledger.keep(STATE, state, large=True)
            watch(step)
            if late:
                break
        self.model.load_state_dict(best, strict=False)

    def _is_best(self, step: int, seconds: float) -> bool:
        """Judge the model after so many steps and seconds, for the report; whether it is the best so far."""
        figures, report = self.score(), self.report
        report.history.append((step, seconds, *figures))
        LOG.info("step %d: held-out figures %s, the best so far is %.4f", step, figures, report.after)
        is_best: bool = figures[0] < report.after - self.least_gain
        if is_best:
            report.after, report.best_step = figures[0], step
        return is_best


def kept_in(folder: Path | None, key: Callable[[], str]) -> AbstractContextManager[Ledger]:
    """A ledger in a folder (None: nowhere), which goes when the block ends without an error.

    Raises:
        RotationMergeError: there is a file in its place, or a folder that no run wrote.
    """
    if folder is not None:
        check_output(Output(str(folder), FOLDER), force=True)
    return kept_beside(None if folder is None else str(folder), key, ending="")


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def split_at_random(samples: Sequence[S], draw: torch.Generator) -> tuple[list[S], list[S]]:
    """Samples in two parts, of which a share is held out."""
    order = torch.randperm(len(samples), generator=draw).tolist()
    count = max(1, round(len(samples) * HELD_OUT))
    return [samples[i] for i in order[count:]], [samples[i] for i in order[:count]]
