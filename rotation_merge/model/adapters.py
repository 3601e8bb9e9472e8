"""LoRA adapters on disk: the change of each weight of the base.

A weight W becomes W + s B A with s = alpha / r (Hu and others, 2021), s = alpha / sqrt(r) (rsLoRA: Kalajdzievski,
2023), or m (W + s B A) / |W + s B A| row by row (DoRA: Liu and others, 2024, equation 5). Names and shapes are those of
the peft library. Tensors are read when they are asked for, and nothing is kept.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.headers import ADAPTER_CONFIG, Shapes, file_shapes, holds_model, read_json, tensor_files
from rotation_merge.model.low_rank import LowRank

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_FILES = [ADAPTER_CONFIG, *WEIGHTS]

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

_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>A|B|magnitude)(?:_vector)?(?:\.(?P<leaf>weight|bias))?"
)


def is_adapter(path: str) -> bool:
    """Whether a directory holds an adapter and no model.

    Raises:
        CheckpointError: it holds both.
    """
    has_config = os.path.isfile(os.path.join(path, ADAPTER_CONFIG))
    if has_config and holds_model(path):
        tensor_files(path)
    return has_config


@dataclass(frozen=True)
class Change:
    """An adapter's change of one parameter, by the names of the tensors in its file.

    Attributes:
        a, b: the factors A (r, in) and B (out, r); of an embedding, in = tokens and out = width.
        magnitude: DoRA's m, (out,).
        shift: vector that is added, `scale` times, to a bias.
        value: replaces the parameter before any other change.
        embedding: W is (in, out), not (out, in).
    """

    a: str | None = None
    b: str | None = None
    magnitude: str | None = None
    shift: str | None = None
    value: str | None = None
    scale: float = 1.0
    embedding: bool = False


class Adapter:
    """A LoRA adapter in a directory.

    Attributes:
        shapes: of the tensors in its file.
        changes: by the name of the parameter (`model.layers.0.self_attn.q_proj.weight`), as the model's class has it.
    """

    def __init__(self, path: str) -> None:
        """Read the adapter of a directory.

        Args:
            path: the directory.

        Raises:
            CheckpointError: it holds no adapter, a damaged one, or one that is more than W + s B A.
        """
        self.path = path
        if not os.path.isfile(os.path.join(path, ADAPTER_CONFIG)):
            raise CheckpointError("there is no LoRA adapter", where=path, remedy=f"{ADAPTER_CONFIG} is needed")
        self.config: dict[str, Any] = read_json(os.path.join(path, ADAPTER_CONFIG))
        self._check_config()
        self.shapes: Shapes = file_shapes(self._file)
        self.changes = self._read_names()

    def __reduce__(self) -> tuple[Any, ...]:
        return Adapter, (os.path.abspath(self.path),)

    @property
    def rank(self) -> int:
        """The largest rank of its factors, which the carried adapter may have everywhere; one if it has none."""
        return max((self.shapes[c.a][0] for c in self.changes.values() if c.a is not None), default=1)

    def low_rank(self, name: str) -> LowRank | None:
        """The low-rank change of a parameter, the factors as they are stored; None: it has none."""
        change = self.changes[name]
        if change.a is None or change.b is None:
            return None
        return LowRank(self.tensor(change.a), self.tensor(change.b), change.scale, change.embedding)

    def tensor(self, key: str) -> Tensor:
        """One tensor of the file.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        tensor: Tensor = self._loader.get_tensor(key)
        if not all_finite([tensor]):
            raise damaged(f"'{key}' holds NaN or infinity", self.path)
        return tensor

    def refusal(self, problem: str) -> CheckpointError:
        return CheckpointError(
            problem, where=self.path, remedy="merge it into its base model with peft, and name the result"
        )

    @cached_property
    def _file(self) -> str:
        weights_file = next((file for name in WEIGHTS if os.path.isfile(file := os.path.join(self.path, name))), None)
        if weights_file is None:
            raise CheckpointError("the adapter has no weights", where=self.path, remedy=f"{WEIGHTS[0]} is needed")
        return weights_file

    @cached_property
    def _loader(self) -> LazyTensorLoader:
        return LazyTensorLoader(ShardedTensorIndex.from_file(self._file), lazy_unpickle=False)

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
            stem = key.removeprefix("base_model.model.")
            match = _FACTOR.fullmatch(stem)
            if match is None:
                if "lora_" in stem or ".token_adapter." in stem:
                    raise self.refusal(f"tensor '{key}' is not part of W + s B A")
                parts.setdefault(re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", stem), {})["value"] = key
            elif match["leaf"] == "bias":
                parts.setdefault(f"{match['module']}.bias", {})["shift"] = key
            else:
                change = parts.setdefault(f"{match['module']}.weight", {})
                change[match["part"].lower()] = key
                change["embedding"] = bool(match["embedding"]) or change.get("embedding", False)
        if not parts:
            raise damaged("it holds no tensors", self.path)
        return {name: self._scaled(name, Change(**change)) for name, change in parts.items()}

    def _scaled(self, name: str, change: Change) -> Change:
        """The change with its scale s, which may differ between modules; its factors are checked."""
        if (change.a is None) != (change.b is None) or (change.magnitude and change.a is None):
            raise damaged(f"'{name}' has one factor without the other", self.path)
        key = change.b or change.shift
        if key is None:
            return change
        factor = change.b or key.removesuffix("bias") + "weight"
        if factor not in self.shapes:
            raise damaged(f"'{key}' has no matching '{factor}'", self.path)
        a, b = self.shapes.get(str(change.a)), self.shapes[factor]
        if len(b) < 2 or (a is not None and (len(a) < 2 or a[0] != b[1] or any(n != 1 for n in b[2:]))):
            raise damaged(f"the factors of '{name}' are {list(a or ())} and {list(b)}", self.path)
        return replace(change, scale=lora_scale(self.config, name.rpartition(".")[0], b[1], self.path))


def lora_scale(config: Mapping[str, Any], module: str, rank: int, path: str) -> float:
    """Factor of the product of a module's factors, by peft's config.

    Raises:
        CheckpointError: the config of the adapter at `path` gives none.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise damaged("'alpha_pattern' is not a mapping", path)
    try:
        special = [alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]
    except re.error as error:
        raise damaged(f"'alpha_pattern' holds a pattern that cannot be read ({error})", path) from error
    alpha = [*special, config.get("lora_alpha")][0]
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha)
    if not number or rank < 1:
        raise damaged(f"lora_alpha of '{module}' is {alpha!r}", path)
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def damaged(problem: str, path: str) -> CheckpointError:
    return CheckpointError(problem, where=path, remedy="the adapter is damaged; download it again")
