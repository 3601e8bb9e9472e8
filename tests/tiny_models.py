"""The tiny models of `laws/models.py` as tests of internals take them: with their architecture, twins, and other
tensors in place of their own."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from models import ALL as ALL
from models import Case as Case
from models import cases as cases
from models import difference as difference
from models import floating as floating
from models import inputs as inputs
from models import keep_float64 as keep_float64
from models import load as load
from models import make as make
from models import outputs as outputs
from models import reload as reload
from models import save as save
from subjects import case_of
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import shipped, tied_head


@functools.cache
def further() -> list[Case]:
    """A case for each class that a family names and no file has."""
    listed = {(case.family, case.class_name) for case in ALL}
    named = [(family, name) for family, spec in shipped().items() for name in sorted(spec.classes)]
    return [case_of(f"{family}/{name}") for family, name in named if (family, name) not in listed]


@dataclass(frozen=True)
class Planted:
    """A tiny model as a checkpoint, with what it answers; made once for all tests of a process, never changed.

    Attributes:
        made: the model that was saved; who puts other tensors into it puts its own back.
        config: as mergekit reads it.
        state: its tensors, as they are named on disk; of an untied one, the head among them.
        folder: where other tensors are put for `differs`.
        tied_one: the model that an untied one was made of, whose answers it gives.
    """

    case: Case
    made: Any
    config: dict[str, Any]
    state: dict[str, Tensor]
    folder: Path
    tied_one: Planted | None = None

    @functools.cached_property
    def loaded(self) -> Any:
        """The model that was loaded again; its tensors are those that were last asked for."""
        return reload(self.case, self.folder, self.state)

    @functools.cached_property
    def given(self) -> dict[str, Tensor]:
        return inputs(self.case, self.made)

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        return outputs(self.loaded, self.given) if self.tied_one is None else self.tied_one.expected

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

    @functools.cached_property
    def _places(self) -> dict[str, Tensor] | None:
        """Where each entry of the loaded model stands among those of the checkpoint, one tensor behind the other: found
        by loading their numbers. None where loading does more than to put entries in their places.
        """
        own = self.loaded.state_dict(keep_vars=True)
        marks, start = {}, 0
        for name, tensor in self.state.items():
            marks[name] = torch.arange(start, start + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            start += tensor.numel()
        known = {own[name].data_ptr() for name in self.state if name in own}
        if self.state.keys() <= own.keys() and all(tensor.data_ptr() in known for tensor in own.values()):
            return {name: place.long() for name, place in marks.items()}  # the rest is tied to these
        found = reload(self.case, self.folder, marks).state_dict()
        if not all(bool(((x >= 0) & (x < start)).all()) for x in found.values()):
            return None
        flat, places = _flat(self.state), {name: x.long() for name, x in found.items()}
        return places if all(torch.equal(flat[x].to(own[n].dtype), own[n]) for n, x in places.items()) else None

    def holding(self, state: dict[str, Tensor]) -> Any:
        """The model with other tensors, until others are asked for; what it answers itself is computed before."""
        assert self.expected
        if state.keys() != self.state.keys() or self._places is None:
            return reload(self.case, self.folder, state)
        flat = _flat({name: state[name] for name in self.state})
        self.loaded.load_state_dict({name: flat[place] for name, place in self._places.items()}, strict=False)
        return self.loaded

    def differs(self, state: dict[str, Tensor]) -> float:
        """Largest difference of the outputs with other tensors from those of the model itself."""
        return difference(outputs(self.holding(state), self.given), self.expected)

    @functools.cached_property
    def untied(self) -> Planted:
        """The same with a head of its own, stored and declared."""
        architecture = resolve(self.config, list(self.state), self.case.name, untie=True)
        state = self.state | {
            t.name: next(self.state[name] for name in t.tied if name in self.state).clone()
            for t in architecture.tensors()
            if t.tied and t.name not in self.state
        }
        if len(state) == len(self.state) and not self.config.get("tie_word_embeddings"):
            return self
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        config = {**json.loads((self.folder / "config.json").read_text()), "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
        untied = {**self.config, "tie_word_embeddings": False}
        return replace(self, config=untied, state=state, folder=folder, tied_one=self)


def _flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tiny-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def planted(case: Case) -> Planted:
    """The tiny model of a case."""
    key = case.family, case.name, case.class_name
    _CASES[key] = case
    return _planted(*key)


_CASES: dict[tuple[str, str, str], Case] = {}


@functools.cache
def _planted(family: str, name: str, class_name: str) -> Planted:
    case = _CASES[family, name, class_name]
    model, folder = make(case), Path(tempfile.mkdtemp(dir=_folder()))
    config, state = save(model, folder)
    return Planted(case, model, config, {key: tensor.clone() for key, tensor in state.items()}, folder)


def twin_of(model: Any, config: rm.AlignConfig | None = None, seed: int = 5, **options: Any) -> dict[str, Tensor]:
    """A model's tensors in other coordinates: moved by a random element of every group that the config names."""
    return rm.Alignment.random(model, config, seed=seed, **options).apply(model).state_dict()
