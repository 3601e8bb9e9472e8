"""Delegate `refit` in a recipe: which models answer to which samples, and the refitted merge as a View."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.refit_models import refitted
from rotation_merge.averaging.teachers import Teacher, read_teachers, shares_of, usual_source
from rotation_merge.errors import RecipeError
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.mergekit_plugin.wholes import progress_bar
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import View
from rotation_merge.workers import Progress


class RefittedParts:
    """The parts of a recipe's models in the coordinates of the merge, and the merge that is refitted to them.

    Args:
        config: normalised (modules with slices).
    """

    def __init__(self, session: Session, config: MergeConfiguration, donors: Donors, parts: RecipeViews) -> None:
        self.session, self.donors, self.parts = session, donors, parts
        self.base = session.recipe.base
        views = {model: parts.view(model) for model in parts.models}
        originals = {model: session.models[model] for model in parts.models}
        self.planned = recipe_teachers(config, session.recipe, views, originals, session.options, session.run)

    def prepare(self) -> View:
        """Align the models, and refit the merge, which is returned."""
        self.donors.match_wholes()
        return self.merged

    @cached_property
    def merged(self) -> View:
        options, run = self.session.options, self.session.run
        with progress_bar("Refitting", options.quiet) as progress:
            return self.planned.refit(options, run, progress)

    def served(self, model: ModelReference) -> View:
        """The merge for mergekit, which reads it as the base; what is excluded is the anchor's."""
        view = self.parts.view(model)
        if model != self.base:
            return view
        excluded = self.session.recipe.excluded

        def read(name: str) -> Tensor:
            return view[name] if excluded(name) else self.merged[name]

        return replace(view, tensors=Tensors(view.shapes, view.dtypes, by_name(read)))


@dataclass(frozen=True)
class RecipeRefit:
    """The refit that a recipe asks for, its samples read and no weight yet; see `averaging.refit_models`.

    Attributes:
        base: in the coordinates of the merge.
    """

    recipe: Recipe
    base: View
    config: RefitConfig
    teachers: list[Teacher] = field(repr=False)
    pooled: bool

    def refit(self, options: MergeOptions, run: Run, progress: Progress) -> View:
        """Run the refit, and record it; the merge that it gives is there until the run ends."""
        result = refitted(
            self.base,
            self.teachers,
            self.config,
            pooled=self.pooled,
            exclude=lambda name: any(part in name for part in self.recipe.exclude),
            own_heads=self.recipe.value("heads_of") == "each",
            dtype=self.recipe.dtype,
            device=str(options.device or "cpu"),
            progress=progress,
        )
        run.endings.append(result.close)
        run.heads.update(result.heads)
        for note in result.notes:
            run.note(note)
        return result.view


def recipe_teachers(
    config: MergeConfiguration,
    recipe: Recipe,
    views: Mapping[ModelReference, View],
    originals: Mapping[ModelReference, View],
    options: MergeOptions,
    run: Run,
) -> RecipeRefit:
    """The models that answer, and their samples.

    Args:
        config: normalised (modules with slices).
        views: the models in the base's coordinates, each the same view whenever it is asked for.
        originals: the models as they are.

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """
    readers = _readers(config)
    shares = shares_of([_number("weight", reader, model, 1.0) for model, reader in readers.items()])
    teachers = []
    for (model, reader), share in zip(readers.items(), shares, strict=True):
        if share > 0:
            source = recipe.of_model("data", reader, model) or usual_source(originals[model])
            samples = recipe.of_model("samples", reader, model)
            teachers.append(Teacher(views[model], originals[model], share, source, samples))
            run.used(f"refit to {model}", str(source), int(samples))
    first = next(iter(readers.values()))
    values: dict[str, Any] = {name: recipe.value(name) for name in ("targets", "start", "spill")}
    values["ridge"] = _number("ridge", first, None, RefitConfig.ridge)
    values["lambda_"] = _number("lambda", first, None, RefitConfig.lambda_)
    chosen, base = RefitConfig(**values, seed=options.random_seed or 0), views[recipe.base]
    try:
        return RecipeRefit(recipe, base, chosen, *read_teachers(base, teachers, chosen))
    except RecipeError as error:
        raise RecipeError(error.what, where=error.where or "parameters", remedy=error.remedy) from None


def _readers(config: MergeConfiguration) -> dict[ModelReference, ConfigReader]:
    """The lookup of each model's parameters."""
    readers: dict[ModelReference, ConfigReader] = {}
    for module in (config.modules or {}).values():
        for piece in module.slices or []:
            reader = ConfigReader(config=config, t=0, module=module, slice_out=piece)
            for source in piece.sources:
                readers.setdefault(source.model, reader)
    return readers


def _number(name: str, reader: ConfigReader, model: ModelReference | None, default: float) -> float:
    """A parameter of the delegate for a whole model."""
    value = next((scope[name] for scope in reader.parameter_sources(model) if scope and name in scope), default)
    if isinstance(value, int | float):
        return float(value)
    raise RecipeError(
        f"parameter '{name}' takes no lists or filters with delegate refit",
        where=str(model or "parameters"),
        remedy="give one number",
    )
