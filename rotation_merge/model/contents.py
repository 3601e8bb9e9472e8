"""One reading of a model's folder: config, index, heads of weight files and small files. Damage is kept as data.

Pickles are only ever read as plain tensors.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rotation_merge.architecture.registry import DEQUANTISE, stores_codes
from rotation_merge.errors import CheckpointError, named, short
from rotation_merge.model.tensors import Shapes

CONFIG, GENERATION, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

WEIGHT_FILES, INDEX = ("model.safetensors", "pytorch_model.bin"), ".index.json"
"""Weight files in the order in which mergekit looks for them, and the ending of an index of their shards."""
SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")

VOCABULARIES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
"""Beginnings of names of files that a tokenizer cannot do without."""
TOKENIZER = re.compile(f"({'|'.join((*VOCABULARIES, 'added_tokens', 'special_tokens', 'chat_template'))}).*")

DOWNLOAD, AGAIN = "download it again", "download or merge it again"
MEND = "rewrite it ('rotation-merge doctor --mend')"
SETS = "two sets of weights"
DIFFERENT = "transformers and mergekit would read different weights"
APART = f"move away the files of the other model: {DIFFERENT}"
ONE_COPY = f"leave each tensor in a single file, which the index names: {DIFFERENT}"
UNDECLARED = (
    "name the model in full precision, or write one: put 'quantization_config' back into config.json, then "
    f"{DEQUANTISE}"
)

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating types that weights are stored in, as safetensors and as torch call them."""
_TYPES = FLOATS | {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
"""Types that torch calculates with."""
_CODES = re.compile(r"u?int(8|16|32)|U(16|32)|F[468](_.*)?|float[468]_.*")
"""Types that only quantised codes have, in matrices and stacks of them; masks of bytes have four dimensions."""

_SCALE = re.compile("[._]*(scale|SCB|absmax|codebook)")
"""Where the name of scales leaves that of their codes: `x.weight_scale_inv`, `x.SCB`, `x_scales`, `x.scales`."""
_SCALED = {"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "bitsandbytes", "gptq", "awq", "auto-round"}
"""Methods of quantisation that store scales beside each tensor of codes."""

_COUNT = re.compile(r"(.*_)?(layers?|depth|experts)")
"""Entries of a config that count modules."""
_PLAUSIBLE = 4096
"""So many layers or experts are taken however few tensors there are: weights may not be here, experts may share one."""


# --- files -----------------------------------------------------------------------------------------------------------


def read_json(path: str) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is not there, or is something else.
    """
    folder, name = os.path.split(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        if name == CONFIG:
            refuse_adapter(folder)
        raise CheckpointError(f"{name} is missing", where=folder, remedy="the model is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {reason(error)}", where=path, remedy=DOWNLOAD) from None
    if not isinstance(content, dict):
        raise CheckpointError("does not hold a JSON object", where=path, remedy=DOWNLOAD)
    return content


def reason(error: Exception) -> str:
    """An error's message, without the path that an OSError repeats."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else str(error) or type(error).__name__


def refuse_adapter(folder: str) -> None:
    """Refuse an adapter in the place of a model; says how its base is named with it."""
    if os.path.exists(adapter := os.path.join(folder, ADAPTER_CONFIG)):
        base = read_json(adapter).get("base_model_name_or_path") or "BASE"
        raise CheckpointError("is an adapter, not a model", where=folder, remedy=f"write {base}+{folder}")


@dataclass(frozen=True)
class Header:
    """What a weight file, or all files of a model, say of the tensors.

    Attributes:
        shapes: by name.
        kinds: numbers that they are stored as, by name: as torch calls them, where it calculates with them.
        metadata: of a safetensors file, `format` first of all.
    """

    shapes: Shapes
    kinds: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Any) -> Header:
        """The header of an open safetensors file."""
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        kinds = {name: _TYPES.get(part.get_dtype(), part.get_dtype()) for name, part in slices.items()}
        return cls({name: tuple(part.get_shape()) for name, part in slices.items()}, kinds, file.metadata() or {})

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes by name, of the tensors that torch calculates with."""
        dtypes = {name: getattr(torch, kind, None) for name, kind in self.kinds.items()}
        return {name: dtype for name, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}


def header(path: str) -> Header:
    """The header of a weight file; cached while the file is unchanged.

    Raises:
        CheckpointError: the file is damaged, or a pickle of something else than tensors.
    """
    try:
        facts = os.stat(path)
        return _header(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    except Exception as error:  # of safetensors and pickle, which come in every class
        is_pickle = not path.endswith(".safetensors")  # of which torch advises to run the code
        kind = "a pickle that holds no tensors, or more than tensors" if is_pickle else "no weight file"
        words = "" if is_pickle and not isinstance(error, OSError) else f" ({short(reason(error))})"
        problem = f"cannot be read: it is truncated, damaged or {kind}{words}"
        raise CheckpointError(problem, where=path, remedy=DOWNLOAD) from error


@lru_cache(maxsize=512)
def _header(path: str, size: int, changed: int, number: int) -> Header:
    """The header of a file of this size, time and inode."""
    with open(path, "rb"):
        pass  # which says better than the libraries that it is a directory, or must not be read
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return Header.of(file)
    state = torch.load(path, map_location="meta", weights_only=True)
    state = state.get("state_dict", state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError("no tensors by name")
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return Header({name: tuple(tensor.shape) for name, tensor in tensors.items()}, kinds)


def codes(kinds: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Matrices stored in a type that only quantised codes have, and that type.

    Args:
        kinds: by name, as in `Header`.
    """
    return {name: kind for name, kind in kinds.items() if len(shapes[name]) in (2, 3) and _CODES.fullmatch(kind)}


def without_scales(kinds: Mapping[str, str], shapes: Shapes) -> list[str]:
    """Quantised tensors beside which no scales are stored, in the order of their names."""
    scaled = {_SCALE.split(name)[0] for name in kinds if _SCALE.search(name)}
    unscaled = []
    for name, kind in sorted(kinds.items()):
        begins = {name, *(name[: place.start()] for place in re.finditer("[._]", name))}
        is_code = _CODES.fullmatch(kind) and len(shapes[name]) > 1 and not name.endswith(("bias", "bitmask"))
        if is_code and not _SCALE.search(name) and scaled.isdisjoint(begins):
            unscaled.append(name)
    return unscaled


def check_codes(config: Mapping[str, Any], kinds: Mapping[str, str], shapes: Shapes, label: str) -> None:
    """Refuse quantised weights whose config does not declare a quantisation; those that do are `resolve`'s to refuse.

    Raises:
        CheckpointError: names them and the ways to dequantise.
    """
    first = None if stores_codes(config) else next(iter(codes(kinds, shapes).items()), None)
    if first is not None:
        problem = f"its weights are quantised ({first[1]}, the first is '{first[0]}') and cannot be averaged"
        raise CheckpointError(f"{problem}; config.json does not say so", where=label, remedy=UNDECLARED)


# --- folders ---------------------------------------------------------------------------------------------------------

Faults = Iterator[tuple[str, CheckpointError]]
"""The kind of each, a few words, and the error; it is in the file that the error's place ends with."""


class Contents:
    """A model's folder, read when asked for and once.

    Attributes:
        damaged: reading errors by file; complete once the file has been read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}
        self._json: dict[str, dict[str, Any]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """Files of the folder, those of its folders too, by their paths in it; nothing that is hidden."""
        paths = glob.iglob("**", root_dir=self.folder, recursive=True)
        return frozenset(path.replace(os.sep, "/") for path in paths if os.path.isfile(self.path(path)))

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(self.path(name))

    def text(self, name: str) -> str | None:
        """A text file; None if it is missing or not text."""
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            self.damaged[name] = short(error)
            return None

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; empty where the file is missing, damaged, or holds something else."""
        if name not in self._json:
            try:
                self._json[name] = read_json(self.path(name)) if self.has(name) else {}
            except CheckpointError as error:
                self.damaged[name], self._json[name] = error.what, {}
        return self._json[name]

    @property
    def config(self) -> dict[str, Any]:
        return self.mapping(CONFIG)

    @property
    def is_adapter(self) -> bool:
        return self.has(ADAPTER_CONFIG) and not self.has(CONFIG)

    @cached_property
    def opened(self) -> str | None:
        """The weight file, or index of shards, that mergekit opens; None if there is none.

        It takes safetensors before pickles, and an index before a single file.
        """
        return next(filter(self.has, (stem + end for stem in WEIGHT_FILES for end in (INDEX, ""))), None)

    @property
    def index(self) -> str | None:
        """The index of shards that is read."""
        return self.opened if self.opened and self.opened.endswith(INDEX) else None

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Shards by tensor names, from the index; empty if it is absent or damaged."""
        if self.index is None:
            return {}
        shards = self.mapping(self.index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(map(_is_inside, shards.values())):
            problem = "has no weight_map of names and files, or names one outside of its directory"
            self.damaged.setdefault(self.index, problem)
            return {}
        return shards

    @cached_property
    def shards(self) -> list[str]:
        """Weight files with shard names, whether or not the index has them."""
        return sorted(filter(SHARD.fullmatch, os.listdir(self.folder)))

    @property
    def single(self) -> str | None:
        """The single weight file that is read, or would be without the index."""
        stem = (self.opened or WEIGHT_FILES[0]).removesuffix(INDEX)
        return stem if self.has(stem) else None

    @cached_property
    def weight_files(self) -> list[str]:
        """The weight files that are read: those of the index, else the single one, else all shards."""
        if self.weight_map:
            return sorted(filter(self.has, set(self.weight_map.values())))
        return [self.single] if self.single else self.shards

    @cached_property
    def by_file(self) -> dict[str, Header]:
        """The headers of the weight files that can be read, by name."""
        return {name: head for name in self.weight_files if (head := self.header(name)) is not None}

    def header(self, name: str) -> Header | None:
        """The header of a weight file; None if it is damaged."""
        try:
            return header(self.path(name))
        except CheckpointError as error:
            self.damaged[name] = error.what
            return None

    @cached_property
    def files(self) -> dict[str, str]:
        """The weight file of each tensor; of one in two files, the later."""
        return {tensor: name for name, head in self.by_file.items() for tensor in head.shapes}

    @cached_property
    def copies(self) -> dict[str, list[str]]:
        """The weight files of each tensor that several hold; transformers reads the last, mergekit the index's."""
        holders = holders_of({file: head.shapes for file, head in self.by_file.items()})
        return {name: files for name, files in holders.items() if len(files) > 1}

    @cached_property
    def whole(self) -> Header:
        """The header of all weight files that are read."""
        heads = {name: self.by_file[file] for name, file in self.files.items()}
        kinds = {name: head.kinds[name] for name, head in heads.items()}
        return Header({name: head.shapes[name] for name, head in heads.items()}, kinds)

    @cached_property
    def quantisation(self) -> str:
        """How the weights are quantised: method, or type of the codes; empty where they are numbers."""
        kinds, shapes = self.whole.kinds, self.whole.shapes
        settings = stores_codes(self.config)
        if settings and any(map(_CODES.fullmatch, kinds.values())):
            return str(settings.get("quant_method")) if isinstance(settings, dict) else "quantization_config"
        return next((f"{kind}, the first is '{name}'" for name, kind in codes(kinds, shapes).items()), "")

    @cached_property
    def without_scales(self) -> list[str]:
        """Quantised tensors without scales, of methods that store them; empty for others."""
        known = not stores_codes(self.config) or self.quantisation in _SCALED
        return without_scales(self.whole.kinds, self.whole.shapes) if self.quantisation and known else []

    @property
    def whole_files(self) -> bool:
        """Whether every weight file that is named could be read."""
        named = set(self.weight_map.values()) or set(self.weight_files)
        return bool(named) and named == self.by_file.keys()

    def faults(self) -> Faults:
        """Why the weights cannot be read, or why mergekit and transformers would read different ones."""
        if self.opened is None and self.shards:
            name = re.sub(r"-\d+-of-\d+", "", self.shards[0]) + INDEX
            yield "no index", self._error(f"{len(self.shards)} shards, but no index names them", name, MEND)
        elif self.opened is None:
            yield "no weights", self._error("there are no weights", WEIGHT_FILES[0])
        for file, other in self._other_sets() if self.opened is not None else ():
            yield SETS, self._error(f"two sets of weights: {self.opened} and {other}", file, APART)
        if self.index is not None:
            yield from self._index_faults(self.index)
        for name in (name for name in self.weight_files if name not in self.by_file):
            yield "damaged weight file", self._error(self.damaged[name], name)
        for name, files in self.copies.items():
            if files[-1] != self.weight_map.get(name):
                problem = f"more than one set of weights: tensor '{name}' is in {files[0]} and in {files[-1]}"
                yield "tensor twice", self._error(problem, files[-1], ONE_COPY)
                return

    def _other_sets(self) -> Iterator[tuple[str, str]]:
        """The files that name weights which mergekit or transformers would read in place of the opened, and these."""
        if self.has(ADAPTER_CONFIG):
            yield ADAPTER_CONFIG, ADAPTER_CONFIG
        if (stated := self.config.get("transformers_weights") or self.opened) != self.opened:
            yield CONFIG, f"{stated} (config.json's transformers_weights)"
        if self.index and self.single and set(self.weight_map.values()) - {self.single}:
            yield self.single, self.single

    def _error(self, problem: str, file: str, remedy: str = AGAIN) -> CheckpointError:
        return CheckpointError(problem, where=self.path(file), remedy=remedy)

    def _index_faults(self, index: str) -> Faults:
        """An index that is damaged, or does not match its shards."""
        if not self.weight_map:
            yield "damaged index", self._error(self.damaged[index], index)
        elif absent := sorted(shard for shard in set(self.weight_map.values()) if not self.has(shard)):
            yield "missing shard", self._error(f"names shards that are not there: {named(absent)}", index)
        elif self.whole_files:
            wrong = [name for name, shard in self.weight_map.items() if name not in self.by_file[shard].shapes]
            if wrong:
                problem = f"puts {len(wrong)} tensors, '{wrong[0]}' first, into files that do not hold them"
                yield "index disagrees", self._error(problem, index, MEND)


def holders_of(names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Files by the tensors that they hold, from the tensors by file."""
    holders = defaultdict[str, list[str]](list)
    for file, tensors in names.items():
        for tensor in tensors:
            holders[tensor].append(file)
    return dict(holders)


def _is_inside(file: object) -> bool:
    return isinstance(file, str) and not os.path.isabs(file) and ".." not in re.split(r"[/\\]", file)


def tensor_files(folder: str) -> dict[str, str]:
    """Each tensor of a directory and the file that holds it, which mergekit and transformers would both open.

    Raises:
        CheckpointError: there are no weights, or the first of their faults.
    """
    contents = Contents(folder)
    if contents.opened is None:
        refuse_adapter(folder)
    for _, error in contents.faults():
        raise error
    return contents.weight_map or dict.fromkeys(contents.files, contents.weight_files[0])


def check_classes(config: Mapping[str, Any], label: str) -> None:
    """Check that a config's `architectures` is absent or a list of names.

    Raises:
        CheckpointError: it is something else.
    """
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list | tuple) and all(isinstance(n, str) for n in classes)):
        problem = f"its config's 'architectures' is {short(repr(classes))}, not a list of classes"
        raise CheckpointError(problem, where=label, remedy="name the model's class, as ['LlamaForCausalLM']")


def check_config(folder: str) -> None:
    """Check that a config does not claim more layers or experts than its files can hold, and names classes.

    Raises:
        CheckpointError: names the entry; or config.json is missing or damaged.
    """
    contents, parts = Contents(folder), [read_json(os.path.join(folder, CONFIG))]
    check_classes(parts[0], folder)
    tensors = len(contents.weight_map or contents.files)
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if _COUNT.fullmatch(name) and isinstance(value, int | float) and value > max(tensors, _PLAUSIBLE):
                problem = f"'{name}' is {value:.15g} in config.json, but the weight files hold {tensors} tensors"
                raise CheckpointError(problem, where=folder, remedy="config.json is damaged, or that of another model")
