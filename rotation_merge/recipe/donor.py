"""One donor of a recipe, for commands that look at anchor and donor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rotation_merge.matching.options import MatchOptions


def title(model: object, origin: object | None) -> str:
    """What a report calls a donor."""
    return str(model) if origin is None else f"{model} (carried over from {origin})"


@dataclass(frozen=True)
class RecipeDonor:
    """One donor of a recipe.

    Attributes:
        options: of matching; they may differ from block to block.
        origin: the model it was fine-tuned from, if its task vector is carried over; that one is matched then.
        file: of an alignment, which is applied instead of matching.
        excluded: says of a tensor that it is copied from the anchor, or kept by each model.
        words: whether tokens at other ids stay where they are.
        unsupported: whether what is not known is refused (error) or taken along (merge).
    """

    anchor: str
    name: str
    options: MatchOptions
    untie: bool = False
    origin: str | None = None
    file: str | None = None
    excluded: Callable[[str], bool] = lambda _: False
    words: bool = True
    unsupported: str = "error"

    @property
    def matched(self) -> str:
        """The model that is matched to the anchor."""
        return self.origin or self.name

    @property
    def title(self) -> str:
        return title(self.name, self.origin)
