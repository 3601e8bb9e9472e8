"""LoRA adapters, read and written: the change of each weight of the base.

A weight W becomes W + s B A with s = alpha / r (Hu and others, 2021), s = alpha / sqrt(r) (rsLoRA: Kalajdzievski,
2023), or m (W + s B A) / |W + s B A| row by row (DoRA: Liu and others, 2024, equation 5). Folders have the names and
shapes of the peft library; single files are those of kohya's scripts (`lora_down`, `lora_up`, `alpha`) and of diffusers
(`lora_A`, `lora_B`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from zipfile import is_zipfile

import torch
from mergekit.common import ModelPath
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output, replacing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.contents import ADAPTER_CONFIG, Contents, Shapes, header, read_json, tensor_files
from rotation_merge.model.folder import ShardReader, fetched
from rotation_merge.model.hub import check_adapter
from rotation_merge.model.low_rank import LowRank
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.model.writing import staged, write_files
from rotation_merge.record import MergeReport

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NON_LORA = "non_lora_state_dict.bin"
"""Whole weights that trainers in LLaVA's manner write beside an adapter, by names of peft's model in training."""
ADAPTER_FILES = [ADAPTER_CONFIG, *WEIGHTS, NON_LORA]
SUFFIX = ".safetensors"
PREFIX = "base_model.model."
BASE_LAYER = ".base_layer."
"""In the names of weights of the base that peft stores where an embedding or a head has factors."""

PEFT, KOHYA, DIFFUSERS = "peft", "kohya", "diffusers"
FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>A|B|magnitude|down|up)(_vector)?(\.(?P<leaf>weight|bias))?"
)
"""Names of the factors A and B, which kohya calls down and up, and of what stands beside them."""
PARTS = {"A": "a", "down": "a", "B": "b", "up": "b", "magnitude": "magnitude"}

HEADER_CONFIG = "lora_adapter_metadata"
"""Name under which diffusers stores peft's configs in a file's header, by `PREFIX.ENTRY`."""

BEYOND = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora"),
)
"""Entries of an adapter's config that make it more than W + s B A."""

B_LAYOUT, GROUPED = "lora_B_layout", "grouped_by_expert"
"""Entry that says how B of all experts in one is packed: (out, experts, r); else as peft has it: (out, r, experts)."""

SHIFTS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin (`init_lora_weights`) that also change the base weights, which the adapter alone does not tell."""


def is_adapter(work: object) -> bool:
    """Whether work is the folder of an adapter, not a model.

    Raises:
        CheckpointError: the folder holds both.
    """
    folder = str(work) if isinstance(work, str | os.PathLike) else ""
    has_config = bool(folder) and os.path.isfile(os.path.join(folder, ADAPTER_CONFIG))
    if has_config and Contents(folder).opened:
        tensor_files(folder)
    return has_config


def _name_in_training(key: str) -> str:
    """The parameter of the base that a parameter of peft's model in training is; empty: factors, or an unused copy."""
    if ".original_module." in key or "lora_" in key:
        return ""
    name = re.sub(r"^(module\.)?(base_model\.(model\.)?)?", "", key)
    return re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", name)


@dataclass(frozen=True)
class Change:
    """An adapter's change of one parameter, by the names of the tensors in its file (empty: it has none).

    Attributes:
        name: of the parameter, as the adapter has it.
        a, b: the factors A (r, in) and B (out, r); of an embedding, in = tokens and out = width.
        magnitude: DoRA's m, (out,).
        shift: vector that is added, `scale` times, to a bias.
        value: replaces the parameter before any other change.
        embedding: W is (in, out), not (out, in).
    """

    name: str
    a: str = ""
    b: str = ""
    magnitude: str = ""
    shift: str = ""
    value: str = ""
    scale: float = 1.0
    embedding: bool = False

    @property
    def module(self) -> str:
        """Path of the changed module."""
        return self.name.removesuffix(".weight")

    @property
    def bias(self) -> str:
        """peft's name for a bias of this module (`lora_bias`), which the adapter may have."""
        return self.b.removesuffix("weight") + "bias"


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """A LoRA adapter: its config, its tensors by the names of its form, and the files beside them.

    Attributes:
        config: peft's; empty for single files.
        tensors: those of a stored adapter are read each time that they are asked for.
        form: `peft`, a folder; `kohya` or `diffusers`, a single file without a config.
        path: where it is stored; empty: in memory.
        non_lora: names of those tensors that stand in a file of whole weights beside it (`NON_LORA`).
        beside: other files by name.
        notes: of the transfer that made it.
        report: of that transfer.
        names: of a base's parameters, by those of a single file (see `model/adapter_names.py`).
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    form: str = PEFT
    path: str = ""
    non_lora: frozenset[str] = frozenset()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    report: MergeReport | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str) -> Adapter:
        """Read the names and the config of an adapter.

        Args:
            path: the directory, or a `.safetensors` file.

        Raises:
            CheckpointError: it holds no adapter, a damaged one, or one that is more than W + s B A.
        """
        single = path.endswith(SUFFIX) and os.path.isfile(path)
        config, files = os.path.join(path, ADAPTER_CONFIG), [os.path.join(path, name) for name in WEIGHTS]
        if not single and not os.path.isfile(config):
            remedy = f"{ADAPTER_CONFIG} is needed" if os.path.isdir(path) else f"name a folder or a {SUFFIX} file"
            raise CheckpointError("there is no LoRA adapter", where=path, remedy=remedy)
        adapter = cls({} if single else read_json(config), {}, path=path)
        if not single:
            adapter._check_config()
        file = path if single else next(filter(os.path.isfile, files), None)
        if file is None:
            raise CheckpointError("the adapter has no weights", where=path, remedy=f"{WEIGHTS[0]} is needed")
        tensors = adapter._stored(file)
        kohya = any(".lora_down." in key for key in tensors)
        adapter = replace(adapter, tensors=tensors, form=PEFT if not single else KOHYA if kohya else DIFFUSERS)
        if not single and os.path.isfile(further := os.path.join(path, NON_LORA)):
            adapter = adapter._with_whole_weights(further)
        _ = adapter.changes  # which refuses tensors of other kinds
        return adapter

    def __repr__(self) -> str:
        rank, base = self.config.get("r"), self.base
        return f"Adapter({len(self.tensors)} tensors, rank {rank}, for {base})"

    @cached_property
    def shapes(self) -> Shapes:
        """Of its tensors, by name."""
        return as_tensors(self.tensors).shapes

    @cached_property
    def changes(self) -> Mapping[str, Change]:
        """By the name of the parameter (`model.layers.0.self_attn.q_proj.weight`), as the model's class has it."""
        parts: dict[str, dict[str, Any]] = {}
        for key in sorted(self.shapes, key=lambda key: (key not in self.non_lora, key)):
            stem = key.removeprefix(PREFIX) if self.form == PEFT else key
            if match := FACTOR.fullmatch(stem):
                module, embedding, part, leaf = match.group("module", "embedding", "part", "leaf")
                change = parts.setdefault(f"{module}.{leaf or 'weight'}", {})
                change["embedding"] = change.get("embedding", False) or bool(embedding)
                change["shift" if leaf == "bias" else PARTS[part]] = key
            elif self.form == PEFT and "lora_" not in stem and ".token_adapter." not in stem:
                if name := _name_in_training(stem):
                    parts.setdefault(name, {})["value"] = key
            elif self.form == PEFT or not stem.endswith(".alpha"):
                raise self.refusal(f"tensor '{key}' is not part of W + s B A")
        if not parts:
            raise self._damaged("it holds no tensors")
        changes = [self._scaled(Change(name, **change)) for name, change in parts.items()]
        named = [replace(change, name=self.names.get(change.name, change.name)) for change in changes]
        return {change.name: change for change in named}

    @property
    def base(self) -> str | None:
        """The name of the base that it was trained on, if it is stored."""
        return self.config.get("base_model_name_or_path")

    @property
    def beyond_peft(self) -> list[str]:
        """What peft leaves out, or reads otherwise than it was trained."""
        reasons = [f"has {NON_LORA} beside it"] if self.non_lora else []
        return reasons + (["packs B of its experts in another order"] if self.config.get(B_LAYOUT) == GROUPED else [])

    @property
    def rank(self) -> int:
        """The largest rank of its factors, which the carried adapter may have everywhere; one if it has none."""
        return max((self.shapes[change.a][0] for change in self.changes.values() if change.a), default=1)

    def low_rank(self, change: Change) -> LowRank:
        """A change that has factors, these as they are stored."""
        magnitude = self.tensors[change.magnitude] if change.magnitude else None
        return LowRank(self.tensors[change.a], self.tensors[change.b], change.scale, change.embedding, magnitude)

    def refusal(self, problem: str) -> CheckpointError:
        """The error of an adapter that is more than W + s B A."""
        remedy = "merge it into its base model with peft, and name the result"
        return CheckpointError(problem, where=self.path, remedy=remedy if self.config else "name a plain LoRA")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(problem, where=self.path, remedy="the adapter is damaged; download it again")

    def _check_config(self) -> None:
        kind, begun = self.config.get("peft_type"), str(self.config.get("init_lora_weights"))
        if kind != "LORA":
            raise self.refusal(f"is an adapter of kind {kind}, not a LoRA")
        if entry := next(filter(self.config.get, BEYOND), None):
            raise self.refusal(f"'{entry}' is set, which makes it more than W + s B A")
        if (layout := self.config.get(B_LAYOUT)) not in (None, "rank_major", GROUPED):
            raise self.refusal(f"'{B_LAYOUT}' is '{layout}', which is no known order of B")
        if begun.lower().startswith(SHIFTS_BASE):
            raise self.refusal(f"it starts from '{begun}', which changes the base weights")

    def _with_whole_weights(self, file: str) -> Adapter:
        """The adapter with the whole weights of a file beside it, under the names that peft stores them by."""
        names = {f"{PREFIX}{name}": key for key in header(file).shapes if (name := _name_in_training(key))}
        whole = self._stored(file, lazy_unpickle=is_zipfile(file)).renamed(names).only(names)
        tensors = whole.replaced(self.tensors)
        return replace(self, tensors=tensors, non_lora=frozenset(names.keys() - self.shapes.keys()))

    def _stored(self, file: str, lazy_unpickle: bool = False) -> Tensors:
        """The tensors of its file, read when they are asked for; NaN and infinity are refused."""
        (folder, name), head = os.path.split(file), header(file)
        reader = ShardReader(folder, {key: (name, key) for key in head.shapes}, lazy_unpickle)

        def checked(key: str, tensor: Tensor) -> Tensor:
            if not all_finite([tensor]):
                raise self._damaged(f"'{key}' holds NaN or infinity")
            return tensor

        return Tensors(head.shapes, head.dtypes, by_name(reader)).map(checked)

    def _scaled(self, change: Change) -> Change:
        """The change with its scale s, which may differ between modules; its factors are checked."""
        if bool(change.a) != bool(change.b) or (change.magnitude and not change.a):
            raise self._damaged(f"'{change.module}' has one factor without the other")
        key = change.b or change.shift
        if not key:
            return change
        factor = change.b or key.removesuffix("bias") + "weight"
        a, b = self.shapes.get(change.a, ()), self.shapes.get(factor, ())
        if len(a) > 2 and len(b) > 2 and b[1] > 0 and a[0] > b[1] and a[0] % b[1] == 0:
            problem = f"changes '{change.module}', a convolution in groups, which peft cannot merge either"
            raise CheckpointError(problem, where=self.path, remedy="train an adapter without that module")
        if len(b) < 2 or b[1] < 1 or any(n != 1 for n in b[2:]) or (change.a and (len(a) < 2 or a[0] != b[1])):
            raise self._damaged(f"the factors of '{change.module}' are {list(a)} and {list(b)}")
        if change.magnitude and math.prod(self.shapes[change.magnitude]) != b[0]:
            shape = list(self.shapes[change.magnitude])
            raise self._damaged(f"'{change.magnitude}' is {shape}, one factor of '{change.module}' {list(b)}")
        return replace(change, scale=self.scale(change.name.rpartition(".")[0], b[1]))

    def scale(self, module: str, rank: int) -> float:
        """Factor of the product of a module's factors, by peft's config, or by what a single file says.

        Raises:
            CheckpointError: there is none.
        """
        config = self.config if self.form == PEFT else self._config_in_file(module, rank)
        try:
            patterns = (config.get("alpha_pattern") or {}).items()
            special = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", module))
            stated: Any = next(special, config.get("lora_alpha"))
            alpha = float(stated)
            if math.isfinite(alpha) and rank > 0:
                return alpha / (rank**0.5 if config.get("use_rslora") else rank)
            reason = f"lora_alpha of '{module}' is {alpha}, its rank {rank}"
        except (AttributeError, TypeError, ValueError, re.error) as error:
            reason = str(error)
        raise self._damaged(f"'lora_alpha' or 'alpha_pattern' gives no number for '{module}' ({reason})")

    def _config_in_file(self, module: str, rank: int) -> dict[str, Any]:
        """Config of a module in a single file: its `alpha`, else what stands in the header, else the scale 1."""
        if f"{module}.alpha" in self.shapes:
            return {"lora_alpha": self.tensors[f"{module}.alpha"].squeeze().tolist()}
        try:
            stored = dict(json.loads(header(self.path).metadata.get(HEADER_CONFIG, "{}")))
        except (TypeError, ValueError) as error:
            raise self._damaged(f"'{HEADER_CONFIG}' in its header is no mapping") from error
        prefix = module.partition(".")[0] + "."
        config = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)} or stored
        return {"lora_alpha": rank, **config}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter atomically: the two files that peft reads, and the files beside them.

        Args:
            folder: new, or empty.

        Raises:
            CheckpointError: the folder holds something, or is a file.
        """
        out = os.fspath(folder)
        check_output(Output(out, FOLDER, remedy="write to a new folder"))
        self.save(out)

    def save(self, out: str) -> None:
        """Write the adapter atomically to a place that the caller has checked: a folder, or one `.safetensors` file.

        Raises:
            CheckpointError: the name is that of a file, and the form a folder, or the other way round.
        """
        if out.endswith(SUFFIX) != (self.form != PEFT):
            kind = f"a {SUFFIX} file" if self.form != PEFT else "a folder"
            raise CheckpointError(f"adapters of {self.form} are {kind}", where=out, remedy=f"name {kind} to write")
        with staged(out) if self.form == PEFT else replacing(out) as place:
            self.write(place)

    def write(self, place: str) -> None:
        """Write the files into a folder, or the one file, that the caller puts into its place."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        if self.form == PEFT:
            os.makedirs(place, exist_ok=True)
            config = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
            write_files(place, {ADAPTER_CONFIG: config.encode(), **self.beside})
            place = os.path.join(place, WEIGHTS[0])
        save_file(tensors, place, {"format": "pt"})


def plain_adapter(path: str) -> Adapter:
    """A LoRA adapter of factors alone: a folder or hub name in peft's format, or a file in kohya's or diffusers'.

    Weights of the base that peft stores beside the factors of an embedding or a head may stand in it.

    Raises:
        CheckpointError: it is none, is damaged, or is more than ``W + s B A`` for each map.
    """
    check_adapter(path)
    place = path if os.path.exists(path) else fetched(ModelPath(path=path), patterns=ADAPTER_FILES)
    adapter = Adapter.open(place)
    beyond = {"target_parameters": "of stacked experts", "use_dora": "a DoRA"}
    problems = [f"{NON_LORA} beside it holds whole weights"] if adapter.non_lora else []
    problems += [f"it is {words} ('{entry}')" for entry, words in beyond.items() if adapter.config.get(entry)]
    for change in adapter.changes.values():
        if change.magnitude or change.shift or not change.a or (change.value and BASE_LAYER not in change.value):
            problems.append(f"changes '{change.name}' otherwise than by two factors")
    if problems:
        remedy = "merge it into its base model first, then merge the models"
        raise CheckpointError(f"is more than factors A and B: {problems[0]}", where=path, remedy=remedy)
    return adapter


def adapter_of(
    maps: Mapping[str, LowRank],
    config: Mapping[str, Any],
    beside: Mapping[str, Tensor],
    form: str = PEFT,
    rank: int | None = None,
) -> Adapter:
    """An adapter of factors alone, at the scale 1.

    Args:
        maps: by module.
        config: of peft, whatever its ranks and scales.
        beside: further tensors, such as weights of the base that peft stores beside factors, by peft's names.
        rank: that the config names for all maps but those of another; None: the largest.
    """
    most = rank or max(factors.rank for factors in maps.values())
    if form == DIFFUSERS:  # whose loader assumes a single rank
        maps = {module: factors.of_rank(most) for module, factors in maps.items()}
    names, tensors = ("lora_down", "lora_up") if form == KOHYA else ("lora_A", "lora_B"), dict[str, Tensor]()
    for module, factors in maps.items():
        stem = f"{PREFIX if form == PEFT else ''}{module}"
        for name, factor in zip(names, (factors.a, factors.scale * factors.b), strict=True):
            leaf = name.replace("lora_", "lora_embedding_") if factors.embedding else f"{name}.weight"
            tensors[f"{stem}.{leaf}"] = factor
        if form == KOHYA:
            tensors[f"{module}.alpha"] = torch.tensor(float(factors.rank))  # bfloat16 has no 257
    if form != PEFT:
        return Adapter({}, tensors, form=form)
    ranks = {re.escape(module): factors.rank for module, factors in maps.items() if factors.rank != most}
    everywhere = dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"))
    started = {"init_lora_weights": True, "inference_mode": True, "target_modules": sorted(maps)}
    scales = {"r": most, "lora_alpha": most, "use_rslora": False, "rank_pattern": ranks, "alpha_pattern": dict(ranks)}
    return Adapter({**config, **scales, **everywhere, **started}, {**beside, **tensors})
