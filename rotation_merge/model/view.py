"""A transformed model: its tensors by name, computed on demand."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output
from rotation_merge.model.model_inputs import OpenedModel, check_storage, stored_dtype
from rotation_merge.model.sentence import module_of, write_modules
from rotation_merge.model.source import read_tensor, unstack
from rotation_merge.model.staging import HEADS, staged, write_files
from rotation_merge.model.writing import StorageOptions, parse_size, untied, write_beside
from rotation_merge.record import MergeReport

TensorOf = Callable[[Block, TensorInfo, torch.dtype | None], Tensor | None]
"""Computes one tensor of an architecture (stacked, if it is stored in pieces), rounded to a dtype (None: that which it
is stored in); None where the model has none."""


class View(Mapping[str, Tensor]):
    """A lazy mapping from names to tensors of a model, computed on demand.

    Every tensor is computed anew each time, in float32 at least, and rounded once to its storage dtype.

    Attributes:
        opened: the model that it is a view of.
        dtype: of its floating tensors; None: each has that of the model's tensor.
        left_out: names of the model's tensors that it does not hold.
        notes: notes for the reader of a report.
        report: of the matching that it comes from, if any.
        identity: gives the fingerprint that statistics have which were moved as it was; None: there are none.
        folded: streams whose norm gains it folds into their readers.
        heads: the same body under other heads, by name; written beside it in `heads`.
    """

    def __init__(
        self,
        opened: OpenedModel,
        compute: TensorOf,
        dtype: torch.dtype | None = None,
        left_out: Collection[str] = (),
        notes: Sequence[str] = (),
        report: MergeReport | None = None,
        identity: Callable[[], str | None] = lambda: None,
        folded: Collection[str] = (),
    ) -> None:
        self.opened, self.dtype, self.left_out = opened, dtype, frozenset(left_out)
        self.notes, self.report, self.identity, self.folded = tuple(notes), report, identity, folded
        self.heads: Mapping[str, View] = {}
        self._compute, self._places = compute, self.architecture.places()
        self._names = self._all_names()

    def __repr__(self) -> str:
        stored = "" if self.dtype is None else f", {self.dtype}"
        return f"View({self.opened.name}, {len(self)} tensors{stored})"

    __eq__, __hash__ = object.__eq__, object.__hash__  # a mapping would compare all tensors

    def _all_names(self) -> tuple[str, ...]:
        known: dict[str, None] = {}
        for info in self.architecture.tensors():
            if any(name in self.opened.source for name in (info.names[0], *info.tied)):
                known.update(dict.fromkeys(info.names))
        tied = {name for info in self.architecture.tensors() for name in info.tied}
        unplaced = (name for name in self.opened.names if name not in self._places and name not in tied)
        return tuple(name for name in (*known, *unplaced) if name not in self.left_out)

    @property
    def architecture(self) -> Architecture:
        """The architecture that names its tensors."""
        return self.opened.architecture

    @property
    def config(self) -> dict[str, Any]:
        """The config of the viewed model, with the view's changes."""
        config = untied(self.opened.config) if self.opened.untie else dict(self.opened.config)
        if self.dtype is not None:
            config["dtype"] = str(self.dtype).removeprefix("torch.")
        return config

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return (name in self._places and str(name) not in self.left_out) or name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            if name not in self._names:
                raise KeyError(name)
            tensor = self.opened.source[name]
            return tensor.to(stored_dtype(tensor, self.dtype))
        block, info, piece = self._places[name]
        computed = self.tensor(block, info)
        if computed is None:
            raise KeyError(name)
        return computed[piece] if info.stacked else computed

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """One tensor of the architecture (stacked, if it is stored in pieces); None where the model has none."""
        return self._compute(block, info, self.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, those that are stored in pieces computed once; the memory of one block."""
        for block in self.architecture.blocks:
            for info in block.tensors:
                if info.names[0] in self.left_out or info.names[0] not in self:
                    continue
                computed = self.tensor(block, info)
                if computed is not None:
                    yield from unstack(info, computed.contiguous()).items()
        for name in self._names:
            if name not in self._places:
                yield name, self[name]

    def as_opened(self) -> OpenedModel:
        """The view as a model that can be transformed, averaged or written."""
        shapes = dict(self.opened.shapes)
        for info in self.architecture.tensors():
            tied = next((name for name in info.tied if name in shapes), None)
            if tied is not None:
                shapes.setdefault(info.names[0], shapes[tied])
        known = {name: shapes[name] for name in self}
        return replace(self.opened, source=self, config=self.config, names=tuple(self), shapes=known)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, in memory, none of them shared with the model."""
        return {name: tensor.clone() for name, tensor in self.tensors()}

    def to(self, dtype: torch.dtype) -> View:
        """The same with floating tensors of another dtype, each rounded once.

        Raises:
            CheckpointError: weights cannot be stored in it.
        """
        check_storage(dtype)
        changed = copy.copy(self)
        changed.dtype, changed.heads = dtype, {name: view.to(dtype) for name, view in self.heads.items()}
        return changed

    def with_heads(self, heads: Mapping[str, View]) -> View:
        """The same with views of its body under other heads."""
        changed = copy.copy(self)
        changed.heads = dict(heads)
        return changed

    def with_notes(self, notes: Sequence[str], report: MergeReport | None = None) -> View:
        """The same with other notes and another report."""
        changed = copy.copy(self)
        changed.notes, changed.report = tuple(dict.fromkeys(notes)), report
        return changed

    def to_module(self) -> nn.Module:
        """The model in memory, in evaluation mode: of a module a copy, else of the class that the config names.

        Raises:
            CheckpointError: transformers has no class for it, or a weight is missing.
        """
        if self.opened.module is not None and not self.opened.untie and not self.opened.changed:
            state = dict(self.tensors())  # copied into the module's own
            module = copy.deepcopy(self.opened.module)
            if "quantization_config" not in self.config:  # of what was read from GGUF, which transformers saves then
                vars(module).pop("hf_quantizer", None)
                vars(module.config).pop("quantization_config", None)
            if self.dtype is not None:
                module = module.to(self.dtype)
            for name, parameter in module.named_parameters():  # a view of the view may have another dtype
                parameter.data = parameter.data.to(state[name].dtype if name in state else parameter.dtype)
            module.load_state_dict(state, strict=not self.left_out)
            return module.eval()
        import transformers

        names = self.config.get("architectures") or ["none"]
        kind = getattr(transformers, str(names[0]), None)
        if kind is None:
            remedy = "take its state_dict()"
            raise CheckpointError(f"transformers has no class '{names[0]}'", where=self.opened.name, remedy=remedy)
        config = kind.config_class.from_dict(self.config)
        state = self.state_dict()
        dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
        module, info = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=max(dtypes, key=lambda d: d.itemsize), output_loading_info=True
        )
        if missing := sorted(map(str, info.get("missing_keys") or [])):
            remedy = "the state dict is incomplete, or its config belongs to another model"
            raise CheckpointError(f"weight '{missing[0]}' is missing", where=self.opened.name, remedy=remedy)
        return module.eval()

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: str = "5B") -> None:
        """Write a normal checkpoint atomically: weights in shards, config, and the model's small files.

        These are tokenizer, preprocessor and generation config. One block is in memory at a time.

        Args:
            folder: new, or empty.
            max_shard_size: such as 500M or 5B (bytes).

        Raises:
            RotationMergeError: the folder holds something, or is a file; the size is none.
        """
        out, size = os.fspath(folder), parse_size(max_shard_size)
        check_output(Output(out, "folder", FOLDER, remedy="write to a new folder"))
        with staged(out) as staging:
            self._write(staging, size)
            for head, view in self.heads.items():
                view._write(os.path.join(staging, HEADS, head), size)

    def _write(self, folder: str, size: int) -> None:
        os.makedirs(folder, exist_ok=True)
        writer = TensorWriter(folder, max_shard_size=size)
        modules = [] if self.opened.checkpoint is None else self.opened.checkpoint.modules
        apart: dict[str, Tensor] = {}  # tensors of sentence-transformers modules, which have folders of their own
        for name, tensor in self.tensors():
            if module_of(name, modules) is not None:
                apart[name] = tensor.detach().cpu()
            else:
                writer.save_tensor(name, tensor.detach().cpu(), clone=True)
        writer.finalize()
        self._write_beside(folder)
        if self.opened.checkpoint is not None and modules:
            write_modules(self.opened.checkpoint.folder, folder, apart)

    def _write_beside(self, staging: str) -> None:
        if self.opened.checkpoint is not None:
            dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
            storage = StorageOptions(dtype=dtype, untie=self.opened.untie)
            write_beside(self.opened.checkpoint, staging, storage, self.opened.changed)
            return
        with open(os.path.join(staging, "config.json"), "w", encoding="utf-8") as file:
            json.dump(self.config, file, indent=2, default=str)
            file.write("\n")
        write_files(staging, self.opened.beside)
        generation = getattr(self.opened.module, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(staging)


def as_stored(opened: OpenedModel) -> View:
    """The unchanged model as a view."""

    def read(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        tensor = read_tensor(info, opened.source)
        return None if tensor is None else tensor.to(stored_dtype(tensor, dtype))

    return View(opened, read)
