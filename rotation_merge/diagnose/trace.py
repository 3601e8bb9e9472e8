"""The trace of one tensor through a merge: its spaces, its maps, and the delegate's input."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.diagnose.donors import last_recipe
from rotation_merge.diagnose.sources import files, references
from rotation_merge.errors import RecipeError, RotationMergeError, nearest_three
from rotation_merge.mergekit_plugin.definitions import architecture_info
from rotation_merge.mergekit_plugin.planning.planner import RotationMergePlanner
from rotation_merge.mergekit_plugin.planning.session import Session, SessionConfiguration
from rotation_merge.mergekit_plugin.planning.tasks import AlignedGather
from rotation_merge.mergekit_plugin.recipe.document import Document, documents
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.checkpoint import Model, open_model
from rotation_merge.model.gguf.place import is_absent, is_gguf
from rotation_merge.model.hub import is_hub_name
from rotation_merge.record import REPORT_FILE, MergeReport, SpaceRow
from rotation_merge.report.html import read_report


@dataclass(frozen=True)
class DelegateInput:
    """The delegate's input from one model.

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
        rows: report rows of these spaces, by donor.
        delegate: its name; empty where nothing was merged.
        given: by model; empty where a finished merge cannot be done again.
        note: why it cannot, or that it comes out otherwise by now.
    """

    tensor: str
    axes: list[str]
    rows: list[SpaceRow] = field(default_factory=list)
    delegate: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    given: list[DelegateInput] = field(default_factory=list)
    note: str = ""


def trace(path: str, tensor: str) -> Trace:
    """Trace one tensor through a recipe, which is planned and run for that tensor alone.

    For a merged model's directory, its report is read, and its recipe is run for the tensor if all inputs still exist.
    For any other model, the spaces of the tensor's axes are returned.

    Raises:
        RotationMergeError: the recipe is at fault, the model cannot be read, or there is no such tensor.
    """
    if os.path.isfile(path) and not is_gguf(path):
        return _of_recipe(path, tensor)
    if os.path.isfile(os.path.join(path, REPORT_FILE)):
        return _of_report(path, tensor)
    return Trace(tensor, _axes(_info(open_model(path), tensor)))


def _of_report(folder: str, tensor: str) -> Trace:
    report = read_report(os.path.join(folder, REPORT_FILE))
    info = _info(open_model(folder), tensor)
    known = Trace(tensor, _axes(info), _rows(report, info), report.delegate)
    try:
        again = _again(report, tensor)
    except RotationMergeError as error:
        return replace(known, note=f"Distances of this tensor are not known: {error}.")
    same = [_figures(row) for row in again.rows] == [_figures(row) for row in known.rows]
    note = (
        ""
        if same
        else "The models or the libraries have changed since the merge: the same recipe now gives other weights."
    )
    return replace(known, parameters=again.parameters, given=again.given, note=note)


def _again(report: MergeReport, tensor: str) -> Trace:
    """The merge of a report, run for one tensor.

    Raises:
        RotationMergeError: an input no longer exists.
    """
    if not report.recipe.strip():
        raise RecipeError("the report holds no recipe", remedy="trace a recipe of the two models")
    document = documents(report.recipe)[-1]
    gone = [name for _, name in references(document.value) if not _here(ModelReference.parse(name))]
    gone += [name for _, name in files(document.value) if not os.path.exists(name)]
    if gone:
        raise RecipeError(
            f"cannot be found: {', '.join(dict.fromkeys(gone))}", remedy="run the command where the merge was made"
        )
    return _of_document(document, tensor, REPORT_FILE)


def _here(reference: ModelReference) -> bool:
    parts = [part.path for part in (reference.model, reference.lora) if part is not None]
    return not is_absent(reference) and all(os.path.exists(path) or is_hub_name(path) for path in parts)


def _figures(row: SpaceRow) -> tuple[object, ...]:
    """The figures of a merge, rounded for comparison with a second run."""
    return row.donor, row.space, row.group, *(f"{x:.3g}" for x in (row.distance_before, row.distance_after))


def _of_recipe(path: str, tensor: str) -> Trace:
    return _of_document(last_recipe(path, "give a recipe of rotation_merge"), tensor, path)


def _of_document(document: Document, tensor: str, path: str) -> Trace:
    """Trace a tensor through a recipe; `path` names it in errors."""
    from mergekit.merge import _model_out_config

    recipe, options = Recipe.of(document), MergeOptions()
    session = Session.of(recipe, options, watched=False)
    config = SessionConfiguration.of(session)
    info = architecture_info(config, options)
    planner = RotationMergePlanner(config, info, options, _model_out_config(config, info))
    planner.plan_to_disk(out_path="unused")
    tasks = {weight.name: task for weight, task in planner._tensors}
    if tensor not in tasks:
        raise RecipeError(f"the merge has no tensor '{tensor}'", where=path, remedy=nearest_three(tensor, tasks))
    base = session.models[recipe.base]
    known = base.architecture.named().get(tensor)
    gather = _gather(tasks[tensor])
    values: dict[ModelReference, Tensor] = {}
    if gather is not None:
        cpu = torch.device("cpu")
        ((_, values),) = Executor([gather], math_device=cpu, storage_device=cpu).run(quiet=True)
    shared, each = (getattr(tasks[tensor], name, {}) for name in ("parameters", "input_parameters"))
    inputs = [
        DelegateInput(
            str(model), *_distances(session, model, known, value, values.get(recipe.base)), _plain(each, model)
        )
        for model, value in values.items()
    ]
    report = session.run.report(recipe.base, recipe.delegate.spec.name, "")
    rows = [] if known is None else _rows(report, known)
    return Trace(tensor, [] if known is None else _axes(known), rows, report.delegate, dict(shared.items()), inputs)


def _info(model: Model, tensor: str) -> TensorInfo:
    known = model.architecture.named()
    if tensor not in known:
        problem, model_name = f"the model has no tensor '{tensor}'", str(model.reference)
        raise RecipeError(problem, where=model_name, remedy=nearest_three(tensor, known))
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
    """The task that gathers the models' tensors for a task."""
    if isinstance(task, AlignedGather):
        return task
    gathers = (_gather(inner) for inner in task.arguments().values())
    return next((gather for gather in gathers if gather is not None), None)


def _distances(
    session: Session, model: ModelReference, info: TensorInfo | None, value: Tensor, anchor: Tensor | None
) -> tuple[float | None, float | None]:
    base = session.recipe.base
    stored = None if info is None else _stored(session.models[base], info)
    model_tensor = None if info is None else _stored(session.models[model], info)
    return _distance(model_tensor, stored), _distance(value, stored if anchor is None else anchor)


def _stored(model: Model, info: TensorInfo) -> Tensor | None:
    name = next((name for name in (info.name, *info.tied) if name in model), None)
    return None if name is None or info.stacked else model[name]


def _distance(tensor: Tensor | None, reference: Tensor | None) -> float | None:
    if tensor is None or reference is None or tensor.shape != reference.shape:
        return None
    norm = float(reference.double().norm())
    return float((tensor.double() - reference.double()).norm()) / norm if norm else 0.0


def _plain(parameters: Any, model: ModelReference) -> dict[str, Any]:
    return dict(parameters[model].items()) if model in dict(parameters.items()) else {}
