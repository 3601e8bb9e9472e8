"""Delegate `refit` in a recipe: which models answer to which samples, settled before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.run.data import Data, batched_by_length, read_batches, split_batches, unpadded
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import Batch, local_path
from rotation_merge.run.generated_samples import SELF, SYNTHETIC, writes_text

AT_ONCE = 16
"""Examples in a batch."""

LENGTH = 128
"""Tokens of a text."""

HELD_OUT = 8
"""Of samples with labels a quarter judges the refit, and at least so many."""

JUDGED = ("next token", "masked token", "class", "labels", "regression")
"""Tasks of samples whose labels can judge a merge."""


@dataclass(frozen=True)
class Teacher:
    """A model that answers.

    Attributes:
        share: its part in the average and among the answers; shares sum to one.
        data: where its samples come from: self, synthetic, or a file.
        samples: number of samples.
        batches: the samples; None: it writes them itself when the merge runs.
        held_out: samples with labels that nothing is solved on; None: there are none.
    """

    model: ModelReference
    share: float
    data: str
    samples: int
    batches: list[Batch] | None = None
    held_out: Data | None = None


@dataclass(frozen=True)
class RefitPlan:
    """The models that answer each set of samples.

    Attributes:
        pooled: whether all models answer to all samples, and their mean counts; else each answers to its own.
        ridge: of the solves.
        start: `average`, `anchor`, or the delegate that merges the task vectors.
        scale: factor of the start's difference from the anchor.
        spill: folder for hidden states and results; None: memory and the system's own folder for temporary files.
        seed: of everything random.
    """

    teachers: list[Teacher] = field(repr=False)
    pooled: bool
    ridge: float
    start: str
    scale: float
    spill: str | None
    seed: int

    @property
    def start_in_words(self) -> str:
        words = {"average": "average", "anchor": "anchor", "task_arithmetic": "sum of the task vectors"}
        return words.get(self.start, f"merge by {self.start}")


def read_lesson(config: MergeConfiguration, recipe: Recipe, donors: Donors, options: MergeOptions) -> RefitPlan:
    """Settle a normalised configuration (modules with slices).

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """
    readers = _readers(config)
    weights = {model: _value("weight", reader, model, 1.0) for model, reader in readers.items()}
    total = sum(weights.values())
    if min(weights.values()) < 0 or total <= 0:
        remedy = "none may be negative, and one must be above 0"
        raise RecipeError("weights are shares of the models among the answers", where="models", remedy=remedy)
    first = next(iter(readers.values()))
    defaults = {spec.name: spec.default for spec in recipe.delegate.spec.parameters if spec.name != "weight"}
    parameters = {name: _value(name, first, None, default) for name, default in defaults.items()}
    recipe.delegate.check(parameters)
    teachers = []
    for model, reader in readers.items():
        if weights[model] > 0:
            data = recipe.of_model("data", reader, model) or _usual(donors, model)
            samples = recipe.of_model("samples", reader, model)
            teachers.append(Teacher(model, weights[model] / total, data, samples))
            donors.run.used(f"refit to {model}", str(data), int(samples))
    seed, pooled = options.random_seed or 0, _pooled(recipe, teachers)
    read = _read_once if pooled else _read_each
    start, spill = recipe.value("start"), recipe.value("spill")
    if start not in ("average", "anchor") and not any(t.model != recipe.base for t in teachers):
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(
            f"'start: {start}' merges task vectors, but there are none", where="parameters", remedy=remedy
        )
    return RefitPlan(
        read(teachers, donors, seed),
        pooled,
        parameters["ridge"],
        start,
        parameters["lambda"],
        spill,
        seed,
    )


def _readers(config: MergeConfiguration) -> dict[ModelReference, ConfigReader]:
    """The lookup of each model's parameters."""
    readers: dict[ModelReference, ConfigReader] = {}
    for module in (config.modules or {}).values():
        for piece in module.slices or []:
            reader = ConfigReader(config=config, t=0, module=module, slice_out=piece)
            for source in piece.sources:
                readers.setdefault(source.model, reader)
    return readers


def _value(name: str, reader: ConfigReader, model: ModelReference | None, default: float) -> float:
    """A parameter of the delegate for a whole model."""
    value = next((s[name] for s in reader.parameter_sources(model) if s and name in s), default)
    if isinstance(value, int | float):
        return float(value)
    raise RecipeError(
        f"parameter '{name}' takes no lists or filters with delegate refit",
        where=str(model or "parameters"),
        remedy="give one number",
    )


def _usual(donors: Donors, model: ModelReference) -> str:
    """Default source of samples: one that needs no data."""
    kind = empty_model(donors.models[model].transformers_config)
    if writes_text(kind):
        return SELF
    if kind.main_input_name == "pixel_values" and not hasattr(kind.config, "text_config"):
        return SYNTHETIC
    raise RecipeError(
        f"delegate refit needs samples, {type(kind).__name__} cannot make its own",
        where=str(model),
        remedy="add 'data: FILE' under its parameters",
    )


def _pooled(recipe: Recipe, teachers: Sequence[Teacher]) -> bool:
    """Whether all models share one pool of samples, by the recipe or because all have the same ones."""
    targets = recipe.value("targets")
    same = len({teacher.data for teacher in teachers}) == 1 and teachers[0].data != SELF and len(teachers) > 1
    if same and targets == "own":
        raise RecipeError(
            f"'targets: own' needs different samples for each model, all have '{teachers[0].data}'",
            where="parameters",
            remedy="write 'data' under each model, or 'targets: mean'",
        )
    return same if targets is None else bool(targets == "mean")


def _read_each(teachers: Sequence[Teacher], donors: Donors, seed: int) -> list[Teacher]:
    return [_read(teacher, donors, seed + number) for number, teacher in enumerate(teachers)]


def _read_once(teachers: Sequence[Teacher], donors: Donors, seed: int) -> list[Teacher]:
    """The same, samples that several models name read once."""
    result: list[Teacher] = []
    for number, teacher in enumerate(teachers):
        known = teacher.data != SELF and any(earlier.data == teacher.data for earlier in result)
        result.append(replace(teacher, batches=[]) if known else _read(teacher, donors, seed + number))
    return result


def _read(teacher: Teacher, donors: Donors, seed: int) -> Teacher:
    if (known := donors.models.samples.get(teacher.model)) is not None:
        return replace(teacher, batches=batched_by_length(unpadded(known, teacher.data), AT_ONCE * LENGTH))
    if teacher.data == SELF:
        return teacher
    path = local_path(donors.models[teacher.model].reference.model.path)
    kind = empty_model(donors.models[teacher.model].transformers_config)
    beyond = 0 if teacher.data == SYNTHETIC else max(HELD_OUT, teacher.samples // 3)
    samples = read_batches(teacher.data, path, kind, teacher.samples + beyond, AT_ONCE, LENGTH, seed)
    held_out = None
    if beyond and samples.examples >= 2 * HELD_OUT:
        count = min(teacher.samples, samples.examples - max(HELD_OUT, samples.examples // 4))
        samples, remaining = split_batches(samples, count)
        held_out = remaining if remaining.task in JUDGED else None
    batches = batched_by_length(unpadded(samples.batches, teacher.data), AT_ONCE * LENGTH)
    return replace(teacher, batches=batches, samples=samples.examples, held_out=held_out)
