"""Options that admit groups, by their names; commands read them before torch is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic.dataclasses import dataclass

from rotation_merge.config import BLOCK, WHOLE, Config, Kind, option

STREAMS = ("none", "permutation", "signed_permutation", "rotation")
"""Names of the residual groups, smallest first."""

RESIDUAL = (*STREAMS, "largest")
"""Options for a residual stream."""


def by_stream(text: Any) -> dict[str, str] | None:
    """Parse residual groups by stream, `decoder=rotation,encoder=permutation`; None for other texts."""
    pairs = [piece.partition("=") for piece in text.split(",")] if isinstance(text, str) and "=" in text else []
    by_stream = {stream.strip(): group.strip() for stream, _, group in pairs}
    return by_stream if by_stream and all(by_stream) and set(by_stream.values()) <= set(RESIDUAL) else None


Residual = Literal[RESIDUAL]  # type: ignore[valid-type]
Streams = Annotated[str, Predicate(by_stream), Kind("groups by stream (decoder=rotation,encoder=permutation)")]


@dataclass(frozen=True)
class GroupOptions(Config):
    """Options that admit groups, by the names and values of recipes and of the command line."""

    attention: Literal["rotation", "none", "permutation"] = option(
        "rotation",
        "maps inside attention heads. `permutation`: orders of coordinates; `rotation`: the largest compact group that "
        "the layer admits",
        scope=BLOCK,
    )
    heads: Literal["none", "permutation", "spectral"] = option(
        "none",
        "order of the attention heads. `permutation`: the best order together with the maps inside heads; `spectral`: "
        "by singular values, as TransFusion does, for comparison",
        scope=BLOCK,
    )
    ffn: Literal["permutation", "none"] = option(
        "permutation", "order of the FFN neurons and of the experts", scope=BLOCK
    )
    scaling: Literal[True, False, "sequential"] = option(
        True,
        "scaling of heads and neurons, with a sign where the layer admits it. `sequential`: after the rotation, as "
        "in the ICML 2025 paper, instead of jointly",
        scope=BLOCK,
    )
    residual: Residual | Streams = option(
        "none",
        "group of the residual stream, one map for the whole model; or one group for each stream, as "
        "`decoder=rotation,encoder=permutation`",
        scope=WHOLE,
    )
    shift_head: Literal[False, True] = option(
        False,
        "shift all rows of an untied output head by one vector; this changes logits, but no probabilities",
        scope=BLOCK,
    )
