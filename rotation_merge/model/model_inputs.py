"""Opens a model from a folder, a hub name, a module, or a state dict with its config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import stores_codes, tied_head, unread
from rotation_merge.config import DTYPES
from rotation_merge.errors import CheckpointError, RecipeError, short
from rotation_merge.model.adapter_base import check_own_base
from rotation_merge.model.checkpoint import Model, open_model
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.headers import check_codes, codes
from rotation_merge.model.labels import LabelRows, label_rows, labels, named_rows
from rotation_merge.model.language_half import language_half
from rotation_merge.model.paired_model import PairedModel
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import RenamedSource, ReorderedClasses

ModelLike = Any
"""A folder, a name of the hub (also with a revision or an adapter, as in recipes), a module, a pair of a state dict and
its config (a transformers config, or the dictionary in config.json), or a result of `open_like`."""


def several(models: Any, of: str = "models", single: tuple[type, ...] = ()) -> list[Any]:
    """Models (or what else `of` says) as a list; `single`: further types that are one of them.

    Raises:
        RecipeError: they are one of them, or none.
    """
    if isinstance(models, (str, os.PathLike, nn.Module, Mapping, *single)) or not isinstance(models, Iterable):
        raise RecipeError(f"one {type(models).__name__} stands where {of} belong", remedy=f"give a list of {of}")
    return list(models)


def paths_of(models: Any, of: str = "model") -> list[str]:
    """Files, folders or names of the hub as text.

    Raises:
        RecipeError: they are one, or none, or one of them is in memory.
    """
    values = several(models, f"{of}s")
    for value in values:
        if not isinstance(value, str | os.PathLike):
            problem = f"one {of} is of type {type(value).__name__}"
            raise RecipeError(problem, remedy="give names, of folders, of files, or on the hub")
    return [os.fspath(value) for value in values]


@dataclass(frozen=True)
class OpenedModel:
    """An opened model: its config and tensor names are known, its tensors are read lazily.

    Attributes:
        name: its name in messages and reports.
        config: as in config.json; of a module with its class under `architectures`.
        source: gives tensors by the names that the model stores them under.
        names: of all tensors.
        shapes: by name.
        untie: whether a head that shares the embedding's tensor is given one of its own.
        module: where the model is one.
        checkpoint: where the model is a folder or a name of the hub.
        changed: entries of the config that are not those of its files.
        beside: small files that belong to a model in memory (a tokenizer), by name.
        note: note for the report.
        whole, own_names, layout: of a language half (`within`): the text-only model, by name here the name there, and
            the architecture.
    """

    name: str
    config: Mapping[str, Any]
    source: TensorSource
    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    untie: bool = False
    module: nn.Module | None = None
    checkpoint: Model | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    note: str = ""
    whole: OpenedModel | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    layout: Architecture | None = field(default=None, repr=False)

    @cached_property
    def architecture(self) -> Architecture:
        return self.layout or resolve(dict(self.config), list(self.names), self.name, untie=self.untie)

    @cached_property
    def member(self) -> PairedModel:
        """The model as `check_pair` sees it."""
        if self.checkpoint is not None:
            member, facts = self.checkpoint.member, (self.config, self.architecture, self.shapes)
            return PairedModel(self.name, *facts, member.tied, " ".join(filter(None, (member.note, self.note))))
        tied = tied_head(dict(self.config), self.names, self.name)
        return PairedModel(self.name, self.config, self.architecture, self.shapes, tied, self.note)

    def within(self, anchor: PairedModel) -> OpenedModel | None:
        """Return a text-only model as the language half of one of the anchor's kind, without the rest, else None.

        See `model/language_half.py`.
        """
        half = language_half(anchor, self.member)
        if half is None:
            return None
        names = {name: text_name for name, text_name in half.names.items() if text_name in self.source}
        config, shapes = half.config(anchor.config, self.config), half.all_of(self.shapes, {})
        source = RenamedSource(self.source, half.names)
        absent = {info.name for info in anchor.architecture.tensors() if info.names[0] not in names}
        layout = anchor.architecture.without(absent)  # which no file describes by itself
        return OpenedModel(
            self.name, config, source, tuple(names), shapes, self.untie, whole=self, own_names=names, layout=layout
        )

    def with_classes(self, rows: LabelRows) -> OpenedModel:
        """The same with its classes in another order, in its config, too (`model/labels.py`)."""
        if not rows:
            return self
        names, (_, order) = labels(self.config), next(iter(rows.values()))
        changed = named_rows(tuple(names[i] for i in order))
        config, changes = {**self.config, **changed}, {**self.changed, **changed}
        return replace(self, source=ReorderedClasses(self.source, rows), config=config, changed=changes)

    def with_classes_of(self, anchor: PairedModel) -> OpenedModel:
        """The same with its classes in the anchor's order, if both name the same ones."""
        if sorted(labels(self.config)) != sorted(labels(anchor.config)):
            return self
        return self.with_classes(label_rows(anchor, self.member))

    @cached_property
    def unread(self) -> list[str]:
        """Stored tensors that the model does not read: layers that predict tokens further ahead (MTP)."""
        return unread(dict(self.config), list(self.names))

    @cached_property
    def transformers_config(self) -> Any:
        """Its config as transformers has it.

        Raises:
            CheckpointError: transformers has no class for it.
        """
        import transformers

        names = self.config.get("architectures") or ["none"]
        kind = getattr(transformers, str(names[0]), None)
        if kind is None:
            problem = f"transformers has no class '{names[0]}'"
            raise CheckpointError(problem, where=self.name, remedy="update transformers")
        return kind.config_class.from_dict(dict(self.config))

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Stored dtypes of the tensors; for computed tensors, those of their sources."""
        known = dict(self.checkpoint.dtypes) if self.checkpoint is not None else {}
        lacking = [name for name in self.names if name not in known]
        if self.module is not None and lacking:
            known |= {name: tensor.dtype for name, tensor in self.module.state_dict().items()}
        return {name: known[name] if name in known else self.source[name].dtype for name in self.names}

    @cached_property
    def mark(self) -> Fingerprint:
        """The fingerprint of all tensors; reads those that have not been read for it."""
        mark = Fingerprint()
        mark.complete(self.architecture.named(), self.source)
        return mark


def open_like(model: ModelLike, name: str = "", untie: bool = False) -> OpenedModel:
    """Open a model; no tensor of a checkpoint is read.

    Args:
        model: see `ModelLike`.
        name: of a model in memory, for messages; of a checkpoint its path is taken.
        untie: give a head that shares the embedding's tensor one of its own.

    Raises:
        CheckpointError: it is no model, or cannot be read; names its type.
        ArchitectureError: no architecture file describes it.
    """
    if isinstance(model, OpenedModel):
        return model if model.untie == untie else replace(model, untie=untie)
    if hasattr(model, "as_opened"):  # a view
        return model.as_opened()
    if isinstance(model, str | os.PathLike):
        checkpoint = open_model(str(model))
        checkpoint.check_files()
        names, shapes = tuple(checkpoint.names), checkpoint.shapes
        path = str(checkpoint.reference)
        if checkpoint.adapter is not None:
            checkpoint.architecture  # noqa: B018  (says first what of the adapter does not fit)
            check_own_base(checkpoint)
        return OpenedModel(path, checkpoint.config, checkpoint, names, shapes, untie, checkpoint=checkpoint)
    if isinstance(model, nn.Module):
        if hasattr(model, "merge_and_unload"):
            remedy = "give model.merge_and_unload(), or the folders as 'base+adapter'"
            raise CheckpointError(
                "is a model of peft, with an adapter beside its weights", where=name or None, remedy=remedy
            )
        config = getattr(model, "config", None)
        return _in_memory(name or type(model).__name__, model.state_dict(), _values(config, name, model), untie, model)
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], Mapping):
        return _in_memory(name or "the state dict", model[0], _values(model[1], name), untie)
    problem = (
        "is a state dict without its config" if isinstance(model, Mapping) else f"is of type {type(model).__name__}"
    )
    raise CheckpointError(
        f"{problem}, which is not a model",
        where=name or None,
        remedy="give a folder, a name of the hub, a module, or a pair (state dict, config)",
    )


def check_names(first: OpenedModel, second: OpenedModel) -> None:
    """Check that both models have the same tensors, except unread ones and tied heads."""
    spare = {*first.unread, *second.unread}
    if first.member.tied is not None and first.member.tied == second.member.tied:
        spare.add(first.member.tied[0])  # a second copy of the embedding
    if odd := sorted((set(first.names) ^ set(second.names)) - spare):
        problem = f"tensor '{odd[0]}' is only in one of {first.name} and {second.name}"
        remedy = "give models of one class, both as folders or both as modules"
        raise CheckpointError(problem, where=second.name, remedy=remedy)


def _in_memory(
    name: str, state: Mapping[str, Tensor], config: dict[str, Any], untie: bool, module: nn.Module | None = None
) -> OpenedModel:
    tensors = dict(state)
    if odd := next((key for key, tensor in tensors.items() if not isinstance(tensor, Tensor)), None):
        problem = f"entry '{odd}' of its state dict is of type {type(tensors[odd]).__name__}"
        raise CheckpointError(problem, where=name, remedy="give a pair (state dict, config), with tensors of torch")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if not stores_codes(config):
        check_codes(codes({key: (str(tensor.dtype), shapes[key]) for key, tensor in tensors.items()}), tensors, name)
    return OpenedModel(name, config, _HeldTensors(name, tensors), tuple(tensors), shapes, untie, module)


@dataclass(frozen=True)
class _HeldTensors:
    """Tensors of a model in memory; of one without numbers only names and shapes can be asked.

    A subclass of torch's tensor may hold its numbers elsewhere.
    """

    name: str
    tensors: Mapping[str, Tensor]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str, /) -> Tensor:
        tensor = self.tensors[name]
        if tensor.is_meta and type(tensor) in (Tensor, nn.Parameter):
            problem, remedy = f"tensor '{name}' has no numbers (device 'meta')", "load its weights, or give its folder"
            raise CheckpointError(problem, where=self.name, remedy=remedy)
        return tensor


def _values(config: Any, name: str, module: nn.Module | None = None) -> dict[str, Any]:
    """A config as the dictionary that config.json would hold.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        remedy = "give a transformers config, or the dictionary in config.json"
        raise CheckpointError(f"its config is of type {type(config).__name__}", where=name or None, remedy=remedy)
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    if not stores_codes(values):
        values.pop("quantization_config", None)
    if module is not None:
        values["architectures"] = [type(module).__name__]
    return values


def check_storage(dtype: Any) -> None:
    """Refuse what is no dtype that weights can be stored in.

    Raises:
        CheckpointError: names those that there are.
    """
    if dtype is not None and dtype not in [getattr(torch, name) for name in DTYPES]:
        remedy = f"it must be one of: {', '.join(f'torch.{name}' for name in DTYPES)}"
        raise CheckpointError(f"'dtype' is {short(repr(dtype))}", remedy=remedy)


def stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to store a tensor in: the requested one for floating tensors, else its own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
