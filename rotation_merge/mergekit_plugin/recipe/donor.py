"""One donor of a recipe, for commands that look at anchor and donor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rotation_merge.matching.options import WEIGHTS, AlignConfig

if TYPE_CHECKING:
    from mergekit.common import ModelReference
    from mergekit.config import MergeConfiguration


def title(model: object, origin: object | None) -> str:
    """The donor's name in reports."""
    return str(model) if origin is None else f"{model} (carried over from {origin})"


def entries(config: MergeConfiguration) -> Iterator[tuple[ModelReference, Mapping[str, Any]]]:
    """Every model that a recipe merges, with its parameters."""
    for part in (config, *(config.modules or {}).values()):
        sources = (source for piece in part.slices or [] for source in piece.sources)
        for entry in (*(part.models or []), *sources):
            yield entry.model, entry.parameters or {}


def carried_donors(config: MergeConfiguration) -> set[ModelReference]:
    """Models whose task vector is carried over, into the anchor's vocabulary."""
    return {model for model, settings in entries(config) if settings.get("finetuned_from") not in (None, "none")}


@dataclass(frozen=True)
class RecipeDonor:
    """One donor of a recipe.

    Attributes:
        options: of matching; they may differ from block to block.
        origin: the model it was fine-tuned from, if its task vector is carried over; that one is matched then.
        file: of an alignment, which is applied instead of matching.
        excluded: says of a tensor that it is copied from the anchor, or kept by each model.
        words: whether tokens at other ids stay where they are.
        unsupported: `error` refuses unknown tensors, `merge` keeps them.
        own: names of tensors that every model keeps of its own (`heads_of: each`).
        match_on: weights, activations or both; with samples from `data` (empty: not named), so many.
    """

    anchor: str
    name: str
    options: AlignConfig
    untie: bool = False
    origin: str | None = None
    file: str | None = None
    excluded: Callable[[str], bool] = lambda _: False
    words: bool = True
    unsupported: str = "error"
    match_on: str = WEIGHTS
    data: str = ""
    samples: int = 64
    own: tuple[str, ...] = ()

    @property
    def matched(self) -> str:
        """The model that is matched to the anchor."""
        return self.origin or self.name

    @property
    def title(self) -> str:
        return title(self.name, self.origin)
