"""What happens to one tensor of a merge: where its axes live, what moved it, what the delegate is given."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architectures.model import Architecture, TensorInfo
from rotation_merge.checkpoints.models import Model, Models
from rotation_merge.errors import RecipeError, nearest
from rotation_merge.planning.planner import RotationMergePlanner
from rotation_merge.planning.session import Session, SessionConfiguration
from rotation_merge.planning.tasks import AlignedGather
from rotation_merge.recipe.document import documents
from rotation_merge.recipe.names import METHOD
from rotation_merge.recipe.reading import read
from rotation_merge.report.html import REPORT_FILE, read_report
from rotation_merge.report.record import MergeReport, SpaceRow
from rotation_merge.seam.definitions import architecture_info


@dataclass(frozen=True)
class Given:
    """What the delegate is given of one model.

    Attributes:
        before, after: distance to the anchor's tensor relative to its norm, as stored and as given; None where shapes
            differ or a model has no such tensor.
        parameters: the delegate's, for this model.
    """

    model: str
    before: float | None
    after: float | None
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """One tensor of a merge.

    Attributes:
        axes: for each axis, outermost first, the spaces that it lives in and the roles it plays there, in words.
        rows: what matching did to these spaces, by donor.
        given: by model; empty where only the report of a finished merge is known.
    """

    tensor: str
    axes: list[str]
    rows: list[SpaceRow]
    delegate: str
    parameters: dict[str, Any] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)


def trace(path: str, tensor: str) -> Trace:
    """Trace one tensor through a recipe, which is planned and run for that tensor alone, or in a merged model's report.

    Raises:
        RotationMergeError: the recipe is at fault, there is no report, or no such tensor.
    """
    return _of_report(path, tensor) if os.path.isdir(path) else _of_recipe(path, tensor)


def _of_report(folder: str, tensor: str) -> Trace:
    report = read_report(os.path.join(folder, REPORT_FILE))
    info = _info(Models(MergeOptions())[ModelReference.parse(folder)].architecture, tensor)
    return Trace(tensor, _axes(info), _rows(report, info), report.delegate)


def _of_recipe(path: str, tensor: str) -> Trace:
    from mergekit.merge import _model_out_config

    with open(path, encoding="utf-8") as file:
        document = documents(file.read())[-1]
    method = document.value.get("merge_method") if isinstance(document.value, dict) else None
    if method != METHOD:
        raise RecipeError(f"its merge_method is not {METHOD}", where=path, remedy="give a recipe of rotation_merge")
    recipe = read(document)
    document.raise_first()
    assert recipe is not None
    session, options = Session.of(recipe, MergeOptions(), watched=False), MergeOptions()
    config = SessionConfiguration.of(session)
    info = architecture_info(config, options)
    planner = RotationMergePlanner(config, info, options, _model_out_config(config, info))
    planner.plan_to_disk(out_path="unused")
    tasks = {weight.name: task for weight, task in planner._tensors}
    if tensor not in tasks:
        raise RecipeError(f"the merge has no tensor '{tensor}'", where=path, remedy=nearest(tensor, tasks))
    base = session.models[recipe.base]
    known = base.architecture.named().get(tensor)
    gather = _gather(tasks[tensor])
    values: dict[ModelReference, Tensor] = {}
    if gather is not None:
        cpu = torch.device("cpu")
        ((_, values),) = Executor([gather], math_device=cpu, storage_device=cpu).run(quiet=True)
    shared, each = (getattr(tasks[tensor], name, {}) for name in ("parameters", "input_parameters"))
    given = [
        Given(str(model), *_distances(session, model, known, value, values.get(recipe.base)), _plain(each, model))
        for model, value in values.items()
    ]
    report = MergeReport.of(session.run, recipe.base, recipe.delegate.spec.name, "")
    rows = [] if known is None else _rows(report, known)
    return Trace(tensor, [] if known is None else _axes(known), rows, report.delegate, dict(shared.items()), given)


def _info(architecture: Architecture, tensor: str) -> TensorInfo:
    known = architecture.named()
    if tensor not in known:
        raise RecipeError(f"the model has no tensor '{tensor}'", remedy=nearest(tensor, known))
    return known[tensor]


def _axes(info: TensorInfo) -> list[str]:
    return [
        " and ".join(dict.fromkeys(f"{part.space.name} ({part.role})" for part in axis.parts)) or axis.label
        for axis in info.axes
    ]


def _rows(report: MergeReport, info: TensorInfo) -> list[SpaceRow]:
    spaces = {space.name for space in info.spaces()}
    return [row for row in report.rows if row.space in spaces]


def _gather(task: Task) -> AlignedGather | None:
    """What collects the models' tensors for a task."""
    if isinstance(task, AlignedGather):
        return task
    found = (_gather(inner) for inner in task.arguments().values())
    return next((gather for gather in found if gather is not None), None)


def _distances(
    session: Session, model: ModelReference, info: TensorInfo | None, given: Tensor, anchor: Tensor | None
) -> tuple[float | None, float | None]:
    base = session.recipe.base
    stored = None if info is None else _stored(session.models[base], info)
    own = None if info is None else _stored(session.models[model], info)
    return _distance(own, stored), _distance(given, stored if anchor is None else anchor)


def _stored(model: Model, info: TensorInfo) -> Tensor | None:
    name = next((name for name in (info.name, *info.tied) if name in model), None)
    return None if name is None or info.stacked else model[name]


def _distance(one: Tensor | None, other: Tensor | None) -> float | None:
    if one is None or other is None or one.shape != other.shape:
        return None
    norm = float(other.double().norm())
    return float((one.double() - other.double()).norm()) / norm if norm else 0.0


def _plain(parameters: Any, model: ModelReference) -> dict[str, Any]:
    return dict(parameters[model].items()) if model in dict(parameters.items()) else {}
