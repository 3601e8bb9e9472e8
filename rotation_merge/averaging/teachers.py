"""Teachers of a refit: the models that answer, and the samples that they answer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.errors import RecipeError
from rotation_merge.model.view import View
from rotation_merge.run.data import (
    Data,
    Samples,
    batched_by_length,
    for_each,
    read_batches,
    read_samples,
    split_batches,
    unpadded,
)
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import Batch, local_path
from rotation_merge.run.generated_samples import SELF, SYNTHETIC, writes_text

AT_ONCE, LENGTH = 16, 128
"""Examples in a batch, and tokens of a text."""

HELD_OUT = 8
"""Of samples with labels a quarter judges the refit, and at least so many."""

JUDGED = ("next token", "masked token", "class", "labels", "regression")
"""Tasks of samples whose labels can judge a merge."""


@dataclass(frozen=True)
class Teacher:
    """A model that answers.

    Attributes:
        view: the model in the base's coordinates; of the base itself the base's view.
        original: the model as it is, which has its config and writes its own samples.
        share: its part in the average and among the answers; shares sum to one.
        source: where its samples come from: `self`, `synthetic`, a file.
        samples: number of samples.
        batches: the samples; None: not read yet, or written by the model itself in the refit.
        held_out: samples with labels that nothing is solved on; None: there are none.
    """

    view: View
    original: View
    share: float
    source: str
    samples: int
    batches: list[Batch] | None = field(default=None, repr=False)
    held_out: Data | None = field(default=None, repr=False)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights of models as shares that sum to one.

    Raises:
        RecipeError: one is negative or no number, or none is above 0.
    """
    total = sum(weights)
    if not (min(weights) >= 0 and 0 < total < float("inf")):
        remedy = "none may be negative, and one must be above 0"
        raise RecipeError("weights are shares of the models among the answers", where="models", remedy=remedy)
    return [weight / total for weight in weights]


def usual_source(model: View) -> str:
    """The source of a model's samples that needs no data.

    Raises:
        RecipeError: there is none.
    """
    kind = empty_model(model.transformers_config)
    if writes_text(kind):
        return SELF
    if kind.main_input_name == "pixel_values" and not hasattr(kind.config, "text_config"):
        return SYNTHETIC
    problem = f"delegate refit needs samples, {type(kind).__name__} cannot make its own"
    raise RecipeError(problem, where=model.name, remedy="add 'data: FILE' under its parameters")


def read_teachers(base: View, teachers: Sequence[Teacher], config: RefitConfig) -> tuple[list[Teacher], bool]:
    """Read the samples of all teachers but those that write their own, before any weight is read.

    Args:
        teachers: those whose batches are known keep them.

    Returns:
        The teachers with their samples, and whether these are one pool that all teachers answer to; a source that
        several teachers of a pool name is read once.

    Raises:
        RotationMergeError: samples are of no use, or the config asks for what these models cannot give.
    """
    if config.start not in ("average", "anchor") and all(teacher.view is base for teacher in teachers):
        problem = f"'start: {config.start}' merges task vectors, but there are none"
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(problem, remedy=remedy)
    pooled = _pooled(teachers, config.targets)
    read: list[Teacher] = []
    for number, teacher in enumerate(teachers):
        known = pooled and teacher.source != SELF and any(earlier.source == teacher.source for earlier in read)
        read.append(replace(teacher, batches=[]) if known else _read(teacher, config.seed + number))
    return read, pooled


def _pooled(teachers: Sequence[Teacher], targets: str | None) -> bool:
    """Whether all models share one pool of samples, by the config or because all have the same ones."""
    source = teachers[0].source
    same = len(teachers) > 1 and source != SELF and all(teacher.source == source for teacher in teachers)
    if same and targets == "own":
        problem = f"'targets: own' needs different samples for each model, all have '{source}'"
        raise RecipeError(problem, remedy="write 'data' under each model, or 'targets: mean'")
    return same if targets is None else targets == "mean"


def _read(teacher: Teacher, seed: int) -> Teacher:
    """A teacher with its samples from a file, a quarter of those with labels held out."""
    if teacher.batches is not None or teacher.source == SELF:
        return teacher
    beyond = 0 if teacher.source == SYNTHETIC else max(HELD_OUT, teacher.samples // 3)
    kind = empty_model(teacher.original.transformers_config)
    samples = samples_of(teacher, kind, teacher.samples + beyond, seed)
    held_out = None
    if beyond and samples.examples >= 2 * HELD_OUT:
        count = min(teacher.samples, samples.examples - max(HELD_OUT, samples.examples // 4))
        samples, remaining = split_batches(samples, count)
        held_out = remaining if remaining.task in JUDGED else None
    batches = _in_batches(samples.batches, teacher.source)
    return replace(teacher, batches=batches, samples=samples.examples, held_out=held_out)


def samples_of(teacher: Teacher, model: Any, count: int, seed: int) -> Data:
    """Samples of a teacher's source, for a model of its class; of its own, written by it."""
    path = local_path(teacher.original.reference.model.path)
    return read_batches(teacher.source, path, model, count, AT_ONCE, LENGTH, seed)


def _in_batches(samples: Sequence[Batch], source: str) -> list[Batch]:
    return batched_by_length(unpadded(samples, source), AT_ONCE * LENGTH)


def teachers_in_memory(
    views: Sequence[View], samples: Samples, config: RefitConfig, weights: Sequence[float] | None = None
) -> list[Teacher]:
    """Teachers with samples from Python; models without weight are left out.

    Args:
        views: in shared coordinates.
        samples: for all models, or a list with those of each (`run.data.for_each`); None: each writes its own.
        weights: of the models; None: all equal.

    Raises:
        RotationMergeError: weights or samples are of no use.
    """
    shares = shares_of([1.0] * len(views) if weights is None else weights)
    sources = for_each(SELF if samples is None else samples, len(views))
    shared = samples is not None and all(source is sources[0] for source in sources)
    teachers: list[Teacher] = []
    for number, (view, share, source) in enumerate(zip(views, shares, sources, strict=True)):
        if share == 0:
            continue
        name, batches = "samples" if shared else f"samples of model {number + 1}", list[Batch]()
        if not shared or not teachers:
            read = read_samples(view, source, config.samples, seed=config.seed + number)
            batches = _in_batches(read.batches, name)
        teachers.append(Teacher(view, view, share, name, config.samples, batches))
    return teachers
