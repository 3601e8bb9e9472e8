"""A View where mergekit expects a model's loader, under a reference that only one run knows."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from mergekit.common import ModelReference
from torch import Tensor

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
        return cls.model_construct(
            model=reference.model,
            lora=reference.lora,
            override_architecture=reference.override_architecture,
            run=run,
        )

    @property
    def original(self) -> ModelReference:
        """The model's own reference."""
        return ModelReference.model_construct(
            model=self.model, lora=self.lora, override_architecture=self.override_architecture
        )

    def config(self, trust_remote_code: bool = False) -> Any:
        """Its config, which knows the reference (see `OutputModule.layer_weights`)."""
        config = self.original.config(trust_remote_code)
        config.placed_model = self
        return config


class ViewLoader:
    """A view's tensors, as mergekit's `LazyTensorLoader` gives those of files."""

    def __init__(self, view: View) -> None:
        self.view = view
        folder = view.name if view.files is None else view.files.folder
        self.index = SimpleNamespace(tensor_paths=dict.fromkeys(view, ""), base_path=folder)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        name = next((name for name in (key, *(aliases or ())) if name in self.view), None)
        if name is None and raise_on_missing:
            raise KeyError(key)
        return None if name is None else self.view.tensors[name].to(device)

    def flush(self) -> None:
        """Do nothing: a view's files are closed by `folder.close_files`."""
