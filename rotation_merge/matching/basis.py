"""The models that an alignment was made for: which they are, and what applying it needs of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import AlignmentError
from rotation_merge.model.checkpoint import stamps_of
from rotation_merge.model.labels import LabelRows
from rotation_merge.model.tensors import Tensors, checksum
from rotation_merge.model.view import View

IdentityFacts = tuple[str, str, dict[str, str]]
"""The name of a model; its fingerprint (see `View.fingerprint`); and dtype, shape and checksum of its tensors."""


class Identity:
    """The model that an alignment was made for; of a stored model its files are read when facts are asked for.

    Args:
        name: as the model was called.
        fingerprint: of config and weights; empty: any model.
        tensors: by name, dtype, shape and checksum of each.
        view: the stored model, where the others are still to be taken.
    """

    def __init__(
        self, name: str, fingerprint: str = "", tensors: Mapping[str, str] | None = None, view: View | None = None
    ) -> None:
        self.name, self._view = name, view
        self._stamps = None if view is None else stamps_of(view)
        if view is None:
            self.facts = name, fingerprint, dict(tensors or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, self.facts

    @cached_property
    def facts(self) -> IdentityFacts:
        """Name, fingerprint, and checksums of the tensors."""
        assert self._view is not None
        if stamps_of(self._view) != self._stamps:
            problem = "was changed after it was aligned"
            raise AlignmentError(problem, where=self.name, remedy="align it again")
        return self.name, self._view.fingerprint, dict(self._view.mark)

    @staticmethod
    def of(model: View) -> Identity:
        """A model's identity; one that is not as it is stored is read once."""
        if model.as_filed.is_stored:
            return Identity(model.name, view=model)
        return Identity(model.name, model.fingerprint, model.mark)

    def is_view(self, model: View) -> bool:
        """Whether a model is surely this one: what is stored in the same files, which have not changed."""
        return self._stamps is not None and model.is_stored and stamps_of(model) == self._stamps

    @property
    def fingerprint(self) -> str:
        return self.facts[1]

    @property
    def tensors(self) -> Mapping[str, str]:
        return self.facts[2]

    @property
    def any_model(self) -> bool:
        """Whether nothing is known of the model but its name."""
        return self._view is None and not self.tensors

    def verified(self, model: View, names: Mapping[str, str]) -> Tensors:
        """A model's tensors, each compared with its checksum here when it is read for the first time.

        Args:
            names: what the alignment calls tensors that have other names here.
        """
        seen: set[str] = set()

        def check(name: str, tensor: Tensor) -> Tensor:
            known = self.tensors.get(names.get(name, name))
            if known is not None and name not in seen and checksum(tensor) != known:
                raise AlignmentError(
                    f"tensor '{name}' is not that of {self.name}, which the alignment was made for",
                    where="the given model" if model.name == self.name else model.name,
                    remedy="give that model, or apply(..., strict=False) to move a fine-tune of it by the same maps",
                )
            seen.add(name)
            return tensor

        return model.tensors.map(check)


@dataclass(frozen=True)
class Basis:
    """Facts on both models, with which an alignment can be applied to either model alone.

    Attributes:
        config: the anchor's.
        shapes: of the anchor's tensors, by name.
        untie: whether heads that share an embedding's tensor are given one of their own.
        anchor, donor: which models they are.
        rows: what puts the donor's classes into the anchor's order (`model/labels.py`).
    """

    config: Mapping[str, Any] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    untie: bool
    anchor: Identity
    donor: Identity
    rows: LabelRows = field(default_factory=dict, repr=False)

    @cached_property
    def architecture(self) -> Architecture:
        return resolve(dict(self.config), list(self.shapes), self.anchor.name, keep_unknown=True, untie=self.untie)

    @cached_property
    def with_head(self) -> Architecture:
        """The architecture in which a tied head is a map of its own, as in statistics."""
        return resolve(dict(self.config), list(self.shapes), self.anchor.name, keep_unknown=True, untie=True)
