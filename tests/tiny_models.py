"""The tiny models of `laws/models.py` as tests of internals take them: with their architecture, twins, and other
tensors in place of their own."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import ALL, Case, cases, difference, floating, inputs, keep_float64, load, make, outputs, reload, save
from subjects import Subject, case_of, scratch
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import shipped, tied_head

__all__ = ["ALL", "Case", "cases", "difference", "floating", "inputs", "keep_float64", "load", "make", "outputs"]
__all__ += ["reload", "save"]


@functools.cache
def further() -> list[Case]:
    """A case for each class that a family names and no file has."""
    listed = {(case.family, case.class_name) for case in ALL}
    named = [(family, name) for family, spec in shipped().items() for name in sorted(spec.classes)]
    return [case_of(f"{family}/{name}") for family, name in named if (family, name) not in listed]


class Planted(Subject):
    """A tiny model as a checkpoint, with what it answers; made once for all tests of a process, never changed.

    Its folder is where other tensors are put for `differs`.
    """

    @functools.cached_property
    def architecture(self) -> Architecture:
        return resolve(self.config, list(self.state), self.case.name)

    @property
    def pair(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model as the package's functions take it."""
        return self.state, self.config

    def twin(self, config: rm.AlignConfig | None = None, seed: int = 5, **options: Any) -> dict[str, Tensor]:
        """Its tensors in other coordinates; see `twin_of`."""
        return twin_of(self.pair, config, seed, **options)

    @functools.cached_property
    def tied(self) -> tuple[str, str] | None:
        """A head that shares the embedding's tensor, and the stream that it reads."""
        return tied_head(self.config, list(self.state), self.case.name)

    @functools.cached_property
    def rotatable(self) -> tuple[str, ...]:
        """Streams that admit rotations once their gains are folded."""
        return tuple(name for name, groups in self.architecture.stream_groups.items() if "rotation" in groups)

    def holding(self, state: dict[str, Tensor]) -> Any:
        """The model with other tensors; what it answers itself is computed before."""
        assert self.expected
        return reload(self.case, self.folder, state)

    def differs(self, state: dict[str, Tensor]) -> float:
        """Largest difference of the outputs with other tensors from those of the model itself."""
        return difference(outputs(self.holding(state), self.given), self.expected)

    @functools.cached_property
    def untied(self) -> Planted:
        """The same with a head of its own, stored and declared."""
        state, config = self.with_own_head
        if state.keys() == self.state.keys() and not self.config.get("tie_word_embeddings"):
            return self
        folder = Path(tempfile.mkdtemp(dir=scratch()))
        rm.average([(state, config)]).save_pretrained(folder)
        return replace(self, config=config, state=state, folder=folder)


@functools.cache
def planted(case: Case) -> Planted:
    """The tiny model of a case."""
    module, folder = make(case), Path(tempfile.mkdtemp(dir=scratch()))
    config, state = save(module, folder)
    return Planted(case, module, folder, config, {name: tensor.clone() for name, tensor in state.items()})


def twin_of(model: Any, config: rm.AlignConfig | None = None, seed: int = 5, **options: Any) -> dict[str, Tensor]:
    """A model's tensors in other coordinates: moved by a random element of every group that the config names."""
    return rm.Alignment.random(model, config, seed=seed, **options).apply(model).state_dict()
