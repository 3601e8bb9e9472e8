"""LoRA adapters on disk: the change of each weight of the base.

A weight W becomes W + s B A with s = alpha / r (Hu and others, 2021), s = alpha / sqrt(r) (rsLoRA: Kalajdzievski,
2023), or m (W + s B A) / |W + s B A| row by row (DoRA: Liu and others, 2024, equation 5). Folders have the names and
shapes of the peft library; single files are those of kohya's scripts (`lora_down`, `lora_up`, `alpha`) and of diffusers
(`lora_A`, `lora_B`). Tensors are read when they are asked for, and nothing is kept.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.contents import ADAPTER_CONFIG, Contents, Shapes, header, read_json, tensor_files
from rotation_merge.model.folder import ShardReader
from rotation_merge.model.low_rank import LowRank

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_FILES = [ADAPTER_CONFIG, *WEIGHTS]
SUFFIX = ".safetensors"
PREFIX = "base_model.model."

PEFT, KOHYA, DIFFUSERS = "peft", "kohya", "diffusers"
FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>A|B|magnitude|down|up)(_vector)?(\.(?P<leaf>weight|bias))?"
)
"""Names of the factors A and B, which kohya calls down and up, and of what stands beside them."""
PARTS = {"A": "a", "down": "a", "B": "b", "up": "b", "magnitude": "magnitude"}

HEADER_CONFIG = "lora_adapter_metadata"
"""Name under which diffusers stores peft's configs in a file's header, by `PREFIX.ENTRY`."""

BEYOND = {
    "alora_invocation_tokens": "it acts only after certain tokens",
    "arrow_config": "it chooses among experts token by token",
    "kasa_config": "KaSA changes the base weights",
    "layer_replication": "it repeats layers",
    "monteclora_config": "its weights are drawn at random",
    "trainable_token_indices": "it trains single tokens",
    "use_bdlora": "its factors are block-diagonal",
    "use_qalora": "its factors act on groups of inputs",
}
"""Entries of an adapter's config that make it more than W + s B A, with their meaning."""

SHIFTS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin (`init_lora_weights`) that also change the base weights, which the adapter alone does not tell."""


def is_adapter(path: str) -> bool:
    """Whether a directory holds an adapter and no model.

    Raises:
        CheckpointError: it holds both.
    """
    has_config = os.path.isfile(os.path.join(path, ADAPTER_CONFIG))
    if has_config and Contents(path).opened:
        tensor_files(path)
    return has_config


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


class Adapter:
    """A LoRA adapter in a directory of peft's, or in a single file.

    Attributes:
        form: `peft`, `kohya` or `diffusers`.
        config: peft's; empty for single files.
        shapes: of the tensors in its file.
        changes: by the name of the parameter (`model.layers.0.self_attn.q_proj.weight`), as the model's class has it.
    """

    def __init__(self, path: str) -> None:
        """Read the names and the config of an adapter.

        Args:
            path: the directory, or a `.safetensors` file.

        Raises:
            CheckpointError: it holds no adapter, a damaged one, or one that is more than W + s B A.
        """
        self.path = path
        self.config: dict[str, Any] = {}
        single = path.endswith(SUFFIX) and os.path.isfile(path)
        if not single and not os.path.isfile(os.path.join(path, ADAPTER_CONFIG)):
            remedy = f"{ADAPTER_CONFIG} is needed" if os.path.isdir(path) else f"name a folder or a {SUFFIX} file"
            raise CheckpointError("there is no LoRA adapter", where=path, remedy=remedy)
        if not single:
            self.config = read_json(os.path.join(path, ADAPTER_CONFIG))
            self._check_config()
        files = [path] if single else [os.path.join(path, name) for name in WEIGHTS]
        files = [file for file in files if os.path.isfile(file)]
        if not files:
            raise CheckpointError("the adapter has no weights", where=path, remedy=f"{WEIGHTS[0]} is needed")
        self._file = files[0]
        self.shapes: Shapes = header(self._file).shapes
        kohya = any(".lora_down." in key for key in self.shapes)
        self.form = PEFT if not single else KOHYA if kohya else DIFFUSERS
        self.changes = self._read_names()

    def __reduce__(self) -> tuple[Any, ...]:
        return Adapter, (os.path.abspath(self.path),)

    @property
    def base(self) -> str | None:
        """The name of the base that it was trained on, if it is stored."""
        return self.config.get("base_model_name_or_path")

    @property
    def rank(self) -> int:
        """The largest rank of its factors, which the carried adapter may have everywhere; one if it has none."""
        return max((self.shapes[change.a][0] for change in self.changes.values() if change.a), default=1)

    def low_rank(self, change: Change) -> LowRank:
        """A change that has factors, these as they are stored."""
        magnitude = self.tensor(change.magnitude) if change.magnitude else None
        return LowRank(self.tensor(change.a), self.tensor(change.b), change.scale, change.embedding, magnitude)

    def tensor(self, key: str) -> Tensor:
        """One tensor of the file.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        tensor = self._reader(key)
        if not all_finite([tensor]):
            raise self._damaged(f"'{key}' holds NaN or infinity")
        return tensor

    def refusal(self, problem: str) -> CheckpointError:
        """The error of an adapter that is more than W + s B A."""
        remedy = "name a plain LoRA, or merge this one into its base model first"
        if self.config:
            remedy = "merge it into its base model with peft, and name the result"
        return CheckpointError(problem, where=self.path, remedy=remedy)

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(problem, where=self.path, remedy="the adapter is damaged; download it again")

    @cached_property
    def _reader(self) -> ShardReader:
        folder, file = os.path.split(self._file)
        return ShardReader(folder, {key: (file, key) for key in self.shapes}, lazy_unpickle=False)

    def _check_config(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise self.refusal(f"is an adapter of kind {kind}, not a LoRA")
        for entry, meaning in BEYOND.items():
            if self.config.get(entry):
                raise self.refusal(f"'{entry}' is set: {meaning}")
        begun = self.config.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(SHIFTS_BASE):
            raise self.refusal(f"it starts from '{begun}', which changes the base weights")

    def _read_names(self) -> dict[str, Change]:
        parts: dict[str, dict[str, Any]] = {}
        for key in sorted(self.shapes):
            stem = key.removeprefix(PREFIX) if self.form == PEFT else key
            if match := FACTOR.fullmatch(stem):
                module, embedding, part, leaf = match.group("module", "embedding", "part", "leaf")
                change = parts.setdefault(f"{module}.{leaf or 'weight'}", {})
                change["embedding"] = change.get("embedding", False) or bool(embedding)
                change["shift" if leaf == "bias" else PARTS[part]] = key
            elif self.form == PEFT and "lora_" not in stem and ".token_adapter." not in stem:
                parts.setdefault(re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", stem), {})["value"] = key
            elif self.form == PEFT or not stem.endswith(".alpha"):
                raise self.refusal(f"tensor '{key}' is not part of W + s B A")
        if not parts:
            raise self._damaged("it holds no tensors")
        return {name: self._scaled(Change(name, **change)) for name, change in parts.items()}

    def _scaled(self, change: Change) -> Change:
        """The change with its scale s, which may differ between modules; its factors are checked."""
        if bool(change.a) != bool(change.b) or (change.magnitude and not change.a):
            raise self._damaged(f"'{change.module}' has one factor without the other")
        key = change.b or change.shift
        if not key:
            return change
        factor = change.b or key.removesuffix("bias") + "weight"
        if factor not in self.shapes:
            raise self._damaged(f"'{key}' has no matching '{factor}'")
        a, b = self.shapes.get(change.a, ()), self.shapes[factor]
        if len(b) < 2 or b[1] < 1 or any(n != 1 for n in b[2:]) or (change.a and (len(a) < 2 or a[0] != b[1])):
            raise self._damaged(f"the factors of '{change.module}' are {list(a)} and {list(b)}")
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
        except (AttributeError, TypeError, ValueError, re.error) as error:
            problem = f"'lora_alpha' or 'alpha_pattern' gives no number for '{module}' ({error})"
            raise self._damaged(problem) from error
        if not math.isfinite(alpha) or rank < 1:
            raise self._damaged(f"lora_alpha of '{module}' is {alpha}, its rank {rank}")
        return alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def _config_in_file(self, module: str, rank: int) -> dict[str, Any]:
        """Config of a module in a single file: its `alpha`, else what stands in the header, else the scale 1."""
        if f"{module}.alpha" in self.shapes:
            return {"lora_alpha": self.tensor(f"{module}.alpha").squeeze().tolist()}
        prefix = module.partition(".")[0] + "."
        part = {key.removeprefix(prefix): value for key, value in self._header.items() if key.startswith(prefix)}
        config = part or self._header
        return config if "lora_alpha" in config else {"lora_alpha": rank}

    @cached_property
    def _header(self) -> dict[str, Any]:
        with safe_open(self._file, framework="pt") as file:
            stored = (file.metadata() or {}).get(HEADER_CONFIG, "{}")
        try:
            return dict(json.loads(stored))
        except (TypeError, ValueError) as error:
            raise self._damaged(f"'{HEADER_CONFIG}' in its header is no mapping") from error
