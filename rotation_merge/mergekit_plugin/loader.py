"""A View where mergekit expects a model's loader, under a reference that only one run knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.mergekit_plugin.definitions import read_as
from rotation_merge.model.view import View


class PlacedModel(ModelReference, frozen=True):  # type: ignore[call-arg]
    """A model as one run of one recipe sees it.

    mergekit's cache of loaders is one dictionary for the whole process. No other recipe has this reference, so all
    others read the untouched weights.

    Attributes:
        run: number of the run.
    """

    run: int

    @classmethod
    def of(cls, reference: ModelReference, run: int) -> PlacedModel:
        """A model's reference in a run."""
        return cls.model_construct(**dict(reference), run=run)

    @property
    def original(self) -> ModelReference:
        """The model's own reference."""
        return ModelReference.model_construct(**{name: getattr(self, name) for name in ModelReference.model_fields})

    def config(self, trust_remote_code: bool = False) -> Any:
        """Its config, which knows the reference (see `AlignedModule.layer_weights`)."""
        config = self.original.config(trust_remote_code)
        config.placed_model = self
        return config


class ViewLoader:
    """A view's tensors, as mergekit's `LazyTensorLoader` gives those of files.

    Args:
        own_names: by a tensor's name that by which recipes' filters know it, where that is another.
    """

    def __init__(self, view: View, own_names: Mapping[str, str] | None = None) -> None:
        stored_names = own_names or {}
        self.view = view
        self.names = {read_as(name, stored_names[name]) if name in stored_names else name: name for name in view}
        folder = view.name if view.files is None else view.files.folder
        self.index = SimpleNamespace(tensor_paths=dict.fromkeys(self.names, ""), base_path=folder)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        """A tensor on a device, as of `LazyTensorLoader`."""
        name = next((self.names[name] for name in (key, *(aliases or ())) if name in self.names), None)
        if name is None and raise_on_missing:
            raise KeyError(key)
        return None if name is None else self.view.tensors[name].to(device)

    def flush(self) -> None:
        """Do nothing: a view's files are closed by `folder.close_files`."""
