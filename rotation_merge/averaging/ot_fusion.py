r"""Optimal transport between the coordinates of two models: soft or hard plans, one for each space.

A plan T has uniform marginals 1/n; the donor's coordinates become ``aligned = P donor`` with ``P = n T^T``, rows
summing to one. A hard plan is a permutation. A soft plan averages coordinates; it is no symmetry, so the moved donor
has other outputs.

Source: Imfeld, Graldi, Giordano, Hofmann, Anagnostidis and Singh 2024, section 4: costs from weights (unit rows, after
their inputs have been aligned) or from standardised activations, over their largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Space, TensorInfo
from rotation_merge.averaging.closed_forms import mean
from rotation_merge.averaging.methods import BLOCK, WEIGHT, DelegateMethod, Plan, Source, Target, parameter
from rotation_merge.config import Rate
from rotation_merge.errors import StatisticsError
from rotation_merge.matching.activations import wanted_roles
from rotation_merge.model.apply import placed, split_axis, transform_tensor
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.tensors import TensorSource
from rotation_merge.symmetry import SpaceTransform
from rotation_merge.symmetry.base import act_by_matrices

REGULARISATION = {"weights": 0.06, "activations": 0.08}
"""Of Sinkhorn's algorithm, at costs of at most one."""


class OtFusion(DelegateMethod):
    """OT fusion: donors moved by transport plans, then the mean."""

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

    def plan(self) -> Plan:
        why = "matches coordinates, but a task vector is already in the anchor's"
        return Plan(BLOCK, maps_only=False, negative=True, no_changes=why)

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        moved = [transported(source.weight, target.info, source.held, target.piece) for source in sources]
        return mean(moved, [source.share for source in sources])


@dataclass(frozen=True)
class TransportOptions:
    """The kind of transport plans (hard or soft) and their regularisation."""

    hard: bool
    regularisation: float


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
        matrix = self.matrices.get(role)
        if matrix is None:
            return x
        size, (count, width) = x.shape[dim], matrix.shape[:2]
        if count == 1:
            whole = 1
            while size < width:
                size, whole = size * x.shape[dim + whole], whole + 1
            flat = x.flatten(dim, dim + whole - 1)
            moved = act_by_matrices(matrix, flat.unsqueeze(0), 0, dim + 1).squeeze(0)
            return moved.unflatten(dim, x.shape[dim : dim + whole]) if whole > 1 else moved
        if role in ("in", "gate", "out"):  # experts, counted by dimension 0
            return act_by_matrices(matrix, x, 0, dim)
        return act_by_matrices(matrix, x, dim, dim + (2 if role in ("q", "o") else 1))


Plans = dict[str, TransportPlan]


def transported(tensor: Tensor, info: TensorInfo, plans: Mapping[str, TransportPlan], piece: int | None) -> Tensor:
    """A donor's tensor after its spaces' plans.

    Args:
        piece: which of several experts this tensor is; None of a whole tensor.
    """
    if piece is None:
        return transform_tensor(tensor, info, cast(Mapping[str, SpaceTransform], plans))
    transforms = {
        name: TransportPlan(
            {r: m if len(m) == 1 else m[piece : piece + 1].expand(1, -1, -1) for r, m in plan.matrices.items()}
        )
        for name, plan in plans.items()
        if any(space.name == name for space in info.spaces())
    }
    single = TensorInfo(info.key, info.names[:1], info.axes[1:])
    return transform_tensor(tensor, single, cast(Mapping[str, SpaceTransform], transforms))


def plan(donor: Tensor, anchor: Tensor, hard: bool, regularisation: float) -> Tensor:
    """P of a transport plan between two sets of points.

    Args:
        donor, anchor: features of each coordinate, (n, features).

    Returns:
        (n, n), float64: ``aligned = P @ donor``.

    Raises:
        StatisticsError: POT is not installed.
    """
    try:
        import ot
    except ImportError as error:
        raise StatisticsError("delegate ot_fusion needs POT", remedy="pip install POT") from error
    a, b = donor.double(), anchor.double()
    cost = torch.cdist(a, b)
    largest = float(cost.max())
    if largest == 0.0:
        return torch.eye(len(a), dtype=torch.float64, device=a.device)
    scaled: Any = (cost / largest).cpu().numpy()
    mass = torch.full((len(a),), 1.0 / len(a), dtype=torch.float64).numpy()
    if hard:
        coupling = ot.emd(mass, mass, scaled, numItermax=2_000_000)
    else:
        options = {"method": "sinkhorn_stabilized", "numItermax": 2000, "warn": False}
        coupling = ot.sinkhorn(mass, mass, scaled, regularisation, **options)
    moved = torch.as_tensor(coupling).T
    return (moved / moved.sum(1, keepdim=True)).to(a.device)


def unit(rows: Tensor) -> Tensor:
    """Rows of length one."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-12)


SOURCES = {"neurons": ("in", "gate", "first", "second", "third"), "values": ("v",), "queries and keys": ("q", "k")}
"""Roles whose rows are compared, for each plan."""


def rows_of(block: Block, tensors: Mapping[str, Tensor], space: Space, roles: tuple[str, ...]) -> list[Tensor]:
    """Unit rows of the weights that give a space's coordinates: (groups, size, features) each.

    Of heads, groups are KV groups; of experts, experts; of neurons there is one.
    """
    row_groups = []
    for info in block.tensors:
        counted = bool(info.axes) and any(part.role == "index" for part in info.axes[0].parts)
        if info.key not in tensors or len(info.axes) < 2 + counted:  # biases
            continue
        for dim, axis in enumerate(info.axes):
            row_groups += [_grouped(p, space) for p in _parts(tensors[info.key].float(), dim, axis, space, roles)]
    return [unit(rows) for rows in row_groups]


def _parts(x: Tensor, dim: int, axis: Axis, space: Space, roles: tuple[str, ...]) -> list[Tensor]:
    """The pieces of an axis that play one of the roles, as (*factors, features) (experts: (experts, n, features))."""
    pieces = []
    if any(part.space.name == space.name and part.role in roles for part in axis.parts):
        for piece, view in zip(axis.pieces, split_axis(x, dim, axis), strict=True):
            for part, start in placed(piece, dim):
                if part.space.name == space.name and part.role in roles:
                    count = len(part.factors)
                    front = ([0] if space.kind == "experts" else []) + list(range(start, start + count))
                    feature_dims = [d for d in range(view.ndim) if d not in front]
                    moved = view.permute(*front, *feature_dims)
                    pieces.append(moved.flatten(len(front)))
    return pieces


def _grouped(rows: Tensor, space: Space) -> Tensor:
    """(groups, size, features): the query heads of a group become features of their keys."""
    if space.kind in ("ffn", "convolution"):
        return rows[None]
    if space.kind == "attention" and rows.ndim == 4:
        return rows.permute(0, 2, 1, 3).flatten(2)
    return rows


def block_plans(
    block: Block, donor: Mapping[str, Any], anchor: Mapping[str, Any], hard: bool, regularisation: float
) -> Plans:
    """The plans of a block's local spaces.

    Args:
        donor, anchor: by space and plan (`neurons`, `values`, `queries and keys`): points (groups, size, features).
    """
    plans: Plans = {}
    for space in block.spaces.values():
        matrices: dict[str, Tensor] = {}
        for plan_name, roles in wanted_roles(space).items():
            a, b = donor.get(f"{space.name}:{plan_name}"), anchor.get(f"{space.name}:{plan_name}")
            if a is None or b is None:
                continue
            if space.kind == "attention" and space.sizes["per_group"] == 1:
                a, b = a.flatten(0, 1)[None], b.flatten(0, 1)[None]
            plan_matrices = torch.stack([plan(x, y, hard, regularisation) for x, y in zip(a, b, strict=True)])
            matrices.update(dict.fromkeys(roles, plan_matrices))
        if matrices:
            plans[space.name] = TransportPlan(matrices)
    return plans


def stream_plans(
    architecture: Architecture,
    points: Callable[[str], tuple[Tensor | None, Tensor | None]],
    how: TransportOptions,
) -> Plans:
    """The plan of each residual stream.

    Args:
        points: of a stream's coordinates, in the anchor and in the donor; None where there are none.
    """
    plans: Plans = {}
    for stream in architecture.streams:
        anchor, donor = points(stream)
        if anchor is not None and donor is not None:
            matrix = plan(donor, anchor, how.hard, how.regularisation)[None]
            plans[stream] = TransportPlan(dict.fromkeys(("write", "read", "gain", "shift"), matrix))
    return plans


def stream_ends(
    architecture: Architecture, stream: str, anchor: TensorSource, donor: TensorSource
) -> tuple[Tensor | None, Tensor | None]:
    """Stream coordinates as points, from the tensors outside the layers: unit rows (size, features).

    Args:
        donor: aligned; of the anchor's names and folding.
    """
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for block in architecture.blocks:
        for info in block.tensors if block.index is None else ():
            for dim, axis in enumerate(info.axes):
                if len(info.axes) > 1 and any(p.space.name == stream for p in axis.parts) and len(axis.parts) == 1:
                    pair = read_tensor(info, anchor), read_tensor(info, donor)
                    if pair[0] is not None and pair[1] is not None and pair[0].shape == pair[1].shape:
                        for side, x in zip(rows, pair, strict=True):
                            assert x is not None
                            side.append(x.float().movedim(dim, 0).flatten(1))
    if not rows[0]:
        return None, None
    return unit(torch.cat(rows[0], 1)), unit(torch.cat(rows[1], 1))


def weight_points(block: Block, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Points of every plan of a block, from weights."""
    points = {}
    for space in block.spaces.values():
        for plan_name in wanted_roles(space):
            rows = rows_of(block, tensors, space, SOURCES[plan_name])
            if rows:
                points[f"{space.name}:{plan_name}"] = torch.cat(rows, -1)
    return points
