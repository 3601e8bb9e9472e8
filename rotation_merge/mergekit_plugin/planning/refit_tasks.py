"""Delegate `refit` in the plan: one pass over all models ahead of it, and a task for each tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mergekit.config import MergeConfiguration
from torch import Tensor

from rotation_merge.matching.alignment import Alignment, moved_tensors
from rotation_merge.mergekit_plugin.planning.delegate import DelegateTask
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.whole_model_tasks import progress_bar
from rotation_merge.mergekit_plugin.refit import recipe_teachers
from rotation_merge.model.blocks import with_tied
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.labels import watched
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View


class RefitModels:
    """Plans a refit: one task for all tensors, and one each that takes its own."""

    def __init__(self, donors: Donors, config: MergeConfiguration) -> None:
        models: Any = donors.models
        self.donors = donors
        self.plan = recipe_teachers(config, donors.recipe, models, models, donors.options, donors.run)
        answering = [teacher.original.reference for teacher in self.plan.teachers]
        wholes = {str(model): donors.found[model].whole for model in answering if model in donors.found}
        needs = {name: whole for name, whole in wholes.items() if whole is not None}
        self.all = DelegateTask(key="refit", label="", work=self._run, needs=needs, first=True)

    def tensor(self, name: str) -> DelegateTask:
        """The task that gives one tensor of the refitted merge."""

        def take(all: View) -> Tensor:
            return all[name]

        return DelegateTask(key=f"refit:{name}", label=name, work=take, needs={"all": self.all}, moved=False)

    def _run(self, **alignments: Alignment) -> View:
        models, base = self.donors.models, self.donors.recipe.base
        views = {teacher.original.reference: teacher.original for teacher in self.plan.teachers} | {base: models[base]}
        moved = {model: self._moved(view, alignments.get(str(model))) for model, view in views.items()}
        with progress_bar("Refitting", self.donors.options.quiet) as progress:
            teachers = [replace(teacher, view=moved[teacher.original.reference]) for teacher in self.plan.teachers]
            plan = replace(self.plan, base=moved[base], teachers=teachers)
            return plan.refit(self.donors.options, self.donors.run, progress)

    def _moved(self, model: View, alignment: Alignment | None) -> View:
        """A model in the anchor's coordinates, by the anchor's names."""
        donors, base = self.donors, self.donors.models[self.donors.recipe.base]
        mark = donors.run.marks.setdefault(model.name, Fingerprint())
        source = with_tied(base.architecture, donors.source(model.reference, watched(model, mark)))
        aligned = Alignment({}) if alignment is None else alignment
        biases = None if alignment is None else with_tied(base.architecture, base.tensors)
        aligned = replace(aligned, folded=donors.folded)
        tensors: Tensors = moved_tensors(base.architecture, source, aligned, biases, donors.dtype)
        return replace(base, tensors=tensors, at=None)
