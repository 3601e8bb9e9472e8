"""The change of a whole model as a new LoRA in peft's format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.carrying.delta import Change, Delta, is_bias
from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.adapters import PREFIX, Adapter, adapter_of
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.fold import weight_key
from rotation_merge.model.forms import names_in
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of

NOTHING_LEFT = 1e-4
"""Share of a change's largest singular value below which singular values are rounding, 1e-8 of its squared norm."""


@dataclass(frozen=True)
class NewAdapter:
    """A change as an adapter of a base.

    Attributes:
        places: parameters as the class of the base names them, by tensor.
        low: by tensor, the changes of matrices.
        vectors: by tensor, the changes of biases and norms.
        rank: of every factor, at most.
        share: of the whole change's squared norm that is in it.
    """

    base: View
    places: Mapping[str, str]
    low: Mapping[str, LowRank]
    vectors: Mapping[str, Tensor]
    rank: int
    share: float

    @cached_property
    def delta(self) -> Delta:
        """The change that it makes, with its factors."""
        tensors = self.base.tensors
        tuned = tensors.replaced({name: tensors[name].double() + change for name, change in self.vectors.items()})
        return Delta(self.base, tensors, tuned, low=self.low, precision=torch.float64)

    @property
    def weights(self) -> Adapter:
        """The adapter as it is written: biases of its maps in peft's `lora_bias`, norms in `modules_to_save`."""
        base, infos = self.base, self.base.architecture.named()
        maps = {_module(self.places[name]): low.to(torch.float32) for name, low in self.low.items()}
        vectors = {_module(self.places[name]): change for name, change in self.vectors.items()}
        norms, biased = sorted(vectors.keys() - maps.keys()), bool(vectors.keys() & maps.keys())
        tuned, parts = self.delta.tuned, {n: place for n, place in self.places.items() if _module(place) in norms}
        beside = {f"{PREFIX}{place}": tuned[name].to(base.dtypes[name]) for name, place in parts.items()}
        for module, factors in maps.items() if biased else ():
            beside[f"{PREFIX}{module}.lora_B.bias"] = vectors.get(module, torch.zeros(len(factors.b))).float()
        classes = base.config.get("architectures") or [""]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if classes[0].endswith("CausalLM") else None,
            "base_model_name_or_path": str(base.reference),
            "modules_to_save": norms or None,
            "lora_bias": biased,
            "fan_in_fan_out": any(transposed(infos[name]) and not low.embedding for name, low in self.low.items()),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        return adapter_of(maps, config, beside, rank=self.rank)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def new_adapter(delta: Delta, places: Mapping[str, str], rank: int, trained: Collection[str] = ()) -> NewAdapter:
    """A change as a new adapter of the base that it is for.

    Matrices are cut down to `rank`. Beside a `lora_bias`, which peft has not for embeddings, these are left as they
    are; so are tensors without a module of their own in the model's class (experts in one tensor, position tables), and
    an embedding that is the head as well: peft would change one of the two.

    Args:
        places: as `adapter_places` gives them.
        rank: of every factor, at most.
        trained: names of tensors that are given factors of the whole rank in any case.
    """
    low, vectors = dict[str, LowRank](), dict[str, Tensor]()
    total, kept, filled = 0.0, dict[str, float](), set[str]()
    for block in delta.base.architecture.blocks:
        for info in sorted(block.tensors, key=lambda info: is_bias(info.key)):
            if read_tensor(info, delta.base.tensors) is None:
                continue
            name, change, place = info.name, delta.change(block, info), places.get(info.name, "")
            whole = dense(change, info).double()
            squares = float(whole.square().sum())
            total += squares
            changes = isinstance(change, LowRank) or squares > 0 or name in trained
            if isinstance(change, Tensor):
                change = of_low_rank(whole, info, rank, name not in trained) if changes and whole.ndim > 1 else whole
            if not changes or not _fits(place, change, filled):
                continue
            filled.add(place)
            kept[name] = squares - float((whole - dense(change, info)).square().sum())
            if isinstance(change, LowRank):
                low[name] = change
            else:
                vectors[name] = change
    if {_module(places[name]) for name in vectors} & {_module(places[name]) for name in low}:
        low = {name: change for name, change in low.items() if not change.embedding}
    share = sum(kept[name] for name in (*low, *vectors)) / total if total else 1.0
    return NewAdapter(delta.base, places, low, vectors, rank, share)


def _fits(place: str, change: Change, filled: Collection[str]) -> bool:
    """Whether an adapter has a place for a change: for that of a bias beside those of weights (`filled`)."""
    if isinstance(change, LowRank):
        return place.endswith(".weight")
    return change.ndim == 1 and (weight_key(place) in filled if is_bias(place) else bool(place))


def adapter_places(base: View) -> dict[str, str]:
    """Parameters as the model's class names them, by tensor; of those that an adapter may change.

    Raises:
        CheckpointError: the class of the base cannot be built.
    """
    try:
        with torch.device("meta"):
            model = base.model_class(base.transformers_config)
    except Exception as error:  # models and configs raise errors of many classes
        problem, remedy = f"its class cannot be built ({short(error)})", "carry it as a whole model, not as an adapter"
        raise CheckpointError(problem, where=base.name, remedy=remedy) from error
    infos = {name: info for name, (_, info, _) in base.architecture.places().items() if not stacks(info)}
    names = names_in(base.architecture, architecture_of(model, untie=True))
    known = {name: parameter for parameter, name in names.items() if name in infos}
    if base.tied_head is None:
        return known
    return {name: parameter for name, parameter in known.items() if infos[name].vocabulary_axis is None}


def of_low_rank(change: Tensor, info: TensorInfo, rank: int, trimmed: bool = False) -> Change:
    """The nearest change of this rank (Eckart and Young), its A like that of a fresh LoRA.

    The rows of A are orthogonal and as long as if they were drawn (uniform, 1/sqrt(in)), so that in training every
    direction learns equally fast, whatever the change has in it already. Tables of positions and tokens that belong to
    no layer (1, n, width) and convolutions of single channels (channels, 1, kernel) have no place in an adapter and
    stay whole.

    Args:
        trimmed: of the rank that the change has, where that is less.
    """
    if change.ndim > 2 and not stacks(info) and (transposed(info) or (change.shape[1] == 1 and change.ndim == 3)):
        return change
    matrix = change.mT if transposed(info) else change
    shape = matrix.shape
    if matrix.ndim > 2 and not stacks(info):
        matrix = matrix.flatten(1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    if trimmed:
        rank = min(rank, int((s > NOTHING_LEFT * s.max()).reshape(-1, s.shape[-1]).any(0).sum()))
    a, b = 3**-0.5 * v[..., :rank, :], 3**0.5 * u[..., :rank] * s[..., None, :rank]
    if matrix.shape != shape:
        a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
    embeds = transposed(info) and info.axes[0].label in ("vocabulary", "positions", "types")
    return LowRank(a, b, embedding=embeds)
