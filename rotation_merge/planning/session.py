"""One merge from its recipe to its report: what is made once and handed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from pydantic import PrivateAttr

from rotation_merge.checkpoints.models import Models
from rotation_merge.planning.donors import Donors
from rotation_merge.recipe.reading import Recipe
from rotation_merge.report.run import Run


@dataclass
class Session:
    """A recipe, its models (opened once each) and what is done with them.

    Attributes:
        run: what the merge did; watched where somebody will read it.
        donors: as the planner settled them.
    """

    recipe: Recipe
    models: Models
    run: Run = field(default_factory=Run)
    donors: Donors | None = None

    @classmethod
    def of(cls, recipe: Recipe, options: MergeOptions, watched: bool = True) -> Session:
        run = Run(watched=watched, kept={} if recipe.value("save_alignment") else None)
        return cls(recipe, Models(options, recipe.unsupported, recipe.untie), run)


class SessionConfiguration(MergeConfiguration):
    """A configuration that takes its session along through mergekit's own functions."""

    _session: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, session: Session) -> SessionConfiguration:
        config = cls.model_construct(**dict(session.recipe.config))
        config._session = session
        return config


def session_of(config: MergeConfiguration, options: MergeOptions) -> Session:
    """The session of a configuration; a new one, whose report nobody reads, where mergekit plans by itself (as
    mergekit-evolve does).

    Raises:
        RecipeError: the recipe is at fault.
    """
    if isinstance(config, SessionConfiguration) and config._session is not None:
        found: Session = config._session
        return found
    return Session.of(Recipe.read(config), options, watched=False)
