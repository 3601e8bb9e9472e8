r"""Optimal transport between the coordinates of two models: soft or hard plans, one for each space.

A plan T has uniform marginals 1/n; the donor's coordinates become ``aligned = P donor`` with ``P = n T^T``, rows
summing to one. A hard plan is a permutation. A soft plan averages coordinates; it is no symmetry, so the moved donor
has other outputs.

Source: Imfeld, Graldi, Giordano, Hofmann, Anagnostidis and Singh 2024, section 4: costs from weights (unit rows, after
their inputs have been aligned) or from standardised activations, over their largest entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Space, TensorInfo
from rotation_merge.averaging.methods import Inputs, OwnMethod, Source, Target, mean
from rotation_merge.averaging.models import MergedModels
from rotation_merge.averaging.parameters import WEIGHT, parameter
from rotation_merge.config import Rate
from rotation_merge.errors import RecipeError, StatisticsError
from rotation_merge.matching.activations import Activations, activation_points, stream_points, wanted_roles
from rotation_merge.model.apply import placed, split_axis, transform_tensor
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.forms import translated
from rotation_merge.model.rows import vocabulary_subset
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.vocabulary import shared_rows
from rotation_merge.run.functions import Batch, architecture_of, load, module_of
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.element import act_by_matrices

REGULARISATION = {"weights": 0.06, "activations": 0.08}
"""Of Sinkhorn's algorithm, at costs of at most one."""


class OtFusion(OwnMethod):
    """OT fusion: donors moved by transport plans, then the mean."""

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
    transport: Transport

    def on(self, models: MergedModels) -> Self:
        method = super().on(models)
        method.transport = Transport(models)
        if models.samples is not None:
            _check_samples(models)
        return method

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        models = super().participants(name, weights, parameters)
        soft = "soft plans, which are not symmetries: the averaged donor has other outputs than the original"
        words = "hard plans, which are permutations" if parameters["plan"] == "hard" else soft
        for model in models:
            if model != self.models.base:
                self.models.log.line(f"Delegate ot_fusion moved `{self.models.name(model)}` by {words}.")
                self.transport.spaces(model, name, parameters)
        return models

    def inputs(
        self, name: str, models: Sequence[Hashable], parameters: Mapping[str, Any], device: torch.device
    ) -> Mapping[Hashable, Inputs]:
        donors = [model for model in models if model != self.models.base]
        return {model: self.transport.plans(model, name, parameters, device) for model in donors}

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        moved = [transported(source.weight, target.info, source.inputs, target.piece) for source in sources]
        return mean(moved, [source.share for source in sources])


def _check_samples(models: MergedModels) -> None:
    """Refuse to compare activations of models that do not read the same samples, layer by layer.

    Raises:
        RecipeError: a donor's vocabulary differs, or its layers are combined differently.
    """
    anchor = models.views[models.base]
    for model, view in models.views.items():
        problem = ""
        if shared_rows([anchor, view]) is not None:
            problem = f"compares activations on the same tokens, but its tokens are not those of {anchor.reference}"
        elif any(models.place(model, name)[0].index != place[0].index for name, place in models.places.items()):
            problem = "compares activations of whole models, but the slices pair layers differently"
        if problem:
            remedy = "leave 'data' out: plans then come from weights"
            raise RecipeError(f"delegate ot_fusion {problem}", where=view.name, remedy=remedy)


@dataclass(frozen=True)
class TransportOptions:
    """The kind of transport plans (hard or soft) and their regularisation."""

    hard: bool
    regularisation: float


class Transport:
    """Transport plans of the donors of one merge, computed when they are asked for.

    Plans of streams are computed once, those of blocks for the block that is being merged (by each thread). All tensors
    of a block, or of a stream, are moved by one plan: as the parameters of the first of them say.
    """

    def __init__(self, models: MergedModels) -> None:
        self.models = models
        self._lock, self._here = threading.RLock(), threading.local()
        self._options: dict[tuple[Hashable, str], TransportOptions] = {}
        self._streams: dict[Hashable, Plans] = {}
        self._watched: dict[Hashable, Activations] = {}

    def spaces(self, model: Hashable, name: str, parameters: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether an output tensor of a donor moves with streams, and with spaces of its block; settles the options."""
        if name not in self.models.places:
            return False, False
        kinds = {space.kind for space in self.models.places[name][1].spaces()}
        moves = "stream" in kinds and parameters["stream"] == "transport", bool(kinds - {"stream"})
        regularisation = parameters["regularisation"]
        if regularisation is None:
            regularisation = REGULARISATION["weights" if self.models.samples is None else "activations"]
        options = TransportOptions(parameters["plan"] == "hard", regularisation)
        if any(moves):
            self._options.setdefault((model, ""), options)
        if moves[1]:
            self._options.setdefault((model, self.models.place(model, name)[0].name), options)
        return moves

    def plans(self, model: Hashable, name: str, parameters: Mapping[str, Any], device: torch.device) -> Plans:
        """The plans, by space, that move an output tensor of a donor."""
        with_streams, with_block = self.spaces(model, name, parameters)
        streams = self.streams(model) if with_streams else {}
        transported = parameters["stream"] == "transport"
        return {**streams, **self.block(model, name, transported, device)} if with_block else streams

    def streams(self, model: Hashable) -> Plans:
        """The plan of each residual stream: from the tensors outside the layers, or from activations."""
        with self._lock:
            if model not in self._streams:
                architecture, points = self.models.views[self.models.base].architecture, self._stream_points(model)
                self._streams[model] = stream_plans(architecture, points, self._options[model, ""])
            return self._streams[model]

    def _stream_points(self, model: Hashable) -> StreamPoints:
        views = [self.models.views[self.models.base], self.models.views[model]]
        architecture = views[0].architecture
        if self.models.samples is not None:
            anchor, donor = self.activations(self.models.base), self.activations(model)
            return lambda stream: (
                stream_points(architecture, stream, anchor, {}),
                stream_points(architecture, stream, donor, {}),
            )
        sources: list[TensorSource] = [translated(view.tensors, view.architecture, architecture) for view in views]
        if (rows := shared_rows(views)) is not None:
            sources = [vocabulary_subset(architecture, *pair) for pair in zip(sources, rows, strict=True)]
        return lambda stream: stream_ends(architecture, stream, *sources)

    def block(self, model: Hashable, name: str, transported: bool, device: torch.device) -> Plans:
        """The plans of the local spaces of an output tensor's block.

        Args:
            transported: whether streams are.
        """
        block, model_block = self.models.places[name][0], self.models.place(model, name)[0]
        here, key = self._here, (model, model_block.name)
        if getattr(here, "block", None) is not block:
            here.block, here.plans = block, {}
        if key not in here.plans:
            options = self._options[key]
            anchor, donor = self._points(model, block, model_block, transported, device)
            here.plans[key] = block_plans(block, donor, anchor, options.hard, options.regularisation)
        plans: Plans = here.plans[key]
        return plans

    def _points(
        self, model: Hashable, block: Block, model_block: Block, transported_streams: bool, device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Points of every plan of a block, of the anchor and of a donor, whose block is `model_block`."""
        base = self.models.base
        if self.models.samples is not None:
            anchor_seen, donor_seen = self.activations(base), self.activations(model)
            return activation_points(block, anchor_seen, {}), activation_points(block, donor_seen, {})
        anchor = dict(self._tensors(base, block, block, device))
        streams = self.streams(model) if transported_streams else {}
        donor = {
            key: transported(tensor, info, streams, None)
            for key, tensor in self._tensors(model, model_block, block, device)
            if (info := block.tensor(key)) is not None
        }
        return weight_points(block, anchor), weight_points(block, donor)

    def _tensors(
        self, model: Hashable, model_block: Block, block: Block, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """A model's tensors of a block that have an axis in one of its local spaces, by key."""
        local = {space.name for space in block.spaces.values()}
        for info in block.tensors:
            if any(space.name in local for space in info.spaces()):
                own_info = model_block.tensor(info.key) or info
                if (tensor := read_tensor(own_info, self.models.views[model].tensors)) is not None:
                    yield info.key, tensor.to(device)

    def activations(self, model: Hashable) -> Activations:
        """A model's activations on the samples, run once."""
        with self._lock:
            if model not in self._watched:
                view = self.models.views[model]
                files = view.files if view.at is None else None
                module = module_of(view).float() if files is None else load(str(files.reference))
                self._watched[model] = Activations.of(module, architecture_of(module), self._batches)
            return self._watched[model]

    @cached_property
    def _batches(self) -> Sequence[Batch]:
        assert self.models.samples is not None
        return self.models.samples()


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

StreamPoints = Callable[[str], tuple[Tensor | None, Tensor | None]]
"""Gives the coordinates of a stream as points, in the anchor and in a donor; None where there are none."""


def transported(tensor: Tensor, info: TensorInfo, plans: Mapping[str, TransportPlan], piece: int | None) -> Tensor:
    """A donor's tensor after its spaces' plans.

    Args:
        piece: which of several experts this tensor is; None of a whole tensor.
    """
    if piece is None:
        return transform_tensor(tensor, info, cast(Mapping[str, Transform], plans))
    transforms = {
        name: TransportPlan(
            {r: m if len(m) == 1 else m[piece : piece + 1].expand(1, -1, -1) for r, m in plan.matrices.items()}
        )
        for name, plan in plans.items()
        if any(space.name == name for space in info.spaces())
    }
    single = TensorInfo(info.key, info.names[:1], info.axes[1:])
    return transform_tensor(tensor, single, cast(Mapping[str, Transform], transforms))


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


SOURCES = {"neurons": ("in", "gate"), "values": ("v",), "queries and keys": ("q", "k")}
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
    if space.kind == "ffn":
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
    points: StreamPoints,
    how: TransportOptions,
) -> Plans:
    """The plan of each residual stream."""
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
