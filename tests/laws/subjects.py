"""What the laws are tried on: a tiny model, its checkpoint, its outputs, twins of it; and the list of its laws.

`pairs.tsv` has a line for each pair of a model and a law: the model, the law, the residual group (empty: local spaces
alone; by stream, where there are several), the tolerance, how many tensors move at least, and a mark (`compare.py`
says which there are, and whether the list keeps what earlier ones had).
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ALL, Case, inputs, load, make, outputs, save
from torch import Tensor

import rotation_merge as rm

PAIRS = Path(__file__).with_name("pairs.tsv")
SEED = 1


@dataclass(frozen=True)
class Pair:
    """One law that one model keeps.

    Attributes:
        model: `FAMILY/NAME` in tests/architectures, or `FAMILY/CLASS`.
        law: a function of `test_laws.py`, without `test_`.
        residual: the group of the residual stream that moves beside the local spaces, or groups by stream.
        tolerance: the largest difference that keeps the law.
        moved: how many of the checkpoint's tensors change at least, where the law moves the model.
        mark: of a known fault, or of what goes by design; see `compare.py`.
    """

    model: str
    law: str
    residual: str
    tolerance: float
    moved: int
    mark: str

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.model, self.law, self.residual) if part)


def read_pairs(text: str) -> list[Pair]:
    """The pairs of a list, its first line aside."""
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    return [Pair(row[0], row[1], row[2], float(row[3]), int(row[4]), row[5]) for row in rows]


@dataclass(frozen=True, eq=False)
class Subject:
    """A tiny model and what the laws ask of it.

    Attributes:
        module: the model as it was made.
        folder: its checkpoint.
        config, state: what the checkpoint holds.
        given, expected: inputs, and the outputs of the checkpoint; of the module they differ where transformers gives
            a loaded model other constants than a new one.
    """

    case: Case
    module: Any
    folder: Path
    config: dict[str, Any]
    state: dict[str, Tensor]

    @functools.cached_property
    def given(self) -> dict[str, Tensor]:
        return inputs(self.case, self.module)

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        return outputs(load(self.case, self.folder), self.given)

    @functools.cached_property
    def expected_of_module(self) -> dict[str, Tensor]:
        return self.outputs_of(self.module)

    def outputs_of(self, module: Any) -> dict[str, Tensor]:
        module.set_attn_implementation("eager")
        module.config._experts_implementation = "eager"  # grouped products know no double precision
        return outputs(module, self.given)

    def checkpoint(self, residual: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint in memory; where its streams are to be rotated, with a head of its own."""
        return self.with_own_head if "rotation" in residual else (self.state, self.config)

    @functools.cached_property
    def with_own_head(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = self.state, self.config
        view = rm.Alignment.random(model, untie=True, **STILL).apply(model)
        return view.state_dict(), view.config

    def drawn(self, model: Any, residual: str, seed: int = SEED) -> tuple[rm.Alignment, rm.View]:
        """A random element of every local group and of a residual one, and the model that it moves."""
        drawn = rm.Alignment.random(model, seed=seed, **options(residual))
        return drawn, drawn.apply(model)


STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}


def options(residual: str) -> dict[str, Any]:
    """The widest local groups and a residual one, as `align` takes them."""
    return {"heads": "permutation", "residual": residual or "none", "untie": "rotation" in residual}


def changed(model: Any, other: Mapping[str, Tensor]) -> set[str]:
    """Names of a model's tensors (a module, or a state dict and its config) that differ in another one."""
    state = model[0] if isinstance(model, tuple) else model.state_dict()
    return {name for name, tensor in state.items() if name in other and not torch.equal(other[name], tensor)}


MODELS = {f"{case.family}/{case.name}": case for case in ALL}


def case_of(model: str) -> Case:
    """The tiny model of a name; of a transformers class that has none, with the config of the class most like it."""
    if model in MODELS:
        return MODELS[model]
    family, _, name = model.partition("/")
    known = [case for case in ALL if case.family == family]
    like = max(known, key=lambda case: SequenceMatcher(None, case.class_name, name).ratio())
    return Case(family, name, name, like.config)


@functools.lru_cache(maxsize=1)
def subject(model: str) -> Subject:
    """The subject of a name; the last one is kept."""
    return subject_of(case_of(model))


def subject_of(case: Case) -> Subject:
    module = make(case)
    folder = fresh(re.sub(r"\W+", "-", f"{case.family}-{case.name}"))
    return Subject(case, module, folder, *save(module, folder))


@functools.cache
def scratch() -> Path:
    """A folder of this process, removed at its end."""
    import atexit

    folder = tempfile.mkdtemp(prefix="laws-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def fresh(name: str) -> Path:
    """The path of a folder that is not there."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def distance(a: rm.View, b: rm.View) -> float:
    """Frobenius distance of two models, relative to the first."""
    first, second = a.state_dict(), b.state_dict()
    assert set(first) == set(second)
    apart = sum(float((second[name].double() - x.double()).square().sum()) for name, x in first.items())
    return (apart / sum(float(x.double().square().sum()) for x in first.values())) ** 0.5


LISTED = read_pairs(PAIRS.read_text(encoding="utf-8"))
"""Every pair."""


FIRST = {case.family: model for model, case in reversed(MODELS.items())}
"""The first model of each family."""


QUICK = ("llama", "gpt2", "bert", "t5", "vit")
"""Of the ten families for all that recipes may say: those that `make test` runs."""

TWINS = ("function", "planted")
ALWAYS = (*TWINS, "saved", "adapter", "carried", "changes", "recipe", "tuned")
"""Laws that every family is tried on by `make test`; the others are for what stands beside plain recipes."""


def slow(pair: Pair) -> bool:
    """Whether a pair is left to `make test-slow`.

    Of models beside the first of their family twins moved in the residual stream, and adapters; latent attention, whose
    residual twins take ten seconds; five of the ten families for what stands beside plain recipes.
    """
    residual_twin = pair.law in TWINS and bool(pair.residual)
    family = pair.model.partition("/")[0]
    if pair.model in FIRST.values():
        latents = pair.law == "planted" and bool(pair.residual) and family in ("deepseek", "glm5")
        return latents or (pair.law not in ALWAYS and (pair.law == "planted_again" or family not in QUICK))
    return residual_twin or pair.law in ("adapter", "planted_again") or pair.model not in MODELS


def tried(laws: Collection[str]) -> list[Any]:
    """The pairs of some laws as parameters of a test: known faults must fail, what is gone is left out."""
    later = pytest.mark.slow
    fails = pytest.mark.xfail(raises=(AssertionError, RuntimeError, rm.RotationMergeError), strict=True)
    return [
        pytest.param(pair, id=pair.name, marks=[fails] * pair.mark.startswith("issue") + [later] * slow(pair))
        for pair in LISTED
        if pair.law in laws and not pair.mark.startswith("gone")
    ]
