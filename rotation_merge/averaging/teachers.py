"""Teachers of a refit: the models that answer, and the samples that they answer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.errors import RecipeError
from rotation_merge.model.view import View
from rotation_merge.run.data import (
    Data,
    Samples,
    batched_by_length,
    for_each,
    read_samples,
    split_batches,
    unpadded,
)
from rotation_merge.run.functions import Batch, empty_model
from rotation_merge.run.generated_samples import SELF, SYNTHETIC, writes_text

TOKENS = 2048
"""In a batch of several texts, at most."""

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

    Returns:
        The teachers, and whether their samples are one pool that all of them answer to: by the config, or because all
        have the same. A source that several teachers of a pool name is read once.

    Raises:
        RotationMergeError: samples are of no use, or the config asks for what these models cannot give.
    """
    if config.start not in ("average", "anchor") and all(teacher.view is base for teacher in teachers):
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(f"'start: {config.start}' merges task vectors, but there are none", remedy=remedy)
    sources = [teacher.source for teacher in teachers]
    same = len(sources) > 1 and set(sources) == {sources[0]} != {SELF}
    if same and config.targets == "own":
        problem = f"'targets: own' needs different samples for each model, all have '{sources[0]}'"
        raise RecipeError(problem, remedy="write 'data' under each model, or 'targets: mean'")
    pooled = same if config.targets is None else config.targets == "mean"
    read = []
    for number, teacher in enumerate(teachers):
        known = pooled and teacher.source != SELF and teacher.source in sources[:number]
        read.append(replace(teacher, batches=[]) if known else _read(teacher, config.seed + number))
    return read, pooled


def _read(teacher: Teacher, seed: int) -> Teacher:
    """A teacher with its samples from a file, some of those with labels held out."""
    if teacher.batches is not None or teacher.source == SELF:
        return teacher
    beyond = 0 if teacher.source == SYNTHETIC else max(HELD_OUT, teacher.samples // 3)
    kind = empty_model(teacher.original.transformers_config)
    samples = read_samples(teacher.original, teacher.source, teacher.samples + beyond, seed=seed, module=kind)
    held_out = None
    if beyond and samples.examples >= 2 * HELD_OUT:
        count = min(teacher.samples, samples.examples - max(HELD_OUT, samples.examples // 4))
        samples, remaining = split_batches(samples, count)
        held_out = remaining if remaining.task in JUDGED else None
    batches = _in_batches(samples, teacher.source)
    return replace(teacher, batches=batches, samples=samples.examples, held_out=held_out)


def _in_batches(samples: Data, source: str) -> list[Batch]:
    return batched_by_length(unpadded(samples.batches, source), TOKENS)


def teachers_in_memory(
    views: Sequence[View], samples: Samples, config: RefitConfig, weights: Sequence[float] | None
) -> list[Teacher]:
    """Views in shared coordinates as teachers, without those of no weight, and with their samples.

    Args:
        samples: for all, or a list with those of each (`run.data.for_each`); None: each writes its own.
        weights: of the views; None: all equal.

    Raises:
        RotationMergeError: weights or samples are of no use.
    """
    sources = for_each(SELF if samples is None else samples, len(views))
    shared = samples is not None and all(source is sources[0] for source in sources)
    teachers: list[Teacher] = []
    for number, share in enumerate(shares_of([1.0] * len(views) if weights is None else weights)):
        view, name, batches = views[number], "samples" if shared else f"samples of model {number + 1}", list[Batch]()
        if share and not (shared and teachers):
            read = read_samples(view, sources[number], config.samples, seed=config.seed + number)
            batches = _in_batches(read, name)
        teachers += [Teacher(view, view, share, name, config.samples, batches)] if share else []
    return teachers
