"""The state of an unfinished run of training in one file, from which an interrupted run continues."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rotation_merge.errors import AlignmentError, RotationMergeError, no_space, short
from rotation_merge.files import UNREADABLE, Entry, Output, check_output, read_entry, write_entry
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
        self.path, self.learned, self.optimiser, self.mark = path, learned, optimiser, mark
        self.schedule, self.generator, self._written = schedule, generator, time.monotonic()

    def restore(self, report: Any) -> tuple[int, dict[str, Tensor]]:
        """Restore the number of steps and the best parameters from the file, or zero and the start.

        Raises:
            AlignmentError: the file is damaged or of another fit.
        """
        start = {name: tensor.detach().clone() for name, tensor in self.learned.state_dict().items()}
        if self.path is None or not self.path.exists():
            return 0, start
        try:
            stored = read_entry(self.path)
            facts, parts = stored.facts, _grouped(stored.tensors)
            if facts["mark"] != self.mark:
                raise AlignmentError(
                    "holds the state of another fit (other models, data or options)",
                    where=str(self.path),
                    remedy="delete it to start again, or continue that fit with its own options",
                )
            moments = {i: parts.get(f"optimiser {i}", {}) for i in facts["trained"]}
            self.learned.load_state_dict(parts.get("learned", {}))
            self.optimiser.load_state_dict({"state": moments, "param_groups": facts["groups"]})
            self.schedule.load_state_dict(facts["schedule"])
            self.generator.set_state(parts["random"]["generator"])
            for name, value in facts["report"].items():
                setattr(report, name, [tuple(row) for row in value] if name == "history" else value)
            return facts["step"], parts.get("best", {})
        except UNREADABLE as error:
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
        optimiser = self.optimiser.state_dict()
        parts: dict[str, Mapping[str, Tensor]] = {
            "learned": self.learned.state_dict(),
            "best": best,
            "random": {"generator": self.generator.get_state()},
            **{f"optimiser {i}": moments for i, moments in optimiser["state"].items()},
        }
        facts = {
            "mark": self.mark,
            "step": step,
            "trained": list(optimiser["state"]),
            "groups": optimiser["param_groups"],
            "schedule": self.schedule.state_dict(),
            "report": asdict(report),
        }
        tensors = {f"{part}/{name}": tensor for part, values in parts.items() for name, tensor in values.items()}
        try:
            write_entry(self.path, Entry(facts, tensors))
        except (OSError, SafetensorError) as error:
            why = "no space left on device" if no_space(error) else short(error)
            problem = f"the state of the run cannot be written ({why})"
            raise RotationMergeError(problem, where=str(self.path), remedy="free some space and run again") from error
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the state of a finished fit."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors named `part/name`, by part and name."""
    parts = dict[str, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = tensor
    return parts
