"""A View where mergekit expects a model's loader, under a reference that only one run knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

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
        named = reference.override_architecture
        return cls(model=ModelPath(path=folder), override_architecture=named, original=reference, run=run, untie=untie)

    def config(self, trust_remote_code: bool = False) -> PretrainedConfig:
        """The model's config, which that of the merge is made from."""
        config = super().config(trust_remote_code)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)) if self.untie else ():
            if part is config or hasattr(part, "tie_word_embeddings"):
                part.tie_word_embeddings = False
        return config

    def __str__(self) -> str:
        return str(self.original)


class ViewLoader:
    """A view's tensors, as mergekit's `LoadTensor` asks a loader for them."""

    def __init__(self, view: View) -> None:
        self.view, self.index = view, SimpleNamespace(tensor_paths=dict.fromkeys(view, ""))

    def get_tensor(self, key: str, device: str = "cpu") -> Tensor:
        """A tensor on a device."""
        return self.view.tensors[key].to(device)


@contextmanager
def decoded(config: MergeConfiguration, options: MergeOptions) -> Iterator[MergeConfiguration]:
    """A recipe of mergekit's own in which folders stand for models in GGUF; adapters on them are merged when read."""
    ggufs = {part for _, part in walk(config) if isinstance(part, ModelReference) and is_gguf(part.model.path)}
    cache = options.transformers_cache
    placed = {model: StandIn.of(model, fetched(model.model, cache), next(runs)) for model in ggufs}
    try:
        for model in (model for model in ggufs if model.lora is not None):
            LoaderCache.loaders[placed[model]] = ViewLoader(open_model(model, options=options, any_base=True))
        yield with_models(config, lambda model: placed.get(model, model))
    finally:
        for stand_in in placed.values():
            LoaderCache.loaders.pop(stand_in, None)
