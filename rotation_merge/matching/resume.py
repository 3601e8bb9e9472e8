"""The state of an unfinished run of training in one file, from which an interrupted run continues."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import AlignmentError, RotationMergeError, no_space, short
from rotation_merge.files import UNREADABLE, Output, check_output, replacing
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
    states = {f"model {i}": model.state_dict() for i, model in enumerate(models)}
    for part, tensors in {**states, **{f"batch {i}": batch for i, batch in enumerate(batches)}}.items():
        for name, tensor in tensors.items():
            mark.add(f"{part}: {name}", tensor)
    chosen = {name: value for name, value in asdict(options).items() if name not in WITHOUT_EFFECT}
    configs = [getattr(model, "config", "") for model in models]
    texts = [str(getattr(config, "to_json_string", config.__str__)()) for config in configs]
    classes = [(type(model).__name__, text) for model, text in zip(models, texts, strict=True)]
    return mark.hexdigest({"models": classes, "match": asdict(match), **chosen})


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
        remedy = "delete it to start again"
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            if state["mark"] != self.mark:
                problem = "holds the state of another fit (other models, data or options)"
                remedy += ", or continue that fit with its own options"
                raise AlignmentError(problem, where=str(self.path), remedy=remedy)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.generator.set_state(state["random"])
            vars(report).update(state["report"])
        except (*UNREADABLE, EOFError, pickle.UnpicklingError) as error:
            problem = "the state of an earlier fit cannot be used here"
            raise AlignmentError(problem, where=str(self.path), remedy=remedy) from error
        return state["step"], state["best"]

    def save(self, step: int, best: dict[str, Tensor], report: Any) -> None:
        """Write the state atomically, if it is time; to be called between steps.

        Raises:
            RotationMergeError: there is no space.
        """
        if self.path is None or time.monotonic() - self._written < ledger.SECONDS:
            return
        facts = {"mark": self.mark, "step": step, "report": asdict(report)}
        tensors = {"best": best, "random": self.generator.get_state()}
        try:
            with replacing(self.path) as temporary:
                torch.save({**facts, **tensors, **{k: part.state_dict() for k, part in self.parts.items()}}, temporary)
        except (OSError, RuntimeError) as error:
            why = "no space left on device" if no_space(error) else short(error)
            problem = f"the state of the run cannot be written ({why})"
            raise RotationMergeError(problem, where=str(self.path), remedy="free some space and run again") from error
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the state of a finished fit."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
