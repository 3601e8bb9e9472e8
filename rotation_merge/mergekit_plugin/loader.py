"""A View where mergekit expects a model's loader, under a reference that only one run knows."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor
from transformers import PretrainedConfig

from rotation_merge.mergekit_plugin.document import walk, with_models
from rotation_merge.model.folder import fetched
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View

if TYPE_CHECKING:
    from typing_extensions import Self

runs = itertools.count(1)
"""Numbers of the runs of this process."""


class StandIn(ModelReference, frozen=True):  # type: ignore[call-arg]
    """A model under a reference that no other recipe has; for one in GGUF the folder that is made from it.

    mergekit's cache of loaders is one dictionary for the whole process, so all others read the untouched weights.

    Attributes:
        run: number of the run.
    """

    run: int

    @classmethod
    def of(cls, reference: ModelReference, run: int = 0, cache: str | None = None) -> Self:
        """A model's reference in a run.

        Args:
            cache: of the hub.
        """
        model = reference.model
        if is_gguf(model.path):
            model = ModelPath(path=fetched(model, cache))
        return cls.model_construct(**{**dict(reference), "model": model, "run": run})


class PlacedModel(StandIn, frozen=True):  # type: ignore[call-arg]
    """A model as one run of one recipe of ours sees it."""

    def config(self, trust_remote_code: bool = False) -> PretrainedConfig:
        """An empty one: mergekit asks the architecture of the output alone."""
        return PretrainedConfig()


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


@contextmanager
def decoded(config: MergeConfiguration, options: MergeOptions) -> Iterator[MergeConfiguration]:
    """A recipe of mergekit's own in which folders stand for models in GGUF; adapters on them are merged when read."""
    placed: dict[ModelReference, StandIn] = {}
    for _, model in walk(config):
        if isinstance(model, ModelReference) and is_gguf(model.model.path) and model not in placed:
            bare = model.model_copy(update={"lora": None})
            placed[model] = StandIn.of(bare, next(runs), options.transformers_cache)
            if model.lora is not None:
                LoaderCache.loaders[placed[model]] = ViewLoader(open_model(model, options=options, any_base=True))
    try:
        yield with_models(config, lambda model: placed.get(model, model))
    finally:
        for stand_in in placed.values():
            LoaderCache.loaders.pop(stand_in, None)
