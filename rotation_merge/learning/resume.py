"""The state of an unfinished fit on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rotation_merge.errors import AlignmentError

if TYPE_CHECKING:
    from rotation_merge.learning.records import FitReport


class State:
    """Parameters, optimiser, schedule and random numbers of a fit, in one file (or nowhere)."""

    def __init__(
        self,
        path: Path | None,
        learned: nn.Module,
        optimiser: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        generator: torch.Generator,
    ) -> None:
        self.path, self.learned, self.optimiser = path, learned, optimiser
        self.schedule, self.generator = schedule, generator

    def restore(self, report: FitReport) -> tuple[int, dict[str, Tensor]]:
        """Steps done and best parameters so far: those of the file, or none and the start.

        Raises:
            AlignmentError: the file is damaged or of another fit.
        """
        start = {name: tensor.detach().clone() for name, tensor in self.learned.state_dict().items()}
        if self.path is None or not self.path.exists():
            return 0, start
        try:
            held = torch.load(io.BytesIO(self.path.read_bytes()), weights_only=True)
            self.learned.load_state_dict(held["learned"])
            self.optimiser.load_state_dict(held["optimiser"])
            self.schedule.load_state_dict(held["schedule"])
            self.generator.set_state(held["generator"])
            for name, value in json.loads(held["report"]).items():
                setattr(report, name, [tuple(row) for row in value] if name == "history" else value)
        except Exception as error:  # unpickling errors come in every class
            raise AlignmentError(
                "the state of an earlier fit cannot be used here",
                where=str(self.path),
                remedy="delete it to start anew",
            ) from error
        return held["step"], held["best"]

    def save(self, step: int, best: dict[str, Tensor], report: FitReport) -> None:
        """Write the state, whole or not at all."""
        if self.path is None:
            return
        temporary = self.path.with_suffix(self.path.suffix + ".partial")
        torch.save(
            {
                "step": step,
                "best": best,
                "learned": self.learned.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "schedule": self.schedule.state_dict(),
                "generator": self.generator.get_state(),
                "report": json.dumps(asdict(report)),
            },
            temporary,
        )
        temporary.replace(self.path)

    def remove(self) -> None:
        """The fit is done."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
