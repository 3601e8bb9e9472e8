"""The state of an unfinished run of training in one file, from which an interrupted run continues."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import AlignmentError, RotationMergeError, no_space, short
from rotation_merge.files import Output, check_output, read_part, write_part
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.run import ledger

WITHOUT_EFFECT = ("minutes", "state", "checkpointing")
"""Options of a fit that do not change where it goes."""


def fit_mark(
    models: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]], match: AlignConfig, options: FitConfig
) -> str:
    """A stable key of a fit: models, data, and every option that has an effect."""
    mark = Fingerprint()
    for i, model in enumerate(models):
        for name, tensor in model.state_dict().items():
            mark.add(f"model {i}: {name}", tensor)
    for i, batch in enumerate(batches):
        for name, tensor in batch.items():
            mark.add(f"batch {i}: {name}", tensor)
    chosen = {name: value for name, value in asdict(options).items() if name not in WITHOUT_EFFECT}
    classes = [(type(model).__name__, _config_text(getattr(model, "config", ""))) for model in models]
    return mark.hexdigest({"models": classes, "match": asdict(match), **chosen})


def _config_text(config: Any) -> str:
    """A config as JSON text, or the text of any other config object."""
    return str(config.to_json_string()) if hasattr(config, "to_json_string") else str(config)


class TrainingState:
    """Parameters, optimiser, schedule and random numbers of a run, in one file (or nowhere).

    It is written once a run has lasted `ledger.SECONDS`, and then at most once in so many: short runs pay nothing.
    """

    def __init__(
        self,
        path: Path | None,
        learned: nn.Module,
        optimiser: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        generator: torch.Generator,
        mark: str,
    ) -> None:
        """Set the file, the parts and the key of the state to save or restore.

        Args:
            mark: what the fit is of (see `fit_mark`); a state of anything else is refused.

        Raises:
            RotationMergeError: the file cannot be written.
        """
        if path is not None:
            check_output(Output(str(path), "state", wrote=lambda _: True))
        self.path, self.mark, self.generator, self._written = path, mark, generator, time.monotonic()
        self.parts: dict[str, Any] = {"learned": learned, "optimiser": optimiser, "schedule": schedule}

    def restore(self, report: Any) -> tuple[int, dict[str, Tensor]]:
        """Restore the number of steps and the best parameters from the file, or zero and the start.

        Raises:
            AlignmentError: the file is damaged or of another fit.
        """
        if self.path is None or not self.path.exists():
            return 0, {name: tensor.detach().clone() for name, tensor in self.parts["learned"].state_dict().items()}
        try:
            state = read_part(self.path)
            if state["mark"] != self.mark:
                raise AlignmentError(
                    "holds the state of another fit (other models, data or options)",
                    where=str(self.path),
                    remedy="delete it to start again, or continue that fit with its own options",
                )
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.generator.set_state(state["random"])
            vars(report).update(state["report"])
            return state["step"], state["best"]
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise AlignmentError(
                "the state of an earlier fit cannot be used here",
                where=str(self.path),
                remedy="delete it to start again",
            ) from error

    def save(self, step: int, best: dict[str, Tensor], report: Any) -> None:
        """Write the state atomically, if it is time; to be called between steps.

        Raises:
            RotationMergeError: there is no space.
        """
        if self.path is None or time.monotonic() - self._written < ledger.SECONDS:
            return
        state = {"mark": self.mark, "step": step, "best": best, "report": asdict(report)}
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        try:
            write_part(self.path, {**state, "random": self.generator.get_state()})
        except OSError as error:
            why = "no space left on device" if no_space(error) else short(error)
            problem = f"the state of the run cannot be written ({why})"
            raise RotationMergeError(problem, where=str(self.path), remedy="free some space and run again") from error
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the state of a finished fit."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
