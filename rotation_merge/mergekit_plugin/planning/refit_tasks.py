"""Delegate `refit` at work: one pass over all models ahead of the plan.

It streams through the models itself and leaves every tensor of the output in files, so that mergekit's graph holds one
of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, cast

import torch
from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.refit import Refit, RefitResult, Teachers
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.errors import DataError
from rotation_merge.matching.alignment import Alignment, moved_tensors
from rotation_merge.mergekit_plugin.planning.delegate import DelegateTask, merged_tensors
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.refit import AT_ONCE, LENGTH, RefitPlan, Teacher, read_lesson
from rotation_merge.mergekit_plugin.planning.whole_model_tasks import progress_bar
from rotation_merge.model.blocks import read_tensor, unstack, with_tied
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.heads import head_names, is_head
from rotation_merge.model.labels import watched
from rotation_merge.model.tensors import (
    Tensors,
    TensorSource,
    as_tensors,
    by_name,
    extrapolated,
    selected,
    weighted_mean,
)
from rotation_merge.run.data import Data, read_batches, with_small_first_batch
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import Batch, local_path
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Fill, Runner, filled_model
from rotation_merge.run.store import StateStore
from rotation_merge.workers import Progress

ELSEWHERE = "free some space, or name a folder that has more in TMPDIR (in a recipe: 'spill')"
"""Remedy for a full disk."""


class RefitModels:
    """Plans a refit: one task for all tensors, and one each that takes its own."""

    def __init__(self, donors: Donors, config: MergeConfiguration) -> None:
        self.lesson, self.donors = read_lesson(config, donors.recipe, donors, donors.options), donors
        wholes = {str(t.model): donors.found[t.model].whole for t in self.lesson.teachers if t.model in donors.found}
        needs = {name: whole for name, whole in wholes.items() if whole is not None}
        self.all = DelegateTask(key="refit", label="", work=self._run, needs=needs, first=True)

    def tensor(self, name: str) -> DelegateTask:
        """The task that gives one tensor of the refitted merge."""

        def take(all: StateStore) -> Tensor:
            return all.get(name)[0]

        return DelegateTask(key=f"refit:{name}", label=name, work=take, needs={"all": self.all}, moved=False)

    def _run(self, **alignments: Alignment) -> StateStore:
        with progress_bar("Refitting", self.donors.options.quiet) as progress:
            work = _RefitRun(self.lesson, self.donors, alignments)
            try:
                result = work.refit(progress)
                work.write_rest()
                if self.donors.recipe.value("heads_of") == "each" and not self.lesson.pooled:
                    work.solve_heads(result)
            finally:
                work.states.close()
        self._report(result)
        return work.results

    def _report(self, result: RefitResult) -> None:
        run, lesson = self.donors.run, self.lesson
        before, after = (fmean([getattr(m, name) for m in result.maps] or [0.0]) for name in ("before", "after"))
        target = "the mean of all models' answers" if lesson.pooled else "each sample's own model"
        sources = ", ".join(f"`{t.model}` {t.data}" for t in lesson.teachers)
        run.note(
            f"Refit solved {len(result.maps)} linear maps, layer by layer, towards {target} (ridge {lesson.ridge:g}, "
            f"from the {lesson.start_in_words}; samples: {sources}). The error of their outputs fell "
            f"from {before:.3f} to {after:.3f} of the target, on average over these samples."
        )
        if result.losses is not None:
            before, after = result.losses
            count = sum(t.held_out.examples for t in lesson.teachers if t.held_out is not None)
            written = f"; that is worse, so the {lesson.start_in_words} was written" * (after > before)
            change = f"{before:.4f} before the refit and {after:.4f} after it"
            run.note(f"On {count} held-out samples the loss was {change}{written}.")
        for why, names in result.kept.items():
            listed = ", ".join(f"`{name}`" for name in names)
            run.note(f"Refit kept the {lesson.start_in_words} ({why}): {listed}.")
        head = self.donors.tied_head
        if head is not None:
            run.note(
                f"Refit did not solve the head `{head}`, which is tied to an embedding ('untie: true' gives it its own "
                "tensor)."
            )
        if result.whole:
            run.note("Refit held each model whole in memory: transformers stores it in another form than the files.")


class _RefitRun:
    """One refit in progress: sources, samples, runners."""

    def __init__(self, lesson: RefitPlan, donors: Donors, alignments: dict[str, Alignment]) -> None:
        self.lesson, self.donors, self.device = lesson, donors, str(donors.options.device or "cpu")
        self.recipe = self.donors.recipe
        self.base = self.donors.models[self.recipe.base]
        self.states = StateStore(self.lesson.spill)
        beside_states = self.lesson.spill or self.recipe.base in self.donors.models.held
        self.results = StateStore(self.lesson.spill) if beside_states else StateStore(gettempdir(), ELSEWHERE)
        self.donors.run.endings.append(self.results.close)
        self.sources = [self._source(t, alignments.get(str(t.model))) for t in self.lesson.teachers]
        anchor = self._source(Teacher(self.recipe.base, 1.0, "", 0), None)
        shares = [t.share for t in self.lesson.teachers]
        self.anchor = anchor
        start = (
            anchor if self.lesson.start == "anchor" else selected(self._merged(shares), anchor, self.recipe.excluded)
        )
        self.start: TensorSource = start  # the merge runs as it is written
        self.written: set[str] = set()
        tensors = self.base.architecture.tensors()
        self.large = {info.name for info in tensors if len(info.axes) > 1 and not info.stacked}

    def refit(self, progress: Progress) -> RefitResult:
        lesson, architecture = self.lesson, self.base.architecture
        parts = [with_small_first_batch(self._samples(number)) for number in range(len(lesson.teachers))]
        batches = [batch for part in parts for batch in part]
        shares = [t.share for t in lesson.teachers]
        if lesson.pooled:
            inputs = [batches for _ in parts]
            assignment = [[(k, i, share) for k, share in enumerate(shares)] for i in range(len(batches))]
            weights = [1.0] * len(batches)
        else:
            inputs = parts
            assignment = [[(k, i, 1.0)] for k, part in enumerate(parts) for i in range(len(part))]
            weights = [shares[k] * len(shares) for k, part in enumerate(parts) for _ in part]
        self.runners = [
            self._runner(str(number), self.donors.models[teacher.model].transformers_config, source, model_batches)
            for number, (teacher, source, model_batches) in enumerate(
                zip(lesson.teachers, self.sources, inputs, strict=True)
            )
        ]
        config = self.base.transformers_config
        held_out = [(t.share, t.held_out) for t in lesson.teachers if t.held_out is not None]
        judged = [] if self.recipe.value("heads_of") == "each" else held_out  # whose heads are not the merge's
        beside = [batch for _, data in judged for batch in data.batches]
        self.merge = self._runner("merge", config, self.start, [*batches, *beside], self._rounded)
        answers = Teachers(self.runners, [*assignment, *([] for _ in beside)], self.states)
        result = Refit(
            *(self.merge, architecture, answers, [*weights, *(0.0 for _ in beside)], lesson.ridge, self._write),
            *(self.recipe.excluded, progress),
        ).run()
        if judged and not result.alike:
            result.losses = self._losses(judged, len(batches))
            if result.losses is not None and result.losses[1] > result.losses[0]:
                self.written.clear()  # so that all of the start is written
        return result

    def _merged(self, shares: Sequence[float]) -> TensorSource:
        """The start of the refit, if it is not the anchor."""
        lesson = self.lesson
        if lesson.start == "average":
            average = weighted_mean(self.sources, shares)
            return average if lesson.scale == 1.0 else extrapolated(average, self.anchor, lesson.scale)
        tuned = [(t, s) for t, s in zip(lesson.teachers, self.sources, strict=True) if t.model != self.recipe.base]
        total = sum(teacher.share for teacher, _ in tuned)
        weights = [1.0, *(teacher.share / total * len(tuned) for teacher, _ in tuned)]
        if lesson.start == "task_arithmetic":
            mean = weighted_mean([source for _, source in tuned], [teacher.share / total for teacher, _ in tuned])
            return extrapolated(mean, self.anchor, lesson.scale * len(tuned))
        method = next(method for method in TASK_VECTORS if method.spec.name == lesson.start)
        named = [(self.recipe.base, self.anchor), *((teacher.model, source) for teacher, source in tuned)]
        tied = self.donors.tied_head is not None
        return merged_tensors(method, self.base.architecture, named, weights, {"lambda": lesson.scale}, tied)

    def _losses(self, judged: Sequence[tuple[float, Data]], first: int) -> tuple[float, float] | None:
        """Losses of the start and the refitted merge on held-out samples, weighted by the models' shares.

        None if the merge's head has no such labels.

        Args:
            first: number of the first of their batches among the merge's.
        """
        batches = [batch for _, data in judged for batch in data.batches]
        start = self._runner("start", self.base.transformers_config, self.start, batches, self._as_stored)
        start.run_through()
        losses = []
        for answers in (LayerwiseAnswers(start, 0), LayerwiseAnswers(self.merge, first)):
            try:
                losses.append(sum(share * score(answers, data).loss for share, data in judged))
            except DataError as error:
                self.donors.run.note(f"The refit was not judged on held-out samples: {error}.")
                return None
        total = sum(share for share, _ in judged)
        return losses[0] / total, losses[1] / total

    def _as_stored(self, info: TensorInfo, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype(info.name)) if tensor.is_floating_point() else tensor

    def write_rest(self) -> None:
        """Write the start's tensors that were not solved."""
        for info in self.base.architecture.tensors():
            if all(name in self.written for name in info.names):
                continue
            tensor = read_tensor(info, self.start)
            for name, piece in {} if tensor is None else unstack(info, tensor).items():
                if name not in self.written and not self.recipe.excluded(name):
                    self._write(name, piece)

    def solve_heads(self, body_refit: RefitResult) -> None:
        """Every donor's own head, on its own samples, as the merged body carries them: the last maps of its refit.

        All layers have been run on these samples, by the merge and by the donors. Where all of them compute the same,
        heads stay as they are.
        """
        if body_refit.alike:
            return
        architecture, run, exclude = self.base.architecture, self.donors.run, self.recipe.exclude
        heads, first = head_names(architecture), 0
        body = self._solved(self.anchor)

        def skip(name: str) -> bool:
            return name not in heads or any(part in name for part in exclude)

        for teacher, source, runner in zip(self.lesson.teachers, self.sources, self.runners, strict=True):
            count, config = len(runner.batches), self.donors.models[teacher.model].transformers_config
            solved = run.heads.setdefault(str(teacher.model), {})

            def write(name: str, tensor: Tensor, solved: dict[str, Tensor] = solved) -> Tensor:
                solved[name] = tensor.to("cpu", self._dtype(name)).contiguous()
                return solved[name].to(tensor)

            if teacher.model != self.recipe.base and not all(map(skip, heads)):
                merge = self._runner("", config, selected(body, source, heads.__contains__), runner.batches)
                merge.follow(self.merge, first, is_head)
                teacher_run = self._runner("", config, source, runner.batches)
                teacher_run.follow(runner, 0, is_head)
                answers = Teachers([teacher_run], [[(0, i, 1.0)] for i in range(count)], self.states)
                shares, ridge = [1.0] * count, self.lesson.ridge
                Refit(merge, architecture, answers, shares, ridge, write, skip).run()
            first += count
        if any(run.heads.values()):
            run.note(
                "Refit also solved each donor's head, on its samples under the merged body ('exclude: NAME' "
                "leaves out tensors with NAME in their names)."
            )

    def _source(self, teacher: Teacher, alignment: Alignment | None) -> TensorSource:
        """A model in the anchor's coordinates, by the anchor's names."""
        model, architecture = self.donors.models[teacher.model], self.base.architecture
        mark = self.donors.run.marks.setdefault(str(teacher.model), Fingerprint())
        source: TensorSource = with_tied(architecture, self.donors.source(teacher.model, watched(model, mark)))
        folded = self.donors.folded
        if alignment is None:
            return folded_tensors(architecture, source, folded, self.donors.dtype)
        alignment = replace(alignment, folded=folded)
        return moved_tensors(
            architecture, source, alignment, with_tied(architecture, self.base.tensors), self.donors.dtype
        )

    def _solved(self, source: TensorSource) -> TensorSource:
        """The tensors that were written so far, all others from a source."""
        tensors = as_tensors(source)

        def read(name: str) -> Tensor:
            return self.results.get(name)[0] if name in self.written else tensors[name]

        return Tensors(tensors.shapes, tensors.dtypes, by_name(read))

    def _samples(self, number: int) -> list[Batch]:
        """The samples that a teacher brings."""
        teacher = self.lesson.teachers[number]
        if teacher.batches is not None:
            return teacher.batches
        model = self.donors.models[teacher.model]
        config = self.donors.models[teacher.model].transformers_config
        writer = filled_model(config, model.tensors, model.architecture, self.exact, self.device)
        path = local_path(model.reference.model.path)
        return read_batches(
            teacher.data, path, writer, teacher.samples, AT_ONCE, LENGTH, self.lesson.seed + number
        ).batches

    def _runner(
        self, prefix: str, config: Any, source: TensorSource, batches: list[Batch], fill: Fill = lambda _, x: x
    ) -> Runner:
        architecture, untie = self.base.architecture, self.recipe.untie
        return Runner(config, source, architecture, batches, self.states, prefix, self.exact, self.device, fill, untie)

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype of an output tensor."""
        stored = self.base.stored_dtypes
        dtype = dtype_from_name(self.recipe.config.dtype) or stored.get(name) or next(iter(stored.values()))
        return cast(torch.dtype, dtype)

    @property
    def exact(self) -> torch.dtype:
        """The dtype of the computation."""
        return torch.promote_types(self._dtype(self.base.names[0]), torch.float32)

    def _rounded(self, info: TensorInfo, tensor: Tensor) -> Tensor:
        """Tensors other than linear maps run as they will be stored; solved maps are rounded afterwards.

        The model may have more names than the checkpoint: tied tensors. Embeddings are large and are written at once.
        """
        blocks = (b for b in self.base.architecture.blocks if any(t.key == info.key for t in b.tensors))
        solved = not tensor.is_floating_point() or any(linear_map(block, info) is not None for block in blocks)
        if not solved and info.name in self.large and not self.recipe.excluded(info.name):
            return self._write(info.name, tensor)
        return tensor if solved else tensor.to(self._dtype(info.name))

    def _write(self, name: str, tensor: Tensor) -> Tensor:
        stored = tensor.to("cpu", self._dtype(name)) if tensor.is_floating_point() else tensor
        self.results.put(name, [stored])
        self.written.add(name)
        return stored.to(tensor)


class LayerwiseAnswers:
    """A model that has been run block by block, asked for its answers to its batches one after the other.

    Args:
        first: number of the first batch.
    """

    def __init__(self, runner: Runner, first: int) -> None:
        self.runner, self.config, self._next = runner, runner.model.config, first

    def __call__(self, **_: Tensor) -> SimpleNamespace:
        answer = self.runner.answer(self._next)
        self._next += 1
        return SimpleNamespace(logits=answer.logits.cpu())
