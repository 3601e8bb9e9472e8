"""How bases of unlike shapes are brought together: whether sizes may differ, and which layers meet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from rotation_merge.carrying.frame import DEPTH
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.matching.check_pair import Layers
from rotation_merge.model.checkpoint import Model

AUTO = "auto"
_ENTRY = re.compile(r"(?:(?P<module>\w+)=)?(?P<old>\d+)(?:-(?P<old_end>\d+))?:(?P<new>\d+)(?:-(?P<new_end>\d+))?")


@dataclass(frozen=True)
class Unlike:
    """What may differ between two bases.

    Attributes:
        widths: their sizes.
        layers: which layer of the old base meets which of the new one, `0:0,1-3:2-4`, before it the module's name
            where there are several (`encoder=0:0,1:2,decoder=0:0`); or `auto`, by similarity. Empty: each meets the
            one at its own place, and both have as many.
    """

    widths: bool = False
    layers: str = ""

    @property
    def asked(self) -> bool:
        return self.widths or bool(self.layers)

    def met(self, new: Model, old: Model) -> Layers:
        """By module, which layer of the new base meets which of the old one; of `auto`, layers at like heights.

        Raises:
            RotationMergeError: the bases are of unlike depth and nothing is said of it; or layers are named that are
                not there, twice, or out of order.
        """
        counts = {
            module: tuple(len(model.architecture.layers(module)) for model in (new, old))
            for module in new.architecture.layers_key
        }
        if self.layers and self.layers != AUTO:
            return given(self.layers, counts)
        if not self.layers and (unlike := [m for m, (ours, theirs) in counts.items() if ours != theirs]):
            ours, theirs = counts[unlike[0]]
            what = f"has {theirs} layers, {new.reference} has {ours}"
            raise CheckpointError(what, where=str(old.reference), remedy=DEPTH)
        return {module: spread(*pair) for module, pair in counts.items()}


def spread(new: int, old: int) -> list[tuple[int, int]]:
    """As many layers as the shallower of the two has, evenly spread over the deeper one."""
    count = min(new, old)
    if count < 2:
        return [(0, 0)][:count]
    steps = [[round(i * (depth - 1) / (count - 1)) for i in range(count)] for depth in (new, old)]
    return list(zip(*steps, strict=True))


def given(text: str, counts: dict[str, tuple[int, ...]]) -> dict[str, list[tuple[int, int]]]:
    """The layers that meet, as a user writes them.

    Args:
        counts: by module, how many layers the new base and the old one have.

    Raises:
        RecipeError: it cannot be read, or does not fit these bases.
    """
    wrong = RecipeError(f"layers_map is '{text}'", remedy="write OLD:NEW or ranges, such as 0-3:0-3,4:6, or auto")
    found: dict[str, list[tuple[int, int]]] = {module: [] for module in counts}
    module = next(iter(counts))
    for entry in re.split(r"[,;\s]+", text.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise wrong
        module = match["module"] or module
        if module not in counts:
            raise RecipeError(f"layers_map names '{module}'", remedy=f"the modules are: {', '.join(counts)}")
        old, new = (range(int(match[k]), int(match[f"{k}_end"] or match[k]) + 1) for k in ("old", "new"))
        if len(old) != len(new) or not old:
            raise wrong
        found[module] += zip(new, old, strict=True)
    for module, pairs in found.items():
        for which, base in ((0, "new"), (1, "old")):
            numbers = [pair[which] for pair in pairs]
            if numbers and max(numbers) >= counts[module][which]:
                what = f"layers_map names layer {max(numbers)} of the {base} base, which has {counts[module][which]}"
                raise RecipeError(what, remedy="layers are counted from 0")
            if any(a >= b for a, b in pairwise(numbers)):
                raise RecipeError(
                    f"layers_map is '{text}': layers of the {base} base stand there twice, or out of order",
                    remedy="name each layer once, from below upwards",
                )
    return found
