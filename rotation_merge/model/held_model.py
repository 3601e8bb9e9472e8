"""An opened model in place of a checkpoint, for code that reads checkpoints by reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.model.checkpoint import Model
from rotation_merge.model.language_half import NOTE, LanguageHalf
from rotation_merge.model.model_inputs import OpenedModel
from rotation_merge.model.paired_model import PairedModel
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import SelectedSource


@dataclass(frozen=True)
class Loader:
    """A model's tensors, as mergekit's loaders give those of files; floats in float32 at least."""

    opened: OpenedModel

    @property
    def index(self) -> Any:
        return SimpleNamespace(tensor_paths=dict.fromkeys(self.opened.names, ""), base_path=self.opened.name)

    def get_tensor(self, name: str, device: str = "cpu") -> Tensor:
        tensor = self.opened.source[name]
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(wide)

    def flush(self) -> None:
        """Do nothing, because no file is open."""


class HeldModel(Model):
    """A model in memory, a view, or a checkpoint that is open, as planning and matching see checkpoints."""

    def __init__(self, opened: OpenedModel) -> None:
        reference = ModelReference(model=ModelPath(path=opened.name))
        if opened.checkpoint is not None and str(opened.checkpoint.reference) == opened.name:
            reference = opened.checkpoint.reference  # which knows a revision and an adapter
        super().__init__(reference, MergeOptions(), untie=opened.untie)
        known = {
            "loader": Loader(opened),
            "config": dict(opened.config),
            "names": list(opened.names),
            "shapes": dict(opened.shapes),
            "adapter": None,
            "modules": [],
            "_layout": opened.architecture,
        }
        vars(self).update(known)  # instead of reading them from files
        self.opened = opened

    def check_files(self) -> None:
        """Do nothing, because there are no files."""

    @property
    def has_files(self) -> bool:
        return self.opened.checkpoint is not None

    @cached_property
    def member(self) -> PairedModel:
        return self.opened.member

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return dict(self.opened.dtypes)

    @property
    def transformers_config(self) -> Any:
        return self.opened.transformers_config

    @property
    def stored(self) -> TensorSource:
        return self.opened.source

    @property
    def fingerprint(self) -> str:
        return self.opened.mark.hexdigest(self.opened.config)

    def within(self, anchor: Model, half: LanguageHalf) -> HeldModel:
        """A text-only model as one of the anchor's class, with the anchor's own tensors beside the language half."""
        text, names = self.opened, {*half.names}
        spelled = text.within(anchor.member) or text
        source: TensorSource = SelectedSource(spelled.source, anchor.stored, lambda name: name not in names)
        shapes = {**anchor.shapes, **spelled.shapes}
        note = f"`{text.name}` {NOTE.format(anchor=f'`{anchor.reference}`')}."
        return HeldModel(OpenedModel(text.name, spelled.config, source, tuple(shapes), shapes, text.untie, note=note))
