"""The models of one recipe, opened once each, where mergekit looks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.matching.open_pair import as_donor
from rotation_merge.model.open import check_present, open_model
from rotation_merge.model.view import View


class Loader:
    """A view's tensors, as mergekit's `LazyTensorLoader` gives those of files.

    Args:
        wide: give floating tensors in float32 at least.
    """

    def __init__(self, view: View, wide: bool = False) -> None:
        self.view, self.wide = view, wide

    @property
    def index(self) -> Any:
        folder = self.view.name if self.view.files is None else self.view.files.folder
        return SimpleNamespace(tensor_paths=dict.fromkeys(self.view, ""), base_path=folder)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.view:
            key = next((alias for alias in aliases or () if alias in self.view), key)
        if key not in self.view:
            if raise_on_missing:
                raise KeyError(key)
            return None
        tensor = self.view.tensors[key]
        dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, dtype if self.wide else tensor.dtype)

    def flush(self) -> None:
        """Do nothing: a view's files are closed by `folder.close_files`."""


class Models:
    """The models of one recipe by reference, each opened once.

    Args:
        served: mergekit reads those that are stored, too, as it reads any model, until they are closed.

    Attributes:
        held: references of models in memory.
        statistics, samples: of models in memory, by reference.
    """

    def __init__(
        self, options: MergeOptions, unsupported: str = "error", untie: bool = False, served: bool = False
    ) -> None:
        self.options, self.unsupported, self.untie, self.served = options, unsupported, untie, served
        self.held: set[ModelReference] = set()
        self.statistics: dict[ModelReference, Any] = {}
        self.samples: dict[ModelReference, list[dict[str, Tensor]]] = {}
        self._opened: dict[ModelReference, View] = {}
        LoaderCache().setup(options=options)

    def __getitem__(self, reference: ModelReference) -> View:
        if reference not in self._opened:
            self[reference] = open_model(
                reference, untie=self.untie, unsupported=self.unsupported, options=self.options, any_base=True
            )
        return self._opened[reference]

    def __contains__(self, reference: object) -> bool:
        return reference in self._opened

    def __setitem__(self, reference: ModelReference, view: View) -> None:
        self._opened[reference] = view
        if self.served and reference not in self.held:
            LoaderCache.loaders[reference] = Loader(view.as_filed)

    def hold(self, view: View) -> ModelReference:
        """Add a model in memory; returns its reference."""
        reference = view.reference
        self.held.add(reference)
        self[reference] = view
        return reference

    def together(self, anchor: ModelReference, donors: Iterable[ModelReference]) -> None:
        """Open an anchor and its donors, and check that these have its architecture and sizes.

        Raises:
            CheckpointError, ArchitectureError: name the model and what differs.
        """
        references = [anchor, *(reference for reference in donors if reference != anchor)]
        for reference in references:
            if reference not in self:
                check_present(reference, self.options)
        for reference in references:
            self[reference]
        for reference in references[1:]:
            donor = as_donor(self[anchor], self[reference])
            if donor is not self[reference]:
                self[reference] = donor

    def close(self) -> None:
        """Take the models out of mergekit's cache."""
        for reference in self._opened:
            LoaderCache.loaders.pop(reference, None)
