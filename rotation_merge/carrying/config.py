"""Options of a transfer: the source of its recipe keys, command options and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic.dataclasses import dataclass

from rotation_merge.config import DONOR_ONLY, EACH, Config, Count, Length, option
from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchOn

Method = Literal["weights", "refit", "distil"]
SAMPLES, TRAINING_SAMPLES = 64, 512
"""Numbers of samples, if none is given: to solve or to judge, and to train."""

PLAIN, MERGED, NONE = "plain addition", "wudi", "none"
"""Alternatives to a method that samples may prefer: plain addition, a merge of the new base and the fine-tune as two
fine-tunes of the old base, and the unchanged new base."""

REFITTED = "The new base's linear maps were solved layer by layer to reproduce the change on samples."
HOW = {
    "weights": "Nothing was trained: the change was moved by the alignment of the old base with the new one, which is "
    "exact if the new base is the old one in other coordinates.",
    "refit": REFITTED,
    "distil": f"{REFITTED} From there on it was **trained** for a few steps.",
    MERGED: "The new base and the fine-tune were merged by `wudi` as two fine-tunes of the old base: this had the "
    "lowest loss on samples.",
    PLAIN: "The change was added to the new base without alignment: this had the lowest loss on samples.",
    NONE: "Nothing was carried: the new base alone had the lowest loss on samples.",
}
"""The method in words, for a card."""


@dataclass(frozen=True)
class TransferConfig(Config):
    """Options of a transfer between two bases.

    Attributes:
        match: which groups the bases are matched by; the largest of the residual stream, if not given.
        alignment: a file of maps, or an `Alignment`; nothing is matched then.
        untie: whether a head that shares the embedding's tensor is given one of its own.
    """

    method: Method = option(
        "weights",
        "how the change is carried. `weights`: moved by the alignment; `refit`: the new base's linear maps are solved "
        "for it; `distil`: trained further from `refit`",
        key="carry",
        scope=DONOR_ONLY,
    )
    scale: float | Literal["auto"] | None = option(
        None,
        "factor of the change. `auto`: chosen on held-out samples. Not given: 1 with `carry: weights`, `auto` with the "
        "others",
        recipe_key="carry_scale",
        scope=DONOR_ONLY,
    )
    steps: Count = option(50, "training steps of `carry: distil`", scope=DONOR_ONLY)
    data: str = option("self", "samples: a file, or `self`, text that the fine-tune writes")
    samples: Count | None = option(
        None, f"number of samples. Not given: {SAMPLES}, or {TRAINING_SAMPLES} with `carry: distil`"
    )
    length: Length = option(128, "tokens in a sample", command=False)
    seed: int = option(0, "seed of all random numbers")
    rank: Annotated[int, Ge(0)] = option(
        0, "write a fine-tune's change as an adapter of this rank; `0`: as a model", key="lora"
    )
    match_on: MatchOn | None = option(
        None,
        "what chooses the maps: `weights`, `activations` of both models on `data`, or `both`. Both models need one "
        "vocabulary. Not given: `weights`",
        scope=EACH,
    )
    alignment: Any = None
    match: AlignConfig = field(default_factory=lambda: AlignConfig(residual="largest"))
    untie: bool = False

    @classmethod
    def of(cls, config: TransferConfig | None, options: Mapping[str, Any] = MappingProxyType({})) -> TransferConfig:
        """As of any config; options of matching (`AlignConfig`) beside an alignment are refused."""
        chosen = super().of(config, options)
        idle = next((name for name in options if name in AlignConfig.options()), None)
        if idle is not None and chosen.alignment is not None:
            problem = f"'{idle}' has no effect beside 'alignment', which gives the maps"
            raise RecipeError(problem, remedy="leave it out")
        return chosen

    def check_use(self) -> None:
        """Refuse options that have no effect.

        Raises:
            RecipeError: names the option.
        """
        if self.method != "distil" and self.steps != TransferConfig().steps:
            raise RecipeError(
                f"carrying by {self.method} takes no steps", remedy="carry by distil, or leave out 'steps'"
            )

    @property
    def factor(self) -> float | None:
        """Factor of the change; None: chosen on held-out samples."""
        if self.scale is None:
            return 1.0 if self.method == "weights" else None
        return None if isinstance(self.scale, str) else float(self.scale)

    @property
    def sample_count(self) -> int:
        """Number of samples."""
        return self.samples or (TRAINING_SAMPLES if self.method == "distil" else SAMPLES)

    @property
    def needs_samples(self) -> bool:
        """Whether models are run on samples for the change."""
        return self.method != "weights" or self.factor is None

    @property
    def matched_on(self) -> str:
        """The source of the maps: weights, activations or both."""
        return self.match_on or WEIGHTS

    def reading(self, batch_size: int) -> dict[str, Any]:
        """Keyword arguments for reading samples."""
        return {"limit": self.sample_count, "batch_size": batch_size, "length": self.length, "seed": self.seed}
