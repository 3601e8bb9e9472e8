"""The models of a recipe: their configs, tensors and architectures, checked before any weight is read."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import find, stores_codes, tied_head, unaligned
from rotation_merge.architecture.sentence import KEY as SENTENCE
from rotation_merge.errors import ArchitectureError, CheckpointError, RotationMergeError, nearest_path, short
from rotation_merge.model.adapted_loader import AdaptedLoader, ChangePlaces, find_places
from rotation_merge.model.adapters import ADAPTER_FILES, Adapter
from rotation_merge.model.fingerprint import Fingerprint, FingerprintedSource, fingerprint
from rotation_merge.model.gguf import (
    downloaded,
    gguf_files,
    in_cache,
    is_folder,
    is_gguf,
    quantised,
    refuse_bare_repository,
)
from rotation_merge.model.headers import (
    Shapes,
    check_codes,
    check_config,
    check_local,
    file_codes,
    file_dtypes,
    file_shapes,
    single_file,
)
from rotation_merge.model.hub import check_available, is_hub_name, reachable
from rotation_merge.model.labels import LabelRows, in_order, labels, named_rows
from rotation_merge.model.language_half import NOTE, HalfLoader, LanguageHalf
from rotation_merge.model.paired_model import PairedModel
from rotation_merge.model.sentence import SentenceLoader, read_modules
from rotation_merge.model.source import TensorSource, check_shapes
from rotation_merge.model.sources import ReorderedClasses

_UNPICKLING = Lock()
"""Held by whoever unpickles lazily: mergekit has all of torch read otherwise meanwhile, and two threads at once would
leave it so."""


def serialised_loader(loader: Any) -> Any:
    """A loader of mergekit's that reads when no other does, where it unpickles lazily."""
    if getattr(loader, "lazy_unpickle", False):
        loader.lock = _UNPICKLING
    return loader


class CheckpointTensors:
    """The tensors of a checkpoint as its files (and an adapter) have them, read when asked for by name."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __contains__(self, name: object) -> bool:
        return name in self.model.loader.index.tensor_paths

    def __getitem__(self, name: str, /) -> Tensor:
        tensor: Tensor = self.model.loader.get_tensor(name)
        return tensor


LOG = logging.getLogger(__name__)

T = TypeVar("T")

READ = (".safetensors", ".bin", ".index.json", "config.json")
"""Endings of the files that a model's weights are read by."""

NO_BASE = "the adapter does not say which base it was trained on"


class Model:
    """One checkpoint, read lazily: config, tensor names and shapes now, tensors when asked for by name.

    Attributes:
        rows: order that brings its classes into the anchor's (`model/labels.py`); its config, fingerprint and `stored`
            tensors stay those of its files.
        statistics, samples: of a model in memory: its statistics, and batches to run it on.
    """

    def __init__(
        self, reference: ModelReference, options: MergeOptions, unsupported: str = "error", untie: bool = False
    ) -> None:
        self.reference, self.options, self.unsupported, self.untie = reference, options, unsupported, untie
        self._heads: dict[str, Shapes] = {}
        self.rows: LabelRows = {}
        self.note = ""
        self.statistics: Any = None
        self.samples: list[dict[str, Tensor]] | None = None

    def _head(self, path: str) -> Shapes:
        """Shapes of the tensors in one of its files; each file's head is read once."""
        key = os.path.realpath(path)
        if key not in self._heads:
            self._heads[key] = file_shapes(path)
        return self._heads[key]

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.transformers_config.to_dict()
        return config

    @cached_property
    def transformers_config(self) -> Any:
        """Its config as transformers has it; of a folder of sentence-transformers with the modules behind the model."""
        path, reference = self.reference.model.path, self.reference
        if is_folder(path):
            check_config(path)
        try:
            if not is_folder(path):
                folder = downloaded(path, self.reference.model.revision, None, ["config.json"])
                check_config(folder)
                reference = ModelReference(model=ModelPath(path=folder)) if gguf_files(folder) else reference
            config = reference.config(trust_remote_code=self.options.trust_remote_code)
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises errors of many classes here
            remedy = "correct config.json" if is_folder(path) else "check the repository's name"
            raise CheckpointError(
                f"its config cannot be loaded ({short(error)})",
                where=path,
                remedy="download it again" if is_gguf(path) else remedy,
            ) from error
        if self.modules:
            setattr(config, SENTENCE, self.modules)
        return config

    @cached_property
    def modules(self) -> list[dict[str, Any]]:
        """The modules after the transformer in a sentence-transformers folder."""
        folder = self._local()
        return [] if folder is None else read_modules(folder)

    def check_files(self) -> None:
        """Refuse a missing directory or missing weight files, before mergekit opens anything.

        Raises:
            CheckpointError: names the directory and the missing file.
        """
        self.adapter  # noqa: B018  (reads and checks it)
        path = self.reference.model.path
        if is_gguf(path):
            downloaded(path, self.reference.model.revision, self.options.transformers_cache, [])
        elif not os.path.exists(path):
            if not is_hub_name(path):
                raise CheckpointError("no such directory", where=path, remedy=nearest_path(path))
            check_available(path, self.reference.model.revision, self.options.transformers_cache)
        elif not os.path.isdir(path):
            raise CheckpointError("is a file", where=path, remedy="name the directory that holds the model, or a GGUF")
        else:
            check_local(path)

    @cached_property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter that the reference names, checked; a directory, or a repository of the hub."""
        lora = self.reference.lora
        if lora is None:
            return None
        cache = self.options.transformers_cache
        return Adapter(downloaded(lora.path, lora.revision, cache, ADAPTER_FILES))

    @cached_property
    def loader(self) -> Any:
        """mergekit's own loader, shared with the merge; opened after a look at the files.

        With an adapter, one around it that merges tensor by tensor as they are read. mergekit, which would write the
        merged model into a cache and take it from there ever after, finds it in the place of its own.
        """
        self.check_files()
        path = self.reference.model.path
        if is_folder(path) and (file := single_file(path)) is not None:
            self._head(file)
        plain = self.reference.model_copy(update={"lora": None})
        stamps = self._stamps()
        if getattr(LoaderCache.loaders.get(plain), "stamps", None) != stamps:
            LoaderCache.loaders.pop(plain, None)  # opened before its files were written again, or put there by others
        try:
            if plain not in LoaderCache.loaders and (cached := self._in_cache_alone()) is not None:
                LoaderCache.loaders[plain] = cached.lazy_loader(lazy_unpickle=self.options.lazy_unpickle)
            loader = serialised_loader(LoaderCache().get(plain))
        except RotationMergeError:
            raise
        except Exception as error:  # readers and downloads raise errors of many classes
            refuse_bare_repository(path, self.reference.model.revision)
            raise CheckpointError(
                f"weights cannot be read ({short(error)})", where=str(self.reference), remedy="download them again"
            ) from error
        if not is_folder(path):
            check_local(str(loader.index.base_path))
        if self.modules and not isinstance(loader, SentenceLoader):
            LoaderCache.loaders[plain] = loader = SentenceLoader(loader, str(loader.index.base_path), self.modules)
        loader.stamps = stamps
        if self.adapter is not None:
            LoaderCache.loaders[self.reference] = loader = AdaptedLoader(loader, self.adapter, self._places)
        return loader

    def _local(self) -> str | None:
        """The model's folder, of a GGUF the one made from it; None if the model has not been downloaded."""
        path = self.reference.model.path
        if is_folder(path):
            return path
        return in_cache(path, self.reference.model.revision, self.options.transformers_cache)

    def _stamps(self) -> list[tuple[str, int, int, int]]:
        """Names, sizes, times and inodes of the files that its loader reads."""
        folder = self._local()
        folders = [] if folder is None else [folder, *(os.path.join(folder, m["path"]) for m in self.modules)]
        paths = [os.path.join(part, name) for part in folders if os.path.isdir(part) for name in os.listdir(part)]
        return sorted(
            (path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
            for path in paths
            if path.endswith(READ) and (facts := os.stat(path))
        )

    def _in_cache_alone(self) -> ModelReference | None:
        """The folder that a GGUF is decoded into, or of a hub model if the hub cannot be reached, as mergekit does."""
        model = self.reference.model
        if is_folder(model.path) or (not is_gguf(model.path) and reachable()):
            return None
        folder = in_cache(model.path, model.revision, self.options.transformers_cache)
        return None if folder is None else ModelReference(model=ModelPath(path=folder))

    @cached_property
    def names(self) -> list[str]:
        return list(self.loader.index.tensor_paths)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, from the files' headers (of pickles: loaded without their data)."""
        result = self._of_files(self._head)
        if absent := [name for name in self.names if name not in result]:
            raise CheckpointError(
                f"the index names '{absent[0]}', but its shard does not hold it",
                where=str(self.reference),
                remedy="the shards and their index do not belong together; download them again",
            )
        return result

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the stored tensors; tensors changed by an adapter are not rounded to them."""
        return self._of_files(file_dtypes)

    def _of_files(self, read: Callable[[str], Mapping[str, T]]) -> dict[str, T]:
        """Apply a function to each weight file, with the names of the whole model."""
        base = self.loader.base if isinstance(self.loader, AdaptedLoader) else self.loader
        prefixes = base.prefixes if isinstance(base, SentenceLoader) else {}
        result: dict[str, T] = {}
        for shard in sorted(set(self.loader.index.tensor_paths.values())):
            described = read(os.path.join(self.loader.index.base_path, shard))
            result.update({prefixes.get(shard, "") + name: value for name, value in described.items()})
        return result

    @property
    def folder(self) -> str:
        """The folder of the model's files."""
        path = self.reference.model.path
        return path if is_folder(path) else str(self.loader.index.base_path)

    @property
    def architecture(self) -> Architecture:
        """Resolved from config and tensor names, shapes checked, an adapter's too."""
        if isinstance(self.loader, AdaptedLoader):
            self.loader.places  # noqa: B018  (finds and checks them)
        return self._layout

    def _places(self) -> ChangePlaces:
        assert self.adapter is not None
        name = str(self.reference)
        return find_places(
            self.adapter, self._layout, self.shapes, self.config, self.tied[0] if self.tied else None, name
        )

    @cached_property
    def _layout(self) -> Architecture:
        merge_anyway = self.unsupported == "merge"
        name = str(self.reference)
        if not stores_codes(self.config):  # with which the architecture refuses it
            check_codes(self._of_files(file_codes), self.names, name)
        if merge_anyway and find(self.config) is None:
            return unaligned(self.names, self.config)
        try:
            architecture = resolve(self.config, self.names, name, keep_unknown=merge_anyway, untie=self.untie)
        except ArchitectureError as error:
            if error.where == name:
                raise
            raise ArchitectureError(error.what, where=f"{name}, {error.where}", remedy=error.remedy) from error
        check_shapes(architecture, self.shapes, name)
        _log_architecture(architecture, name)
        return architecture

    @cached_property
    def ignored(self) -> list[str]:
        """Stored tensors that are neither loaded nor written: position ids, rotary tables, MTP layers."""
        known = self.architecture.named()
        tied = {name for info in self.architecture.tensors() for name in info.tied}
        return [name for name in self.names if name not in known and name not in tied]

    @cached_property
    def member(self) -> PairedModel:
        """The model as `check_pair` sees it."""
        name = str(self.reference)
        unsure = self.adapter is not None and not self.adapter.config.get("base_model_name_or_path")
        codes = quantised(self.folder)
        notes = [self.note, f"`{name}` {codes}." if codes else "", f"`{name}`: {NO_BASE}." if unsure else ""]
        note = " ".join(filter(None, notes))
        return PairedModel(name, self.config, self.architecture, self.shapes, self.tied, note)

    @cached_property
    def tied(self) -> tuple[str, str] | None:
        """A head that shares an embedding's tensor once the model is loaded, and the stream it reads."""
        return tied_head(self.config, self.names, str(self.reference), None if self.untie else self._layout)

    @property
    def tied_head(self) -> str | None:
        """Name of that head."""
        return self.tied[0] if self.tied else None

    def within(self, anchor: Model, half: LanguageHalf) -> Model:
        """A text-only model as one of the anchor's class (see `halves`)."""
        wrapped = Model(self.reference, self.options, self.unsupported, self.untie)
        wrapped.note = f"`{self.reference}` {NOTE.format(anchor=f'`{anchor.reference}`')}."
        loader = LoaderCache.loaders[self.reference] = HalfLoader(self.loader, anchor.loader, half)
        vars(wrapped).update(loader=loader, config=half.config(anchor.config, self.config))  # instead of reading them
        vars(wrapped)["_of_files"] = lambda read: half.all_of(self._of_files(read), anchor._of_files(read))
        return wrapped

    def check_shapes(self, anchor: Model, excluded: Callable[[str], bool], resized: bool) -> None:
        """Refuse models whose corresponding tensors differ in shape.

        Args:
            excluded: says which tensors are not merged.
            resized: whether vocabularies are brought together.

        Raises:
            CheckpointError: names the first tensor that differs.
        """
        infos = {(b.index, info.key): info for b in self.architecture.blocks for info in b.tensors}
        for block in anchor.architecture.blocks:
            for info in block.tensors:
                same = infos.get((block.index, info.key))
                own_shape, anchor_shape = (
                    model.shapes.get(i.name) if i else None for model, i in ((self, same), (anchor, info))
                )
                if own_shape is None or anchor_shape is None or excluded(info.name):
                    continue
                axis = info.vocabulary_axis
                differing = [
                    d
                    for d in range(max(len(own_shape), len(anchor_shape)))
                    if own_shape[d : d + 1] != anchor_shape[d : d + 1]
                ]
                if differing == [axis] and resized:
                    continue
                if differing:
                    raise CheckpointError(
                        f"tensor '{info.name}' is {list(anchor_shape)}, in {self.reference} {list(own_shape)}",
                        where=str(anchor.reference),
                        remedy="add 'tokenizer: {source: base}' so that the vocabularies are brought together"
                        if differing == [axis]
                        else "only equal shapes can be merged; name it under 'exclude' to copy it from base_model",
                    )

    @property
    def rewritten(self) -> dict[str, Any]:
        """Config entries that change when it takes the anchor's order of classes."""
        if not self.rows:
            return {}
        names, (_, order) = labels(self.config), next(iter(self.rows.values()))
        return named_rows(tuple(names[i] for i in order))

    @property
    def has_files(self) -> bool:
        """Whether the model and its adapter are stored in files."""
        return True

    @property
    def stored(self) -> TensorSource:
        """Its tensors as stored, before its classes are reordered."""
        return CheckpointTensors(self)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.architecture, self.stored, self.config)

    def watched(self, mark: Fingerprint) -> TensorSource:
        """Its tensors; reading them adds to the fingerprint."""
        return ReorderedClasses(FingerprintedSource(self.stored, mark), self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Tensor:
        return in_order(self.stored[name], self.rows.get(name))


def _log_architecture(architecture: Architecture, model: str) -> None:
    streams = ", ".join(f"{name} up to {groups[-1]}" for name, groups in architecture.stream_groups.items())
    LOG.info("%s: %s, %d blocks; %s", model, architecture.family, len(architecture.blocks), streams or "no stream")
    LOG.debug("%s: tensors are named with base %r and %s", model, architecture.base, architecture.spelling)


def parse_reference(path: str) -> ModelReference:
    """A model as a user names it: a directory, org/name, either with a revision or an adapter.

    Raises:
        CheckpointError: it names none.
    """
    try:
        return ModelReference(model=ModelPath(path=path)) if os.path.exists(path) else ModelReference.parse(path)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"'{path}' names no model ({error})", remedy="write a directory, or org/name") from error


def whole_path(name: str) -> str:
    """A model's name with absolute local paths, for a process in another folder."""
    reference = parse_reference(name)
    parts = {"model": reference.model} if reference.lora is None else {"model": reference.model, "lora": reference.lora}
    local_parts = {key: part for key, part in parts.items() if os.path.exists(part.path)}
    whole = {key: part.model_copy(update={"path": os.path.abspath(part.path)}) for key, part in local_parts.items()}
    return str(reference.model_copy(update=whole))


def open_model(path: str, unsupported: str = "error") -> Model:
    """Open a checkpoint, with its adapter for `model+adapter`."""
    return Model(parse_reference(path), MergeOptions(), unsupported)


def weights_of(path: str) -> int:
    """The number of weights in a model, from its files' headers.

    Raises:
        CheckpointError: it cannot be read.
    """
    return sum(math.prod(shape) for shape in open_model(path).shapes.values())


def adapted_state(path: str) -> dict[str, Tensor] | None:
    """All tensors of a model with an adapter (`model+adapter`), the caller's to change; None for others.

    Raises:
        CheckpointError: one of the two cannot be read, or they do not belong together.
    """
    model = Model(parse_reference(path), MergeOptions(), unsupported="merge")
    if model.reference.lora is None:
        return None
    model.architecture  # noqa: B018  (finds what the adapter changes, and checks it)
    return {name: model[name].clone() for name in model.names}  # what the files stay mapped to is not


def close_files() -> None:
    """Close the weight files that are mapped into memory; the next read opens them again."""
    LoaderCache().flush_all()


class Models:
    """The models of one merge, opened once each."""

    def __init__(self, options: MergeOptions, unsupported: str = "error", untie: bool = False) -> None:
        self.options, self.unsupported, self.untie = options, unsupported, untie
        self._opened: dict[ModelReference, Model] = {}
        LoaderCache().setup(options=options)

    def __getitem__(self, reference: ModelReference) -> Model:
        if reference not in self._opened:
            self._opened[reference] = Model(reference, self.options, self.unsupported, self.untie)
        return self._opened[reference]

    def __contains__(self, reference: object) -> bool:
        return reference in self._opened

    def __setitem__(self, reference: ModelReference, model: Model) -> None:
        self._opened[reference] = model
