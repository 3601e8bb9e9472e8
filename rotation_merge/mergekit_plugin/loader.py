"""A View where mergekit expects a model's loader, under a reference that only one run knows."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from types import SimpleNamespace

from mergekit.common import ModelPath, ModelReference
from torch import Tensor
from transformers import PretrainedConfig

from rotation_merge.model.view import View

runs = itertools.count(1)
"""Numbers of the runs of this process."""


class StandIn(ModelReference, frozen=True):  # type: ignore[call-arg]
    """The folder of a model's files, of a GGUF the one that is made from it, under a reference of one run.

    mergekit's cache of loaders is one dictionary for the whole process, so all others read the untouched weights.

    Attributes:
        original: the model's own reference, with its adapter.
        run: number of the run.
        untie: whether its config says that the head is a tensor of its own.
    """

    original: ModelReference
    run: int = 0
    untie: bool = False

    @classmethod
    def of(cls, reference: ModelReference, folder: str, run: int = 0, untie: bool = False) -> StandIn:
        """A model's reference in a run."""
        facts = {"original": reference, "override_architecture": reference.override_architecture}
        return cls(model=ModelPath(path=folder), run=run, untie=untie, **facts)

    def config(self, trust_remote_code: bool = False) -> PretrainedConfig:
        """The model's config, which that of the merge is made from."""
        config = super().config(trust_remote_code)
        if self.untie:
            config.tie_word_embeddings = False
        return config

    def __str__(self) -> str:
        return str(self.original)


class ViewLoader:
    """A view's tensors, as mergekit's `LazyTensorLoader` gives those of files."""

    def __init__(self, view: View) -> None:
        self.view, folder = view, view.name if view.files is None else view.files.folder
        self.index = SimpleNamespace(tensor_paths=dict.fromkeys(view, ""), base_path=folder)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        """A tensor on a device, as of `LazyTensorLoader`."""
        name = next((name for name in (key, *(aliases or ())) if name in self.view), None)
        if name is None and raise_on_missing:
            raise KeyError(key)
        return None if name is None else self.view.tensors[name].to(device)

    def flush(self) -> None:
        """Do nothing: a view's files are closed by `folder.close_files`."""
