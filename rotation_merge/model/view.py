"""A model as a value: config, architecture and lazy tensors. Whatever is done to a model gives another view."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.architecture.registry import tied_head, unread
from rotation_merge.architecture.sentence import KEY as SENTENCE
from rotation_merge.config import DTYPES
from rotation_merge.errors import CheckpointError, short
from rotation_merge.files import FOLDER, Output, check_output, write_json
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.apply import blockwise, read_tensor, unstack, with_tied
from rotation_merge.model.contents import read_json
from rotation_merge.model.sentence import in_module, write_modules
from rotation_merge.model.tensors import Fingerprint, Shapes, Tensors, as_tensors
from rotation_merge.model.writing import HEADS, SHARD_SIZE, parse_size, small_files, staged, untied, write_files
from rotation_merge.record import MergeReport
from rotation_merge.workers import Progress

TensorOf = Callable[[Block, TensorInfo, torch.dtype | None], Tensor | None]
"""Computes one tensor of an architecture (stacked, if it is stored in pieces), rounded to a dtype (None: that which it
is stored in); None where the model has none."""

FURTHER = "layers that predict further tokens"
"""Name of the block of a model's layers that predict tokens further ahead (MTP)."""


@dataclass(frozen=True)
class Files:
    """Where a model is stored.

    Attributes:
        reference: its name, with revision and adapter, as recipes have it.
        folder: that holds config, weights and tokenizer.
        dtypes: of the stored tensors, by name, before an adapter changes them.
        options: of mergekit: caches, and what it may run.
        tensors: all that they hold, with an adapter's change.
        adapter: that is merged into its weights.
        base: the model without it.
        template: folder whose config and small files the model is written with, where these are not its own: the
            anchor's, of a model that completes the anchor's class.
    """

    reference: ModelReference
    folder: str
    dtypes: Mapping[str, torch.dtype] = field(repr=False)
    options: MergeOptions = field(repr=False)
    tensors: Tensors = field(repr=False)
    adapter: Adapter | None = field(default=None, repr=False)
    base: View | None = field(default=None, repr=False)
    template: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class View(Tensors):
    """A model: a lazy, read-only mapping from names to tensors, with config and architecture.

    Nothing is read before it is asked for. Functions such as `Alignment.apply` give another view; a tensor of it is
    computed each time that it is asked for, in float32 at least, and rounded once to its storage dtype.

    Attributes:
        name: in messages and reports.
        config: as in config.json; of a module with its class under `architectures`.
        architecture: names the tensors, and the space that each of their axes lives in.
        tensors: by name, nothing read: its `shapes`, `dtypes` and `read` are the view's.
        files: where the model is stored; None: in memory.
        module: where the model is one.
        untie: whether a head that shares the embedding's tensor is given one of its own.
        head_differs: whether the head stays untied, because the stored one is not the embedding that its config ties.
        changed: entries of the config that are not those of its files.
        beside: small files (a tokenizer) by name, of a model in memory, or instead of those beside its files.
        remarks: on the model itself, for the report of what is done with it.
        rows: what puts the classes of its files into another order (`model/labels.py`).
        filed: the model with its classes in the order of its files, where that is another: whose identity it has.
        text: of the language half of a multimodal model the text-only model that it was made of.
        text_names: of such a half, its names of the tensors, and the text-only model's.
        at: gives its tensors in another dtype, each rounded once; None: they are as they are read.
        dtype: of floating tensors; None: each has that of the model's tensor.
        left_out: names of the model's tensors that it does not hold.
        notes: for the reader of a report.
        report: of the matching that it comes from.
        identity: gives the fingerprint that statistics have which were moved as it was; None: there are none.
        folded: streams whose norm gains it folds into their readers.
        heads: the same body under other heads, by name; written beside it in `heads`.
    """

    name: str
    config: Mapping[str, Any]
    architecture: Architecture
    tensors: Tensors
    files: Files | None = None
    module: nn.Module | None = None
    untie: bool = False
    head_differs: bool = False
    changed: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    rows: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    filed: View | None = None
    text: View | None = None
    text_names: Mapping[str, str] = field(default_factory=dict)
    at: Callable[[torch.dtype], Tensors] | None = None
    dtype: torch.dtype | None = None
    left_out: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    report: MergeReport | None = None
    identity: Callable[[], str | None] = lambda: None
    folded: tuple[str, ...] = ()
    heads: Mapping[str, View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("shapes", "dtypes", "read"):
            object.__setattr__(self, name, getattr(self.tensors, name))

    def __repr__(self) -> str:
        stored = "" if self.dtype is None else f", {self.dtype}"
        return f"View({self.name}, {len(self)} tensors{stored})"

    @property
    def as_filed(self) -> View:
        """The same model with its classes in the order of its files."""
        return self.filed or self

    @property
    def is_stored(self) -> bool:
        """Whether its tensors are those of its files: none is computed, reordered or replaced."""
        return self.files is not None and self.tensors is self.files.tensors

    @property
    def stored_dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the tensors in its files, by name, before an adapter changes them."""
        return self.dtypes if self.files is None else self.files.dtypes

    @property
    def reference(self) -> ModelReference:
        """The model's name as mergekit has it."""
        if self.files is not None and str(self.files.reference) == self.name:
            return self.files.reference
        return ModelReference(model=ModelPath(path=self.name))

    @property
    def folder(self) -> str:
        """The folder of its files.

        Raises:
            CheckpointError: it is in memory.
        """
        if self.files is None:
            raise CheckpointError("is in memory", where=self.name, remedy="give its folder")
        return self.files.folder

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The modules after the transformer of a folder of sentence-transformers."""
        return [] if self.files is None else list(self.config.get(SENTENCE) or [])

    @cached_property
    def tied(self) -> tuple[str, str] | None:
        """A head that shares an embedding's tensor once the model is loaded, and the stream it reads."""
        return tied_head(dict(self.config), list(self), self.name, None if self.untie else self.architecture)

    @property
    def tied_head(self) -> str | None:
        """Name of that head."""
        return self.tied[0] if self.tied else None

    @cached_property
    def unread(self) -> list[str]:
        """Stored tensors that the model does not read: layers that predict tokens further ahead (MTP)."""
        return unread(dict(self.config), list(self))

    @cached_property
    def predicting_ahead(self) -> list[str]:
        """Stored tensors of layers that predict tokens further ahead (MTP): unread ones outside the model's layers."""
        layers = tuple(f"{block.name}." for block in self.architecture.blocks if block.index is not None)
        return [name for name in self.unread if not name.startswith(layers)]

    @property
    def further_block(self) -> Block:
        """Its layers that predict tokens further ahead as a block, which no architecture describes."""
        infos = tuple(TensorInfo(name, (name,), ()) for name in self.predicting_ahead)
        return Block(FURTHER, self.architecture.blocks[-1].module, None, "after", infos)

    @cached_property
    def ignored(self) -> list[str]:
        """Stored tensors that are neither loaded nor written: position ids, rotary tables, MTP layers."""
        known = self.architecture.named()
        tied = {name for info in self.architecture.tensors() for name in info.tied}
        return [name for name in self if name not in known and name not in tied]

    @property
    def transformers_config(self) -> Any:
        """Its config as transformers has it.

        Raises:
            CheckpointError: transformers has no class for it.
        """
        return self.model_class.config_class.from_dict(dict(self.config))

    @property
    def model_class(self) -> Any:
        """The class of transformers that its config names.

        Raises:
            CheckpointError: there is none.
        """
        import transformers

        name = str((self.config.get("architectures") or ["none"])[0])
        if (model_class := getattr(transformers, name, None)) is None:
            remedy = "update transformers, or take its state_dict()"
            raise CheckpointError(f"transformers has no class '{name}'", where=self.name, remedy=remedy)
        return model_class

    def module_without_weights(self) -> Any:
        """A module of its class on the meta device.

        Raises:
            CheckpointError: it cannot be built.
        """
        try:
            with torch.device("meta"):
                return self.model_class(self.transformers_config)
        except Exception as error:  # models and configs raise errors of many classes
            problem = f"its class cannot be built ({short(error)})"
            remedy = "carry it as a whole model, not as an adapter"
            raise CheckpointError(problem, where=self.name, remedy=remedy) from error

    @cached_property
    def mark(self) -> Fingerprint:
        """Checksums of the tensors as they are stored, of those that have been read for it."""
        return Fingerprint() if self.filed is None else self.filed.mark

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its config and tensors as they are stored; reads those that were not read for `mark`."""
        stored = self.as_filed
        stored.mark.complete(stored.architecture.named(), stored.tensors)
        return stored.mark.hexdigest(stored.config)

    def blockwise(
        self, compute: TensorOf, dtype: torch.dtype | None = None, further: Iterable[Block] = (), **changes: Any
    ) -> View:
        """The same model with the tensors of its architecture computed, each when it is asked for, under its own head.

        Args:
            dtype: of the floating tensors; None: each has that of the model's tensor.
            further: blocks beside the architecture's whose tensors are computed, too.
            changes: of further attributes; `left_out` names tensors that the result does not hold.
        """
        left_out = frozenset(changes.get("left_out", self.left_out))
        architecture = replace(self.architecture, blocks=(*self.architecture.blocks, *further))

        def at(dtype: torch.dtype | None) -> Tensors:
            stored = stored_once(architecture, self._rounded(dtype), left_out)
            return blockwise(architecture, stored, lambda block, info: compute(block, info, dtype))

        changes = {"rows": {}, "filed": None, "heads": {}, "dtype": dtype, **changes, "left_out": left_out}
        return replace(self, tensors=at(dtype), config=self._config_in(dtype), at=at, **changes)

    def to(self, dtype: torch.dtype) -> View:
        """The same with floating tensors of another dtype, each rounded once.

        Raises:
            CheckpointError: weights cannot be stored in it.
        """
        check_storage(dtype)
        heads = {name: view.to(dtype) for name, view in self.heads.items()}
        tensors = stored_once(self.architecture, self._rounded(dtype), self.left_out)
        return replace(self, tensors=tensors, at=self._rounded, config=self._config_in(dtype), dtype=dtype, heads=heads)

    def _rounded(self, dtype: torch.dtype | None) -> Tensors:
        """Its tensors in another dtype (None: as they are)."""
        if dtype is None:
            return self.tensors
        if self.at is not None:
            return self.at(dtype)
        dtypes = {name: dtype if known.is_floating_point else known for name, known in self.dtypes.items()}
        return self.tensors.map(lambda _, tensor: tensor.to(stored_dtype(tensor, dtype)), dtypes=dtypes)

    def _config_in(self, dtype: torch.dtype | None) -> Mapping[str, Any]:
        config = untied(self.config) if self.untie else self.config
        return config if dtype is None else {**config, "dtype": str(dtype).removeprefix("torch.")}

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, block by block, those that are stored in pieces computed once."""
        places = self.architecture.places()
        for block in self.architecture.blocks:
            for info in block.tensors:
                if info.names[0] in self.tensors and (tensor := read_tensor(info, self.tensors)) is not None:
                    yield from unstack(info, tensor.contiguous()).items()
        for name in self.tensors:
            if name not in places:
                yield name, self[name]

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, in memory, none of them shared with the model."""
        return {name: tensor.clone() for name, tensor in self.blocks()}

    def to_module(self) -> nn.Module:
        """The model in memory, in evaluation mode: of a module a copy, else of the class that the config names.

        Raises:
            CheckpointError: transformers has no class for it, or a weight is missing.
        """
        if self.module is not None and self.untie == self.head_differs and not self.changed:
            return self._filled_copy(self.module)
        kind, state = self.model_class, self.state_dict()
        dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        options = {"config": self.transformers_config, "state_dict": state, "dtype": widest}
        module, info = kind.from_pretrained(None, output_loading_info=True, **options)
        if missing := sorted(map(str, info.get("missing_keys") or [])):
            remedy = "the state dict is incomplete, or its config belongs to another model"
            raise CheckpointError(f"weight '{missing[0]}' is missing", where=self.name, remedy=remedy)
        evaluated: nn.Module = module.eval()
        return evaluated

    def _filled_copy(self, original: nn.Module) -> nn.Module:
        """A copy of a module with the view's tensors."""
        state, module = dict(self.blocks()), copy.deepcopy(original)
        if "quantization_config" not in self.config:  # of what was read from GGUF, which transformers saves then
            vars(module).pop("hf_quantizer", None)
            vars(module.config).pop("quantization_config", None)
        module = module if self.dtype is None else module.to(self.dtype)
        for name, parameter in module.named_parameters():  # a view of the view may have another dtype
            parameter.data = parameter.data.to(state[name].dtype if name in state else parameter.dtype)
        module.load_state_dict(state, strict=not self.left_out)
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
        check_output(Output(out, FOLDER, remedy="write to a new folder"))
        with staged(out) as staging:
            self.write(staging, size)

    def write(self, folder: str, shard_size: int = SHARD_SIZE, progress: Progress | None = None) -> None:
        """Write weights, each in the view's dtype or that of its files, small files, config and heads into a folder.

        Args:
            shard_size: bytes of a weight file at most.
        """
        os.makedirs(folder, exist_ok=True)
        source = None if self.files is None else self.files.template or self.files.folder
        writer, of_modules = TensorWriter(folder, max_shard_size=shard_size), dict[str, Tensor]()
        for number, (name, tensor) in enumerate(self.blocks()):
            if progress is not None:
                progress("writing", number, len(self))
            tensor = tensor.detach().to("cpu", stored_dtype(tensor, self.dtype or self.stored_dtypes.get(name)))
            if in_module(name, self.modules):
                of_modules[name] = tensor.clone()
            else:
                writer.save_tensor(name, tensor, clone=True)
        writer.finalize()
        if source is not None:
            write_modules(source, folder, of_modules)
        self._write_small_files(folder, source)
        for name, view in self.heads.items():
            view.write(os.path.join(folder, HEADS, name), shard_size)

    def _write_small_files(self, folder: str, source: str | None) -> None:
        """Config, tokenizer, settings: those of a folder (None: the model's own), with what is changed."""
        stored = dict(self.config) if source is None else read_json(os.path.join(source, "config.json"))
        config = {**json.loads(json.dumps(stored, default=str)), **self.changed}
        if self.dtype is not None:
            config["dtype" if "dtype" in config else "torch_dtype"] = str(self.dtype).removeprefix("torch.")
        write_files(folder, self.beside if source is None or self.beside else small_files(source))
        write_json(os.path.join(folder, "config.json"), untied(config) if self.untie else config)
        if (generation := getattr(self.module, "generation_config", None)) is not None:
            generation.save_pretrained(folder)


def as_stored(view: View) -> View:
    """The model as it is written: a tied tensor once, under its first name, and a config that says what is untied."""
    tensors = stored_once(view.architecture, view.tensors, view.left_out)
    return replace(view, tensors=tensors, config=view._config_in(None))


def stored_once(architecture: Architecture, tensors: Tensors, left_out: Collection[str]) -> Tensors:
    """Tensors of a model in the order of its architecture, a tied one once, under its first name."""
    infos = [info for info in architecture.tensors() if any(name in tensors for name in (info.names[0], *info.tied))]
    known = dict.fromkeys(name for info in infos for name in info.names)
    tied = {name for info in infos for name in info.tied}
    names = [*known, *(name for name in tensors if name not in known and name not in tied)]
    return with_tied(architecture, tensors).only(name for name in names if name not in left_out)


def described(name: str, config: Mapping[str, Any], architecture: Architecture, shapes: Shapes) -> View:
    """A model of which only the description is known; its tensors cannot be read."""
    tensors = {tensor: torch.empty(shape, device="meta") for tensor, shape in shapes.items()}
    return View(name, config, architecture, as_tensors(tensors, name))


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
