"""Loss on the straight paths from an anchor to its donors, as they are and aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rotation_merge.diagnose.donors import RecipeDonor, carried_recipe
from rotation_merge.errors import RecipeError
from rotation_merge.matching.aligned_output import aligned_view, loaded, match_pair, read_alignment
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.mergekit_plugin.run import moved_states
from rotation_merge.model.heads import head_names
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import Barrier, BarrierConfig, Curve, path
from rotation_merge.run.functions import architecture_of, in_memory, load
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.sources import writes_text
from rotation_merge.workers import listener

PLAIN, ALIGNED = "plain", "aligned"
"""The curve between the models as they are, and that between them as the recipe or the options align them."""


@dataclass(frozen=True)
class Paths:
    """The paths from an anchor to each of its donors, with the options of measuring them.

    Models may keep heads of their own, of any size: then each of the data is one model's, and is measured on the paths
    from and to that model, under its head and config, as a merged body is that stands under several heads.

    Attributes:
        recipe_path: the recipe, where donors come from one.
        sources: of data; where models keep their heads, one for each model, the anchor's first.
        ledger: store of intermediate results, to resume from.
    """

    recipe_path: str
    donors: Sequence[RecipeDonor]
    sources: Sequence[str]
    config: BarrierConfig
    ledger: Ledger = NOWHERE

    @property
    def names(self) -> list[str]:
        """Of the models, the anchor first."""
        return [self.donors[0].anchor, *(donor.name for donor in self.donors)]

    @property
    def own_heads(self) -> tuple[str, ...]:
        """Names of the head tensors that every model keeps."""
        return self.donors[0].own_heads

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Numbers of the donor and of the data of everything that is measured."""
        pairs = ((donor, number) for donor in range(len(self.donors)) for number in range(len(self.sources)))
        return [(donor, number) for donor, number in pairs if not self.own_heads or number in (0, donor + 1)]

    def barriers(self) -> list[Barrier]:
        """The path to every donor on each of the data, plain and aligned.

        Raises:
            RotationMergeError: models do not fit together.
        """
        self._check()
        anchor = load(self.names[0])
        data = self._data(anchor)
        source = SELF if writes_text(anchor) else self.sources[0]  # to match on, where none is named
        donors = [donor if donor.data else replace(donor, data=source) for donor in self.donors]
        curves: dict[tuple[int, int], list[Curve]] = {pair: [] for pair in self.measured}
        for name in (PLAIN, ALIGNED):
            ledger = self.ledger.under(name)
            ends = [self._ends(anchor, d, name == ALIGNED, ledger.under(str(i))) for i, d in enumerate(donors)]
            for donor, number in self.measured:
                head: Any = ends[donor][min(number, 1)] if self.own_heads else None
                heads = head_names(architecture_of(head)) if self.own_heads else set()
                place, more = ledger.under(f"path-{donor}/{number}"), (head, heads)
                curve = path(*ends[donor], data[number], self.config.points, name, listener(), place, *more)
                curves[donor, number].append(curve)
        return [self._barrier(donor, number, data[number], curves[donor, number]) for donor, number in self.measured]

    def _ends(self, anchor: Any, donor: RecipeDonor, aligned: bool, ledger: Ledger) -> tuple[Any, Any]:
        """Anchor and donor in memory, as they are or aligned; the anchor's norms folded where the donor's are."""
        if donor.origin is not None:
            return self._carried(donor, aligned)
        if not aligned:
            return anchor, load(donor.name, like=None if donor.own_heads else donor.anchor)
        pair = _opened(donor)
        if donor.file is None:
            bodies = replace(pair, architecture=pair.architecture.without(donor.own_heads))
            match = matcher(donor.match_on, donor.anchor, donor.name, samples=donor.data, count=donor.samples)
            alignment = match_pair(bodies, listener(), match, ledger)
        else:
            alignment = read_alignment(pair, donor.file)
        if alignment.folded:
            anchor = loaded(pair.anchor, alignment.apply_anchor(pair.anchor_view, strict=False))
        return anchor, loaded(pair.donor, aligned_view(pair, alignment))

    def _carried(self, donor: RecipeDonor, aligned: bool) -> tuple[Any, Any]:
        """The anchor, and the anchor with the donor's task vector added, carried or unchanged."""
        states = moved_states(carried_recipe(self.recipe_path, donor, aligned))
        view = open_model(donor.anchor, untie=donor.untie)
        anchor, tuned = (in_memory(replace(view, tensors=as_tensors(state))) for state in states)
        return anchor, tuned

    def _data(self, anchor: Any) -> list[Data]:
        """Each data source, as the model with its head reads it."""
        limits = {name: getattr(self.config, name) for name in ("limit", "batch_size", "length")}
        if not self.own_heads:
            return [read_samples(self.names[0], source, module=anchor, **limits) for source in self.sources]
        return [read_samples(name, data, **limits) for data, name in zip(self.sources, self.names, strict=True)]

    def _check(self) -> None:
        """Refuse models that do not fit, from headers.

        Raises:
            RotationMergeError: names the model or the option.
        """
        carried = [donor for donor in self.donors if donor.origin is not None]
        if self.own_heads and len(self.sources) != len(self.names):
            problem = f"{len(self.names)} models keep heads of their own, data are given {len(self.sources)} times"
            raise RecipeError(problem, where="--data", remedy="give it once for each model, in their order")
        if self.own_heads and carried:
            problem = "a task vector has no output head, so it cannot be measured with 'heads_of: each'"
            raise RecipeError(problem, where=self.recipe_path, remedy="leave out 'heads_of', or 'finetuned_from'")
        for donor in self.donors:
            if donor.origin is None:
                _opened(donor)

    def _barrier(self, donor: int, number: int, data: Data, curves: list[Curve]) -> Barrier:
        titles = [self.names[0], *(each.title for each in self.donors)]
        facts = self.sources[number], data.task, data.examples, asdict(self.donors[donor].options), curves
        return Barrier(titles[0], titles[donor + 1], *facts, titles[number] if self.own_heads else "")


def _opened(donor: RecipeDonor) -> Pair:
    """Anchor and donor, checked to fit together under the donor's options, or under its file.

    Raises:
        RotationMergeError: they do not.
    """
    options, own_heads = donor.options if donor.file is None else NOTHING, donor.own_heads
    more: dict[str, Any] = {"unsupported": donor.unsupported, "excluded": lambda name: name in own_heads}
    return open_pair(donor.anchor, donor.name, options, donor.untie, **more)
