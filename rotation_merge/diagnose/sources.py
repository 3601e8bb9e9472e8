"""Checks of a recipe without reading weights: all faults at once, each at its line and column.

Models are present, complete, of one architecture and size, and compatible with the options.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from pydantic import ValidationError

from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.matching.alignment import load_file
from rotation_merge.matching.pair import shape_faults
from rotation_merge.matching.stream import residual_groups
from rotation_merge.mergekit_plugin.document import Document, Fault, Path, dotted, is_ours, walk
from rotation_merge.mergekit_plugin.donors import Donor
from rotation_merge.mergekit_plugin.recipe import MODEL_INPUT, Recipe, named_inputs, read
from rotation_merge.mergekit_plugin.rules import explain
from rotation_merge.mergekit_plugin.session import Models, Session
from rotation_merge.model.contents import VOCABULARIES
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import HubFile, is_hub_name
from rotation_merge.model.labels import label_rows
from rotation_merge.model.nearness import equality
from rotation_merge.model.open import parse_reference
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids
from rotation_merge.report.integrity import check_folder, check_parents
from rotation_merge.report.remote import Refused

FAULTS = ("layer types", "head count", "wrong shape", "RoPE", "tensor twice")
"""Kinds of defects with which a model cannot be merged as it is meant."""

HUB_NOTE = "not a folder here, and not in the hub's cache: its files are not checked"


def check_documents(parsed: Sequence[Document], refused: Refused, remote: Collection[str]) -> list[Fault]:
    """Every fault of a recipe for mergekit-yaml or mergekit-multi, in the order of the text.

    Args:
        refused: errors of models that the hub does not give, by name.
        remote: names of the models of which only the headers are here.
    """
    names = set[str]()
    for document in (document for document in parsed if isinstance(document.value, dict)):
        _check_sources(document, read(document), names, refused, remote)
        if isinstance(name := document.value.get("name"), str):
            names.add(name)
    return sorted((fault for d in parsed for fault in d.faults), key=lambda f: (f.document, f.line, f.column))


def _check_sources(
    document: Document, recipe: Recipe | None, earlier: set[str], refused: Refused, remote: Collection[str]
) -> None:
    """Collect the faults of all models and files that a document names; then compile it, where it has none."""
    session = None if recipe is None else Session(recipe, MergeOptions(), watched=False)
    parameters = document.value.get("parameters")
    anyhow = not is_ours(document.value) or (isinstance(parameters, dict) and parameters.get("unsupported") == "merge")
    models = Models(MergeOptions(), "merge" if anyhow else "error") if session is None else session.models
    complete = Sources(document, recipe, earlier, models, refused, remote).check()
    if complete and session is not None and document.first is None:
        _compile(document, session)


def absent_models(parsed: Sequence[Document]) -> list[str]:
    """Names on the hub of the models and adapters of a recipe that have not been downloaded, except GGUF files."""
    values = [document.value for document in parsed if isinstance(document.value, dict)]
    merges, names = {value.get("name") for value in values}, list[str]()
    for name in (name for value in values for _, name in references(value) if name not in merges):
        with suppress(RotationMergeError):  # said where the recipe is checked
            names += [str(part) for part in absent_parts(parse_reference(name)) if is_hub_name(part.path)]
    return list(dict.fromkeys(names))


def references(value: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Places that name models, and the names; the base first. A recipe's own parameters name none."""
    models = ((path, name) for path, name, kind in named_inputs(value) if kind == MODEL_INPUT)
    places = [(path, name) for path, name in models if path[0] != "parameters"]
    return sorted(places, key=lambda place: place[0] != ("base_model",))


@dataclass(frozen=True)
class Sources:
    """What a document reads, checked from headers; of weights only whether a donor's are the base's.

    All faults are collected in the document.

    Attributes:
        recipe: the parsed document; None if it has faults already.
        earlier: names of merges that mergekit-multi makes first; nothing of them is there yet.
        models: of the document, opened once each.
        refused, remote: as of `check_documents`.
    """

    document: Document
    recipe: Recipe | None
    earlier: set[str]
    models: Models
    refused: Refused
    remote: Collection[str]

    def check(self) -> bool:
        """Collect the faults; returns whether all models and files are here."""
        value, opened, complete = self.document.value, dict[str, tuple[Path, View]](), True
        for path, name in references(value):
            model = None if name in self.earlier or name in opened else self._opened(path, name)
            complete = complete and (model is not None or name in opened)
            if model is not None:
                opened[name] = (path, model)
        _, base = opened.get(str(value.get("base_model")), ((), None))
        files = [read for read in named_inputs(value) if read[2] != MODEL_INPUT and not read[1].startswith("demo:")]
        complete = all([complete, *(self._check_file(path, name, base) for path, name, _ in files)])
        if base is not None:
            self._compare(base, opened)
        for path, model in list(opened.values())[:1]:  # the base, or the first: mergekit copies its tokenizer
            self._note_tokenizer(path, model)
        return complete

    def _note_tokenizer(self, path: Path, base: View) -> None:
        """Note that a language model that the merge takes its tokenizer from has none."""
        named = self.document.value.get("tokenizer") or self.document.value.get("tokenizer_source")
        words = any(info.vocabulary_axis is not None for info in base.architecture.tensors())
        here = os.path.isdir(str(base.reference.model.path)) and os.listdir(base.folder)
        if here and words and not named and not any(name.startswith(VOCABULARIES) for name in here):
            remedy = "copy one into the folder, or the merge cannot be given text"
            self.document.fault(path, f"{base.name}: it has no tokenizer", remedy, error=False)

    @contextmanager
    def _collected(self, path: Path, name: str) -> Iterator[None]:
        """Errors within are faults of the document, at the place where it names a model or a file."""
        try:
            yield
        except RotationMergeError as error:
            self.document.raised(path, error)
        except Exception as error:  # of a name that is none, or whatever a damaged checkpoint makes the readers raise
            problem = f"{name}: cannot be read ({error})"
            self.document.fault(path, problem, "name a directory or org/name, or download it again")

    def _opened(self, path: Path, name: str) -> View | None:
        """A model, its files and architecture checked; a wrong config is a fault, other defects of headers are notes.

        None if it cannot be read, or has to be downloaded.
        """
        with self._collected(path, name):
            for part in filter(self.refused.__contains__, name.split("+")):
                raise self.refused[part]
            reference = ModelReference.parse(name)
            if absent_parts(reference):
                remedy = f"{nearest_path(name, 'check the name')}, or download it and check again"
                self.document.fault(path, f"{name}: {HUB_NOTE}", remedy, error=False)
                return None
            model = self.models[reference]
            defects = check_folder(model.folder)
            if reference.lora is None and not is_ours(self.document.value):
                defects += check_parents({name: model.folder})
            for defect in filter(lambda defect: defect.fatal, defects):
                line = f"{model.reference}: {defect.kind}: {defect.what}"
                self.document.fault(path, line, defect.remedy, error=defect.kind in FAULTS)
            return model
        return None

    def _check_file(self, path: Path, name: str, base: View | None) -> bool:
        """Check that a file is here, and an alignment of the base's architecture; False if it must be downloaded.

        The alignment's weights are not compared.
        """
        hub_file = HubFile.of(name)
        place = name if hub_file is None else hub_file.cached(self.models.options.transformers_cache)
        if place is None:
            remedy = "the merge downloads it; check again afterwards"
            self.document.fault(path, f"{name}: not in the hub's cache: it is not checked", remedy, error=False)
        elif not os.path.exists(place):
            written = "write it with 'rotation-merge align --alignment FILE'"
            advice = nearest_path(name, written if path[-1] == "alignment" else "check the path", os.path.exists)
            self.document.fault(path, f"{name}: no such file", advice)
        elif base is not None and path[-1] == "alignment":
            with self._collected(path, name):
                load_file(place, base.architecture)
        return place is not None

    def _compare(self, anchor: View, opened: dict[str, tuple[Path, View]]) -> None:
        """Compare each model with the anchor: architecture, sizes, tokens; and the anchor with the recipe's groups."""
        if self.recipe is not None:
            self.recipe.settle_heads(model for _, model in opened.values())
        for name, (path, model) in opened.items():
            if model is not anchor:
                with self._collected(path, name):
                    self._compare_donor(anchor, path, model)
                    self._note_equal(anchor, path, self.models[model.reference], opened)
        known = {fault.where for fault in self.document.faults}
        for path, group in walk(self.document.value):
            if path[-2:] == ("parameters", "residual") and isinstance(group, str) and dotted(path) not in known:
                with self._collected(path, group):
                    residual_groups(anchor.architecture, group, str(anchor.reference))

    def _compare_donor(self, anchor: View, path: Path, model: View) -> None:
        """Raise what keeps a model from the anchor; shapes that differ are collected."""
        excluded = self.recipe.excluded if self.recipe is not None else lambda _: False
        value, named = self.document.value, dict(references(self.document.value))
        resizes = bool(value.get("tokenizer") or value.get("tokenizer_source"))
        carried = path[-1] == "finetuned_from" or (*path[:-1], "parameters", "finetuned_from") in named
        self.models.together(anchor.reference, [model.reference], averaged=not carried)
        if self.recipe is not None:
            label_rows(anchor, model, excluded)
        apart = self.recipe is None or (self.recipe.stock and path[0] != "models")  # compared where they meet
        donor, any_size = self.models[model.reference], resizes or carried or apart
        for fault in shape_faults(anchor, donor, excluded, any_size):
            self.document.raised(path, fault)
        words = (info for info in anchor.architecture.tensors() if info.vocabulary_axis is not None)
        averaged = any(not excluded(info.name) for info in words)
        if path[0] == "models" and averaged and not resizes and not carried:  # of slices, compiling checks it
            check_token_ids(anchor, model)

    def _note_equal(self, anchor: View, path: Path, donor: View, opened: dict[str, tuple[Path, View]]) -> None:
        """Note that a donor is its base, which it may be where an adapter was forgotten."""
        origins = {place[:-2]: name for place, name in references(self.document.value) if place[-1] == "finetuned_from"}
        _, base = opened.get(origins.get(path[:-1], ""), ((), anchor))
        names = {part for view in (base, donor) for part in str(view.reference).split("+")}
        if self.document.first is not None or path[-1] != "model" or base is donor or names.intersection(self.remote):
            return
        if remark := equality(base, donor):
            self.document.fault(path, f"{donor.reference} {remark}", error=False)


def _compile(document: Document, session: Session) -> None:
    """Compile the recipe, as the merge does, without reading weights; warn of donors whose merge is questionable."""
    from rotation_merge.mergekit_plugin.compile import check_stock, compiled

    named = references(document.value)
    donors: Mapping[ModelReference, Donor] = {}
    try:
        if session.recipe.stock:
            check_stock(session)
        else:
            donors = compiled(session)[1].donors
    except RotationMergeError as error:
        if document.first is None:  # else it is that fault
            places = [path for path, name in named if error.where and name in error.where]
            document.raised((places or [("parameters",)])[0], error)
    except ValidationError as error:
        document.fault((), *explain(error.errors()[0]))
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        document.fault((), " ".join(str(error).split()), "correct the recipe")
    else:
        for model, donor in donors.items():
            place = next((path for path, name in named if name == str(model)), ())
            for note in (*donor.pair.warnings, *donor.pair.notes):
                if note not in [fault.what for fault in document.faults]:
                    document.fault(place, note, error=False)
    finally:
        session.run.end()
