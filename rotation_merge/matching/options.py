"""What to match, as the recipe says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.groups.admitted import Wanted
from rotation_merge.groups.stream import STREAM_GROUPS

if TYPE_CHECKING:
    from rotation_merge.architectures.model import Architecture, Block

CHOICES: dict[str, tuple[Any, ...]] = {
    "attention": ("rotation", "none", "permutation", "invertible"),
    "heads": ("none", "permutation", "spectral"),
    "ffn": ("permutation", "none"),
    "rescale": (True, False, "sequential"),
    "residual": (*STREAM_GROUPS, "largest"),
}
"""Values each option may take, the default first."""


def by_stream(text: object) -> dict[str, str] | None:
    """Residual groups by stream, as `decoder=rotation,encoder=permutation` says; None where the text does not."""
    pairs = [piece.partition("=") for piece in text.split(",")] if isinstance(text, str) and "=" in text else []
    found = {stream.strip(): group.strip() for stream, _, group in pairs}
    return found if found and all(found) and set(found.values()) <= set(CHOICES["residual"]) else None


@dataclass(frozen=True)
class MatchOptions(Wanted):
    """Which groups matching may use (`Wanted`), and where.

    Attributes:
        layers: which layers to match: `all`, or ranges such as "0-5,11".
    """

    layers: str = "all"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            named = name == "residual" and by_stream(value) is not None
            if not named and not any(value == choice and type(value) is type(choice) for choice in choices):
                words = ", ".join(str(choice).lower() for choice in choices)
                raise RecipeError(
                    f"parameter '{name}' is {value!r}",
                    remedy=nearest(str(value), [str(choice).lower() for choice in choices])
                    if isinstance(value, str) and "did you" in nearest(value, map(str, choices))
                    else f"it must be one of: {words}",
                )
        self.layer_set()

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> MatchOptions:
        """Build from a mapping; unknown names are errors."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise RecipeError(f"there is no option '{name}'", remedy=nearest(name, known))
        return cls(**values)

    def layer_set(self) -> frozenset[int] | None:
        """Layers to match, or None for all.

        Raises:
            RecipeError: the ranges cannot be read.
        """
        text = str(self.layers).strip()
        if text == "all":
            return None
        result: set[int] = set()
        for piece in text.split(","):
            first, dash, last = piece.strip().partition("-")
            if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
                raise RecipeError(
                    f"parameter 'layers' is {self.layers!r}", remedy="write 'all', or ranges such as '0-5,11'"
                )
            result.update(range(int(first), int(last or first) + 1))
        return frozenset(result)

    def matches_layer(self, index: int | None) -> bool:
        """Whether the block of this layer number (None: outside the layers) is to be matched."""
        layers = self.layer_set()
        return layers is None or (index is not None and index in layers)

    def at(self, architecture: Architecture, block: Block) -> MatchOptions:
        """The options of one block."""
        return self

    def with_residual(self, residual: str) -> MatchOptions:
        """The same with another residual group (or groups by stream)."""
        return replace(self, residual=residual)


NOTHING = MatchOptions(attention="none", heads="none", ffn="none", rescale=False)
"""Match no space at all."""


class VaryingOptions(MatchOptions):
    """Options that differ from block to block; its own fields are those of the whole model."""

    def __init__(self, whole: MatchOptions, of: Callable[[str, float], MatchOptions]) -> None:
        """
        Args:
            of: options by a block's module path and its place among the layers, from 0 to 1.
        """
        super().__init__(**asdict(whole))
        object.__setattr__(self, "_of", of)

    def with_residual(self, residual: str) -> MatchOptions:
        whole = MatchOptions(**{**asdict(self), "residual": residual})
        return VaryingOptions(whole, self._of)  # type: ignore[attr-defined]

    def at(self, architecture: Architecture, block: Block) -> MatchOptions:
        last = len(architecture.layers(block.module)) - 1 if block.index is not None else 0
        place = 0.0 if block.index is None else block.index / last if last else 1.0
        found: MatchOptions = self._of(block.name, place)  # type: ignore[attr-defined]
        return found
