"""Checks of a document's models: present, complete, of one architecture and size, compatible with the options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from pydantic import ValidationError

from rotation_merge.config import FILE
from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.files import check_output
from rotation_merge.matching.alignment import load_file
from rotation_merge.matching.pair import shape_faults
from rotation_merge.matching.stream import residual_groups
from rotation_merge.mergekit_plugin.document import Document, Path, walk
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.mergekit_plugin.keys import BY_NAME
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe, recipe_inputs, recipe_outputs
from rotation_merge.mergekit_plugin.rules import explain
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import HubFile
from rotation_merge.model.labels import label_rows
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids
from rotation_merge.report.integrity import check_folder

FAULTS = ("missing tensors", "layer types", "head count", "wrong shape", "RoPE", "tensor twice")
"""Kinds of defects with which a model cannot be merged as it is meant."""

HUB_NOTE = "not a folder here, and not in the hub's cache: its files are not checked"


def check_sources(
    document: Document,
    recipe: Recipe | None,
    made_earlier: set[str],
    options: MergeOptions,
    refused: Mapping[str, RotationMergeError],
) -> None:
    """Collect the faults of all models that a document names.

    Args:
        refused: models of the hub whose headers could not be fetched, by name.
        recipe: the parsed recipe; None if it has faults already.
        made_earlier: names of merges that mergekit-multi makes first; nothing of them is there yet.
    """
    session = None if recipe is None else Session.of(recipe, options, watched=False)
    if session is None:
        _check_models(document, recipe, made_earlier, options, refused, Models(options))
        return
    try:
        complete = _check_models(document, recipe, made_earlier, options, refused, session.models)
        if complete and document.first is None:
            _plan(document, session)
    finally:
        session.run.end()


def _check_models(
    document: Document,
    recipe: Recipe | None,
    made_earlier: set[str],
    options: MergeOptions,
    refused: Mapping[str, RotationMergeError],
    models: Models,
) -> bool:
    """Collect the faults of the models and files themselves; returns whether all of them are here."""
    opened: dict[str, tuple[Path, View]] = {}
    absent = False
    for path, name in references(document.value):
        if name in made_earlier or name in opened:
            absent = absent or name in made_earlier
            continue
        if error := next((refused[part] for part in name.split("+") if part in refused), None):
            document.raised(path, error)
        model = None if error else _open(document, path, name, models)
        if model is None:
            absent = True
        else:
            opened[name] = (path, model)
            _whole(document, path, model)
    base = opened.get(str(document.value.get("base_model")))
    for path, name in files(document.value):
        hub_file = HubFile.of(name)
        if hub_file is not None and (cached := hub_file.cached(options.transformers_cache)) is not None:
            if base is not None and path[-1] == "alignment":
                _read(document, path, cached, base[1])
        elif hub_file is not None:
            absent = True
            remedy = "the merge downloads it; check again afterwards"
            document.fault(path, f"{name}: not in the hub's cache: it is not checked", remedy, error=False)
        elif not os.path.exists(name):
            written = "write it with 'rotation-merge align --alignment FILE'"
            advice = nearest_path(name, written if path[-1] == "alignment" else "check the path", os.path.exists)
            document.fault(path, f"{name}: no such file", advice)
        elif base is not None and path[-1] == "alignment":
            _read(document, path, name, base[1])
    if base is not None:
        _compare(document, recipe, base[1], opened, models)
    if recipe is not None:
        _written(document, recipe, options)
    return not absent


def _written(document: Document, recipe: Recipe, options: MergeOptions) -> None:
    """Check that the recipe writes neither to its inputs nor over other files."""
    inputs = recipe_inputs(recipe.config)
    for output in recipe_outputs(recipe.config, None):
        try:
            check_output(output, inputs, cache=options.transformers_cache)
        except RotationMergeError as error:
            document.raised(tuple(output.option.split(".")), error)


def _read(document: Document, path: Path, name: str, anchor: View) -> None:
    """Check that an alignment file fits the anchor's architecture; its weights are not compared."""
    try:
        load_file(name, anchor.architecture)
    except RotationMergeError as error:
        document.raised(path, error)


def references(value: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Places that name models, and the names; the base first."""
    keys = ("base_model", "model", "finetuned_from")
    named = [(path, name) for path, name in walk(value) if path and path[-1] in keys and path[0] != "parameters"]
    named = [(path, name) for path, name in named if isinstance(name, str) and name != "none"]
    return sorted(named, key=lambda place: place[0] != ("base_model",))


def files(value: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Places that name files to read, and the names."""
    for path, setting in walk(value):
        key = BY_NAME.get(str(path[-1])) if path[-2:-1] == ("parameters",) else None
        words = () if key is None or key.option.kind is not FILE else (*key.option.words, "none")
        if words and isinstance(setting, str) and setting not in words and not setting.startswith("demo:"):
            yield path, setting


def _open(document: Document, path: Path, name: str, models: Models) -> View | None:
    """Open a model and check its files and architecture; None if that fails."""
    try:
        reference = ModelReference.parse(name)
    except (RuntimeError, ValueError) as error:
        document.fault(path, str(error), "write a directory, or org/name")
        return None
    if absent_parts(reference):
        document.fault(
            path,
            f"{name}: {HUB_NOTE}",
            f"{nearest_path(name, 'check the name')}, or download it and check again",
            error=False,
        )
        return None
    try:
        return models[reference]
    except RotationMergeError as error:
        document.raised(path, error)
    except Exception as error:  # whatever a damaged checkpoint makes the readers raise
        document.fault(path, f"{name}: cannot be read ({error})", "download it again")
    return None


def _whole(document: Document, path: Path, model: View) -> None:
    """Defects in headers and small files of an input model; a wrong config is a fault, the rest are notes."""
    for defect in check_folder(model.folder):
        if defect.fatal:
            line = f"{model.reference}: {defect.kind}: {defect.what}"
            document.fault(path, line, defect.remedy, error=defect.kind in FAULTS)


def _compare(
    document: Document, recipe: Recipe | None, anchor: View, opened: dict[str, tuple[Path, View]], models: Models
) -> None:
    resizes = document.value.get("tokenizer") or document.value.get("tokenizer_source")
    excluded: Callable[[str], bool] = lambda _: False  # noqa: E731
    if recipe is not None:
        recipe.settle_heads(model for _, model in opened.values())
        excluded = recipe.excluded
    for path, model in opened.values():
        if model is anchor:
            continue
        carried = _carried(document, path)
        try:
            models.together(anchor.reference, [model.reference], averaged=not carried)
            if recipe is not None:
                label_rows(anchor, model, excluded)
        except RotationMergeError as error:
            document.raised(path, error)
            continue
        resized = bool(resizes) or carried or recipe is None
        for fault in shape_faults(anchor, models[model.reference], excluded, resized):
            document.raised(path, fault)
        averaged = any(
            info.vocabulary_axis is not None and not excluded(info.name) for info in anchor.architecture.tensors()
        )
        if path[0] == "models" and averaged and not resizes and not carried:
            _token_ids(document, path, anchor, model)
    _residual(document, anchor)


def _token_ids(document: Document, path: Path, anchor: View, model: View) -> None:
    """Check that tokens have the anchor's ids; for slices, which may omit a vocabulary, the plan checks it."""
    try:
        check_token_ids(anchor, model)
    except RotationMergeError as error:
        document.raised(path, error)


def _carried(document: Document, path: Path) -> bool:
    """Whether the model is carried into the anchor's vocabulary: a fine-tune, or its base."""
    return path[-1] == "finetuned_from" or (*path[:-1], "parameters", "finetuned_from") in dict(
        references(document.value)
    )


def _residual(document: Document, anchor: View) -> None:
    for path, group in walk(document.value):
        if path[-2:] == ("parameters", "residual") and isinstance(group, str) and not document.refused(path):
            try:
                residual_groups(anchor.architecture, group, str(anchor.reference))
            except RotationMergeError as error:
                document.raised(path, error)


def _plan(document: Document, session: Session) -> None:
    """Compile the recipe, as the merge does, without reading weights."""
    from rotation_merge.mergekit_plugin.compile import compiled

    try:
        compiled(session)
        assert session.donors is not None
        _warn(document, session.donors)
    except RotationMergeError as error:
        if document.first is None:  # else it is that fault
            document.raised(_place(document, error), error)
    except ValidationError as error:
        document.fault((), *explain(error.errors()[0]))
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        document.fault((), " ".join(str(error).split()), "correct the recipe")


def _warn(document: Document, donors: Donors) -> None:
    """Warnings about a questionable merge of the donors."""
    warned = set[str]()
    for model, donor in donors.by_model.items():
        path = next((path for path, name in references(document.value) if name == str(model)), ())
        for note in (*donor.pair.warnings, *donor.pair.notes):
            if note not in warned:
                warned.add(note)
                document.fault(path, note, error=False)


def _place(document: Document, error: RotationMergeError) -> Path:
    """The entry that an error of the planner refers to, by its words."""
    for path, name in references(document.value):
        if error.where and name in error.where:
            return path
    return ("parameters",)
