"""The state of one merge from its recipe to its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from pydantic import PrivateAttr

from rotation_merge.errors import RecipeError
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.opened import Models
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.heads import head_names


@dataclass
class Session:
    """A recipe, its models (opened once each) and the record of the merge.

    Attributes:
        run: record of the merge, kept if a report will be written.
        donors: as the planner settled them.
    """

    recipe: Recipe
    models: Models
    run: Run = field(default_factory=Run)
    donors: Donors | None = None

    @classmethod
    def of(cls, recipe: Recipe, options: MergeOptions, watched: bool = True) -> Session:
        run = Run(watched=watched, kept_transforms={} if recipe.value("save_alignment") else None)
        models = Models(options, recipe.unsupported, recipe.untie, served=True)
        run.endings.append(models.close)
        return cls(recipe, models, run)


def settle_heads(session: Session, models: Iterable[ModelReference]) -> None:
    """Find the tensors of heads that models keep (`heads_of: each`); the models must exist.

    Raises:
        RecipeError: the vocabulary changes, which the donors' configurations would not know.
    """
    recipe = session.recipe
    if recipe.value("heads_of") != "each":
        return
    if recipe.config.tokenizer or recipe.config.tokenizer_source:
        raise RecipeError(
            "'heads_of: each' writes donors' checkpoints, whose vocabularies 'tokenizer' would change",
            where="parameters",
            remedy="leave out one of the two",
        )
    for model in models:
        recipe.own_heads.update(head_names(session.models[model].architecture))


class SessionConfiguration(MergeConfiguration):
    """A configuration that takes its session along through mergekit's own functions."""

    _session: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, session: Session) -> SessionConfiguration:
        config = cls.model_construct(**dict(session.recipe.config))
        config._session = session
        return config


def session_of(config: MergeConfiguration) -> Session:
    """The session of a configuration.

    Raises:
        RecipeError: it has none: it did not come through mergekit's `run_merge`.
    """
    if isinstance(config, SessionConfiguration) and config._session is not None:
        session: Session = config._session
        return session
    raise RecipeError("a rotation_merge recipe is planned by mergekit's run_merge alone", remedy="call run_merge")
