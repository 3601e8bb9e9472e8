"""Delegate `refit` in a recipe: which models answer to which samples, and the refitted merge as a View."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration
from torch import Tensor

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.refit_models import ModelRefit
from rotation_merge.averaging.teachers import Teacher, read_teachers, shares_of, usual_source
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.donors import Donors, model_readers
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.mergekit_plugin.wholes import progress_bar
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import View


class RefittedModels:
    """A recipe's models in the coordinates of the merge, and the merge that is refitted to them.

    Samples are read at once, weights when the merge is asked for.

    Args:
        config: normalised (modules with slices).

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """

    def __init__(self, session: Session, config: MergeConfiguration, donors: Donors, parts: RecipeViews) -> None:
        self.session, self.donors = session, donors
        self.recipe, self.run = session.recipe, session.run
        self.views = {model: parts.view(model) for model in parts.models}  # one each: teachers are told by it
        readers = model_readers(config)
        first = next(iter(readers.values()))
        values: dict[str, Any] = {name: self.recipe.value(name) for name in ("targets", "start", "spill")}
        values["ridge"] = _number("ridge", first, None, RefitConfig.ridge)
        values["lambda_"] = _number("lambda", first, None, RefitConfig.lambda_)
        self.config = RefitConfig(**values, seed=session.options.random_seed or 0)
        try:
            self.teachers, self.pooled = read_teachers(self.base, self._teachers(readers), self.config)
        except RecipeError as error:
            raise RecipeError(error.what, where=error.where or "parameters", remedy=error.remedy) from None

    @property
    def base(self) -> View:
        """The anchor, in the coordinates of the merge."""
        return self.views[self.recipe.base]

    def _teachers(self, readers: Mapping[ModelReference, ConfigReader]) -> list[Teacher]:
        """The models that answer, with the names of their samples."""
        shares = shares_of([_number("weight", reader, model, 1.0) for model, reader in readers.items()])
        teachers = []
        for (model, reader), share in zip(readers.items(), shares, strict=True):
            if share > 0:
                original = self.session.models[model]
                source = self.recipe.of_model("data", reader, model) or usual_source(original)
                samples = self.recipe.of_model("samples", reader, model)
                teachers.append(Teacher(self.views[model], original, share, source, samples))
                self.run.used(f"refit to {model}", str(source), int(samples))
        return teachers

    def prepare(self) -> View:
        """Align the models, and refit the merge, which is returned."""
        self.donors.match_wholes()
        return self.merged

    @cached_property
    def merged(self) -> View:
        """The refitted merge, which is there until the run ends; the run has its record."""
        recipe, options = self.recipe, self.session.options
        with progress_bar("Refitting", options.quiet) as progress:
            result = ModelRefit(
                self.base,
                self.teachers,
                self.config,
                self.pooled,
                exclude=lambda name: any(part in name for part in recipe.exclude),
                own_heads=recipe.value("heads_of") == "each",
                dtype=recipe.dtype,
                device=str(options.device or "cpu"),
            ).run(progress)
        self.run.endings.append(result.close)
        self.run.heads.update(result.heads)
        for note in result.notes:
            self.run.note(note)
        return result.view

    def served(self, model: ModelReference) -> View:
        """The merge for mergekit, which reads it as the base; what is excluded is the anchor's."""
        view = self.views[model]
        if model != self.recipe.base:
            return view

        def read(name: str) -> Tensor:
            return view[name] if self.recipe.excluded(name) else self.merged[name]

        return replace(view, tensors=Tensors(view.shapes, view.dtypes, by_name(read)))


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
