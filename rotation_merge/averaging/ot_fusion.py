r"""Optimal transport between the coordinates of two models: soft or hard plans, one for each space.

A plan T has uniform marginals 1/n; the donor's coordinates become ``aligned = P donor`` with ``P = n T^T``, rows
summing to one. A hard plan is a permutation. A soft plan averages coordinates; it is no symmetry, so the moved donor
has other outputs.

Source: Imfeld, Graldi, Giordano, Hofmann, Anagnostidis and Singh 2024, section 4: costs from weights (unit rows, after
their inputs have been aligned) or from standardised activations, over their largest entry.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Self, cast

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, Space, TensorInfo
from rotation_merge.averaging.methods import Inputs, MergedModels, OwnMethod, Source, mean
from rotation_merge.averaging.parameters import WEIGHT, parameter
from rotation_merge.config import Rate
from rotation_merge.errors import StatisticsError
from rotation_merge.matching.match_on import Activations, Points, activation_points, grouped, wanted_roles
from rotation_merge.matching.matrix_pairs import views
from rotation_merge.model.apply import read_block, read_tensor, transform_tensor
from rotation_merge.model.forms import named_as
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.vocabulary import on_shared_rows, shared_rows
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.element import act_by_matrices

REGULARISATION = {"weights": 0.06, "activations": 0.08}
"""Of Sinkhorn's algorithm, at costs of at most one."""

SOURCES = {"in": "neurons", "gate": "neurons", "v": "values", "q": "queries and keys", "k": "queries and keys"}
"""The plan that rows of weights along an axis of a role are points for."""


class OtFusion(OwnMethod):
    """OT fusion: donors moved by transport plans, then the mean.

    All tensors of a block, or of the streams, are moved by one kind of plan: as the parameters of the first of them
    say. Where samples are compared, all models read the same tokens, layer by layer.
    """

    maps_only = False
    negative = True
    on_samples = True
    no_changes = "matches coordinates, but a task vector is already in the anchor's"
    spec = MergeMethodSpec(
        name="ot_fusion",
        pretty_name="OT fusion",
        reference_url="https://arxiv.org/abs/2310.05719",
        parameters=(
            WEIGHT,
            parameter(
                "plan", "soft", "transport plan: soft (Sinkhorn) or hard (a permutation)", Literal["soft", "hard"]
            ),
            parameter(
                "stream",
                "transport",
                "residual stream: transport it, or leave it as it is (identity)",
                Literal["transport", "identity"],
            ),
            parameter("regularisation", None, "entropic regularisation of soft plans", Rate | None),
        ),
        contract=InputContract(base=BasePolicy.REQUIRED),
    )

    def on(self, models: MergedModels) -> Self:
        method = super().on(models)
        method.strengths, method._lock = dict[str, float](), threading.Lock()  # one thread at a time runs models
        method._blocks = {block.name: block for block, _, _ in models.places.values()}
        method._stream_plans, method._activations = cache(method._stream_plans), cache(method._activations)  # type: ignore[method-assign]
        threads = max(1, torch.cuda.device_count())  # mergekit has one a device; each merges one block at a time
        method._block_plans = lru_cache(threads * len(models.views))(method._block_plans)  # type: ignore[method-assign]
        return method

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        models, hard = super().participants(name, weights, parameters), parameters["plan"] == "hard"
        usual = REGULARISATION["weights" if self.models.samples is None else "activations"]
        strength = 0.0 if hard else parameters["regularisation"] or usual
        for place in ("", self.models.places[name][0].name) if name in self.models.places else ():
            self.strengths.setdefault(place, strength)
        soft = "soft plans, which are not symmetries: the averaged donor has other outputs than the original"
        words = "hard plans, which are permutations" if hard else soft
        for model in models:
            if model != self.models.base:
                self.models.tell(f"Delegate ot_fusion moved `{self.models.views[model].name}` by {words}.")
        return models

    def brings(self, name: str, model: Hashable, parameters: Mapping[str, Any], device: torch.device) -> Inputs:
        if name not in self.models.places or model == self.models.base:
            return {}
        block, info, piece = self.models.places[name]
        streams = parameters["stream"] == "transport"
        with self._lock:
            plans = self._stream_plans(model) if streams else {}
        if any(space in block.spaces.values() for space in info.spaces()):
            plans = {**plans, **self._block_plans(model, block.name, streams, device)}
        return {"plans": {space: plan.of_piece(piece) for space, plan in plans.items()} if info.stacked else plans}

    def merge(self, sources: Sequence[Source], info: TensorInfo, parameters: Mapping[str, Any], linear: bool) -> Tensor:
        if info.stacked:  # this is one of several experts
            info = TensorInfo(info.key, info.names[:1], info.axes[1:])
        moved = [transform_tensor(source.weight, info, source.inputs.get("plans", {})) for source in sources]
        return mean(moved, [source.share for source in sources])

    def _stream_plans(self, model: Hashable) -> Plans:
        """The plan of each residual stream: from the tensors outside the layers, or from activations."""
        pair = self.models.views[self.models.base], self.models.views[model]
        architecture = pair[0].architecture
        spaces = architecture.streams.values()
        if self.models.samples is not None:
            activations = self._activations(self.models.base), self._activations(model)
            points = activation_points(architecture.blocks, spaces, activations)
        else:
            first, second = (named_as(architecture, view.tensors, view.architecture) for view in pair)
            if (rows := shared_rows(pair)) is not None:
                first, second = on_shared_rows(architecture, (first, second), rows)
            points = stream_ends(architecture, first, second)
        return plans_of(spaces, points, self.strengths[""])

    def _block_plans(self, model: Hashable, name: str, streams: bool, device: torch.device) -> Plans:
        """The plans of a block's own spaces."""
        block, both = self._blocks[name], (self.models.base, model)
        if self.models.samples is not None:
            with self._lock:
                activations = self._activations(both[0]), self._activations(both[1])
            points = activation_points((block,), block.spaces.values(), activations)
        else:
            anchor, donor = (read_block(block, self.models.views[each].tensors.on(device)) for each in both)
            points = weight_points(block, anchor, donor, self._stream_plans(model) if streams else {})
        return plans_of(block.spaces.values(), points, self.strengths[name])

    def _activations(self, model: Hashable) -> Activations:
        """A model's activations on the samples, run once."""
        assert self.models.samples is not None
        return Activations.of(self.models.views[model], self.models.samples())


@dataclass(frozen=True)
class TransportPlan:
    """A plan of one space: ``aligned = matrix @ donor`` along every axis of the roles it knows.

    Attributes:
        matrices: by role; (1, n, n) for the whole axis, or (G, d, d) for each KV group (or expert) by itself.
    """

    matrices: Mapping[str, Tensor]

    def moves(self, role: str) -> bool:
        return role in self.matrices

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        """Move the axis of a role, whose dimensions begin at `dim`."""
        if (matrix := self.matrices.get(role)) is None:
            return x
        last = dim + {"k": 1, "v": 1, "q": 2, "o": 2}.get(role, 0)
        if len(matrix) > 1:
            return act_by_matrices(matrix, x, 0 if role in ("in", "gate", "out") else dim, last)
        flat = x if matrix.shape[-1] == x.shape[last] else x.flatten(dim, last)  # or all heads are one axis
        return act_by_matrices(matrix, flat[None], 0, 1 + last - x.ndim + flat.ndim)[0].reshape(x.shape)

    def of_piece(self, piece: int) -> TransportPlan:
        """The plan of one expert."""
        return TransportPlan({r: m if len(m) == 1 else m[piece : piece + 1] for r, m in self.matrices.items()})


Plans = dict[str, TransportPlan]


def transport(anchor: Tensor, donor: Tensor, regularisation: float) -> Tensor:
    """P of a transport plan between two sets of points.

    Args:
        anchor, donor: features of each coordinate, (n, features).
        regularisation: of Sinkhorn's algorithm; 0: exact transport, a hard plan.

    Returns:
        (n, n), float64: ``aligned = P @ donor``.

    Raises:
        StatisticsError: POT is not installed.
    """
    try:
        import ot
    except ImportError as error:
        raise StatisticsError("delegate ot_fusion needs POT", remedy="pip install POT") from error
    cost = torch.cdist(donor.double(), anchor.double())
    largest, count = float(cost.max()), len(cost)
    if largest == 0.0:
        return torch.eye(count, dtype=torch.float64, device=cost.device)
    scaled: Any = (cost / largest).cpu().numpy()
    mass = torch.full((count,), 1.0 / count, dtype=torch.float64).numpy()
    if regularisation == 0.0:
        coupling = ot.emd(mass, mass, scaled, numItermax=2_000_000)
    else:
        options = {"method": "sinkhorn_stabilized", "numItermax": 2000, "warn": False}
        coupling = ot.sinkhorn(mass, mass, scaled, regularisation, **options)
    moved = torch.as_tensor(coupling).T
    return (moved / moved.sum(1, keepdim=True)).to(cost.device)


def plans_of(spaces: Iterable[Space], points: Mapping[str, Points], regularisation: float) -> Plans:
    """The plans of spaces.

    Args:
        points: by space and plan (`SPACE:neurons`, `SPACE:values`, `SPACE:queries and keys`, `SPACE:stream`).
    """
    plans: Plans = {}
    for space in spaces:
        matrices: dict[str, Tensor] = {}
        for plan_name, roles in wanted_roles(space).items():
            if (pair := points.get(f"{space.name}:{plan_name}")) is not None:
                if space.kind == "attention" and space.sizes["per_group"] == 1:
                    pair = pair[0].flatten(0, 1)[None], pair[1].flatten(0, 1)[None]
                solved = torch.stack([transport(x, y, regularisation) for x, y in zip(*pair, strict=True)])
                matrices.update(dict.fromkeys(roles, solved))
        if matrices:
            plans[space.name] = TransportPlan(matrices)
    return plans


def weight_points(
    block: Block, anchor: Mapping[str, Tensor], donor: Mapping[str, Tensor], streams: Plans
) -> dict[str, Points]:
    """Points of every plan of a block: unit rows of the weights that give a space's coordinates, side by side.

    Args:
        anchor, donor: the block's tensors by key.
        streams: plans that move the donor's streams first.
    """
    points: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    moving = cast(Mapping[str, Transform], streams)
    for space in block.spaces.values():
        plans = wanted_roles(space)
        for info, part, start, *pair in views(block, space, anchor, donor, moving):
            counted = any(part.role == "index" for part in info.axes[0].parts)
            plan_name = SOURCES.get(part.role, "")
            if plan_name in plans and len(info.axes) >= 2 + counted:  # no biases
                for side, x in zip(points.setdefault(f"{space.name}:{plan_name}", ([], [])), pair, strict=True):
                    side.append(unit(grouped(x.float(), start, part)))
    return {key: (torch.cat(first, -1), torch.cat(second, -1)) for key, (first, second) in points.items()}


def stream_ends(architecture: Architecture, anchor: TensorSource, donor: TensorSource) -> dict[str, Points]:
    """Points of every stream's plan: unit rows of the tensors outside the layers, side by side.

    Args:
        donor: aligned; of the anchor's names and folding.
    """
    points: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    for info in (info for block in architecture.blocks if block.index is None for info in block.tensors):
        for dim, axis in enumerate(info.axes if len(info.axes) > 1 else ()):
            if [part.space.kind for part in axis.parts] != ["stream"]:
                continue
            a, b = read_tensor(info, anchor), read_tensor(info, donor)
            if a is not None and b is not None and a.shape == b.shape:
                sides = points.setdefault(f"{axis.parts[0].space.name}:stream", ([], []))
                for side, x in zip(sides, (a, b), strict=True):
                    side.append(x.float().movedim(dim, 0).flatten(1))
    return {key: (unit(torch.cat(x, 1))[None], unit(torch.cat(y, 1))[None]) for key, (x, y) in points.items()}


def unit(rows: Tensor) -> Tensor:
    """Rows of length one."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-12)
