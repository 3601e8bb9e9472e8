"""The change of a whole model as a new LoRA in peft's format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.carrying.delta import Change, Delta, is_bias
from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.adapters import PREFIX, Adapter, factor_config, factor_tensors
from rotation_merge.model.apply import read_tensor, unstack
from rotation_merge.model.fold import weight_key
from rotation_merge.model.forms import names_in
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of

NOTHING_LEFT = 1e-4
"""Share of a change's largest singular value below which singular values are rounding, 1e-8 of its squared norm."""

Cuts = Mapping[str, tuple[TensorInfo, Change]]
"""What an adapter changes, by parameter."""


@dataclass(frozen=True)
class NewAdapter:
    """A change as an adapter of a base.

    Attributes:
        places: parameters as the class of the base names them, by tensor.
        cuts: what it changes.
        rank: of every factor, at most.
        share: of the whole change's squared norm that is in it.
    """

    base: View
    places: Mapping[str, str]
    cuts: Cuts
    rank: int
    share: float

    @cached_property
    def delta(self) -> Delta:
        """The change that it makes, with its factors."""
        tuned, low = dict[str, Tensor](), dict[str, LowRank]()
        for info, change in self.cuts.values():
            stored = read_tensor(info, self.base.tensors)
            if isinstance(change, LowRank):
                low[info.name] = change
            elif stored is not None:
                tuned |= unstack(info, stored.double() + change)
        tensors = self.base.tensors
        return Delta(self.base, tensors, tensors.replaced(tuned), low=low, precision=torch.float64)

    @property
    def weights(self) -> Adapter:
        """The adapter as it is written."""
        base, cuts = self.base, self.cuts
        low = {place: (info, change) for place, (info, change) in cuts.items() if isinstance(change, LowRank)}
        maps = {place.removesuffix(".weight"): change.to(torch.float32) for place, (_, change) in low.items()}
        norms = [place.rpartition(".")[0] for place in cuts if place not in low and not is_bias(place)]
        tensors, biases = factor_tensors(maps), _biases(cuts)
        for module, factors in maps.items() if biases else ():
            tensors[f"{PREFIX}{module}.lora_B.bias"] = biases.get(module, torch.zeros(len(factors.b))).float()
        parts = {name: place for name, place in self.places.items() if place.rpartition(".")[0] in norms}
        changed = self.delta.tuned
        tensors |= {f"{PREFIX}{place}": changed[name].to(base.dtypes[name]) for name, place in parts.items()}
        classes = base.config.get("architectures") or [""]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if classes[0].endswith("CausalLM") else None,
            "base_model_name_or_path": str(base.reference),
            "modules_to_save": sorted(norms) or None,
            "lora_bias": bool(biases),
            "fan_in_fan_out": any(transposed(info) and not change.embedding for info, change in low.values()),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        return Adapter(factor_config(config, maps, self.rank), tensors)


def new_adapter(delta: Delta, places: Mapping[str, str], rank: int, trained: Collection[str] = ()) -> NewAdapter:
    """A change as a new adapter of the base that it is for.

    Matrices are cut down to `rank`; biases go into peft's `lora_bias`, norms into `modules_to_save`. Beside a
    `lora_bias`, which peft has not for embeddings, these are left as they are; so are tensors without a module of their
    own in the model's class (experts in one tensor, position tables), and an embedding that is the head as well: peft
    would change one of the two.

    Args:
        places: as `adapter_places` gives them.
        rank: of every factor, at most.
        trained: names of tensors that are given factors of the whole rank in any case.
    """
    cuts = dict[str, tuple[TensorInfo, Change]]()
    norms, rests = dict[str, float](), dict[str, float]()
    for block in delta.base.architecture.blocks:
        for info, change in _changes(delta, block, trained):
            cut = change
            if isinstance(change, Tensor) and len(info.axes) > 1:
                cut = of_low_rank(change, info, rank, trimmed=info.name not in trained)
            whole, place = dense(change, info), places.get(info.name, "")
            norms[place or info.name] = float(whole.square().sum())
            if _fits(place, cut, cuts):
                cuts[place], rests[place] = (info, cut), float((whole - dense(cut, info)).square().sum())
    if _biases(cuts):
        cuts = {place: cut for place, cut in cuts.items() if not (isinstance(cut[1], LowRank) and cut[1].embedding)}
    kept_norm = sum(norms[place] - rests[place] for place in cuts)
    share = kept_norm / sum(norms.values()) if any(norms.values()) else 1.0
    return NewAdapter(delta.base, places, cuts, rank, share)


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


def _changes(delta: Delta, block: Block, trained: Collection[str]) -> Iterator[tuple[TensorInfo, Change]]:
    """The tensors of a block that change, or are trained, weights before biases, in float64."""
    for info in sorted(block.tensors, key=lambda i: is_bias(i.key)):
        if read_tensor(info, delta.base.tensors) is not None:
            change = delta.change(block, info)
            if isinstance(change, LowRank):
                yield info, change
            elif info.name in trained or bool(change.any()):
                yield info, change.double()


def _fits(place: str, change: Change, cuts: Cuts) -> bool:
    """Whether an adapter has a place for a change, beside those that it has of the weights."""
    if isinstance(change, LowRank):
        return place.endswith(".weight")
    return weight_key(place) in cuts if is_bias(place) else bool(place) and change.ndim == 1


def _biases(cuts: Cuts) -> dict[str, Tensor]:
    """Changes of the biases of maps that have factors, by module."""
    biases = ((place, change) for place, (_, change) in cuts.items() if is_bias(place) and isinstance(change, Tensor))
    return {
        place.removesuffix(".bias"): change
        for place, change in biases
        if isinstance(cuts[weight_key(place)][1], LowRank)
    }


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
