"""Refit of whole models: a start, and its maps solved layer by layer, as a View.

One pass over all models: each tensor of the result is left in a store, so that no model is held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from statistics import fmean
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.average import averaged
from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.models import MergedModels
from rotation_merge.averaging.refit import Refit, RefitResult, Teachers
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.teachers import Teacher, read_teachers, samples_of, teachers_in_memory
from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.blocks import read_tensor, unstack, with_tied
from rotation_merge.model.forms import translated
from rotation_merge.model.heads import head_names, is_head
from rotation_merge.model.tensors import Tensors, by_name, selected, weighted_mean
from rotation_merge.model.view import View
from rotation_merge.run.data import Data, Samples, with_small_first_batch
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import Batch
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Runner, filled_model
from rotation_merge.run.store import StateStore
from rotation_merge.workers import Progress, listener

ELSEWHERE = "free some space, or name a folder that has more in TMPDIR (in a recipe: 'spill')"
"""Remedy for a full disk."""

STARTS = {"average": "average", "anchor": "anchor", "task_arithmetic": "sum of the task vectors"}
"""Starts in words; those that are not here are merges by a method of that name."""

Chosen = Callable[[str], bool]
"""Says of a tensor, by its name, whether it is chosen."""


@dataclass(frozen=True)
class RefittedModel:
    """A refitted merge.

    Attributes:
        view: with the base's names; its tensors are read from where the refit has left them.
        notes: lines for a report.
        heads: solved tensors of every teacher's own head, by the teacher's name.
        close: removes the tensors.
    """

    view: View
    notes: list[str]
    heads: dict[str, dict[str, Tensor]]
    close: Callable[[], None] = field(repr=False)


def refitted(
    base: View,
    teachers: Sequence[Teacher],
    config: RefitConfig,
    *,
    pooled: bool,
    exclude: Chosen = lambda _: False,
    own_heads: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    progress: Progress = lambda *_: None,
) -> RefittedModel:
    """Average models and solve the average's linear maps, layer by layer (`averaging.refit`).

    Args:
        base: in the coordinates of the merge, folded where the teachers' views are.
        teachers, pooled: as `read_teachers` gives them.
        exclude: tensors, by the base's names, that stay the base's.
        own_heads: every teacher answers under its own head, and without a pool each head is solved, too.
        dtype: of the result; None: each tensor has that of the base's files.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    in_files = base.files is not None and config.spill is None
    store = StateStore(gettempdir(), ELSEWHERE) if in_files else StateStore(config.spill)
    states, written = StateStore(config.spill), _WrittenTensors(base, _source(base, base), dtype, store)
    try:
        work = _Refit(base, teachers, config, pooled, exclude, own_heads, device, states, written)
        result = work.solve(progress)
        work.write_rest()
        if own_heads and not pooled and not result.alike:
            work.solve_heads()
    except BaseException:
        store.close()
        raise
    finally:
        states.close()
    return RefittedModel(written.view(), [*work.notes, *work.words(result)], work.heads, store.close)


def refitted_later(
    views: Sequence[View],
    samples: Samples,
    config: RefitConfig,
    weights: Sequence[float] | None = None,
    exclude: Chosen = lambda _: False,
) -> View:
    """Views in shared coordinates, the base first, refitted when the first tensor of the result is asked for.

    Args:
        samples, weights: as of `teachers_in_memory`; read now.
    """
    base = views[0]
    teachers, pooled = read_teachers(base, teachers_in_memory(views, samples, config, weights), config)

    @cache
    def solved() -> View:
        return refitted(base, teachers, config, pooled=pooled, exclude=exclude, progress=listener()).view

    return _with_tensors(base, lambda name: solved()[name], base.dtype)


def _with_tensors(base: View, read: Callable[[str], Tensor], dtype: torch.dtype | None) -> View:
    """A model with other tensors of the same names; `dtype` of floating ones, None: as they are read."""
    filled = replace(base, tensors=Tensors(base.shapes, base.dtypes, by_name(read)), at=None)
    return filled.blockwise(lambda *_: None, dtype)


def _source(view: View, base: View) -> Tensors:
    """A model's tensors by the base's names, a tied one under both of its names."""
    return with_tied(base.architecture, translated(view.tensors, view.architecture, base.architecture))


@dataclass(frozen=True)
class _WrittenTensors:
    """The tensors of the merge: those that are done in a store, as they are stored, all others the base's.

    Attributes:
        names: of those that are done.
    """

    base: View
    anchor: Tensors
    dtype: torch.dtype | None
    store: StateStore
    names: set[str] = field(default_factory=set)

    def dtype_of(self, name: str) -> torch.dtype:
        stored = self.base.stored_dtypes
        return self.dtype or stored.get(name) or next(iter(stored.values()))

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it is stored."""
        return tensor.to("cpu", self.dtype_of(name)) if tensor.is_floating_point() else tensor

    def write(self, name: str, tensor: Tensor) -> Tensor:
        """Write a tensor; returns it rounded, in the dtype and on the device that it had."""
        stored = self.rounded(name, tensor)
        if not all_finite([stored]):
            problem = f"tensor '{name}' of the merged model would hold NaN or infinity"
            raise RotationMergeError(problem, remedy="look at the weights of the models and at the samples")
        self.store.put(name, [stored])
        self.names.add(name)
        return stored.to(tensor)

    def __getitem__(self, name: str) -> Tensor:
        return self.store.get(name)[0] if name in self.names else self.anchor[name]

    def view(self) -> View:
        """The merge; the base's tensors in it are rounded as the others are."""
        return _with_tensors(self.base, lambda name: self.rounded(name, self[name]), self.dtype)


@dataclass
class _Refit:
    """One refit in progress; arguments as of `refitted`.

    Attributes:
        start: the weights before solving; the merge runs as it is written.
    """

    base: View
    teachers: Sequence[Teacher]
    config: RefitConfig
    pooled: bool
    exclude: Chosen
    own_heads: bool
    device: str
    states: StateStore
    written: _WrittenTensors
    notes: list[str] = field(default_factory=list)
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.architecture, self.anchor = self.base.architecture, self.written.anchor
        self.tied_head = None if self.base.untie else self.base.tied_head
        self.head_names = head_names(self.architecture)
        self.large = {i.name for i in self.architecture.tensors() if len(i.axes) > 1 and not i.stacked}
        self.exact = torch.promote_types(self.written.dtype_of(self.base.names[0]), torch.float32)
        self.sources = [_source(teacher.view, self.base) for teacher in self.teachers]
        merged = self.anchor if self.config.start == "anchor" else self._merged()
        self.start = merged if merged is self.anchor else selected(merged, self.anchor, self.excluded)

    def excluded(self, name: str) -> bool:
        """Whether a tensor of the merge stays the base's."""
        return self.exclude(name) or (self.own_heads and name in self.head_names)

    def _merged(self) -> Tensors:
        """The models' average, or a merge of the task vectors."""
        scale = self.config.lambda_
        if self.config.start == "average":
            average = weighted_mean(self.sources, [teacher.share for teacher in self.teachers])
            return average if scale == 1.0 else weighted_mean([self.anchor, average], [1 - scale, scale])
        tuned = [teacher for teacher in self.teachers if teacher.view is not self.base]
        total = sum(teacher.share for teacher in tuned)
        shares = [teacher.share / total for teacher in tuned]
        if self.config.start == "task_arithmetic":
            mean = weighted_mean([_source(teacher.view, self.base) for teacher in tuned], shares)
            return weighted_mean([self.anchor, mean], [1 - scale * len(tuned), scale * len(tuned)])
        views, weights = [teacher.view for teacher in tuned], [share * len(tuned) for share in shares]
        return self._by_task_vectors([self.base, *views], [1.0, *weights])

    def _by_task_vectors(self, views: Sequence[View], weights: Sequence[float]) -> Tensors:
        """Models merged by the method that the start names, the base first."""
        method = next(method for method in TASK_VECTORS if method.spec.name == self.config.start)
        models = replace(MergedModels.of(views), tied_head=self.tied_head)
        return averaged(views, method.on(models), {"lambda": self.config.lambda_, "weight": list(weights)})

    def solve(self, progress: Progress) -> RefitResult:
        """Solve the merge's maps; where held-out samples say that this is worse, the start will be written."""
        parts = [with_small_first_batch(self._batches(number)) for number in range(len(self.teachers))]
        batches = [batch for part in parts for batch in part]
        self.runners = [
            self._runner(str(number), teacher.original, source, batches if self.pooled else part)
            for number, (teacher, source, part) in enumerate(zip(self.teachers, self.sources, parts, strict=True))
        ]
        answering, weights = self._assigned([len(part) for part in parts])
        held_out = [(teacher.share, teacher.held_out) for teacher in self.teachers if teacher.held_out is not None]
        judged = [] if self.own_heads else held_out  # whose heads are not the merge's
        beside = [batch for _, data in judged for batch in data.batches]
        self.merge = self._runner("merge", self.base, self.start, [*batches, *beside], fill=self._filled)
        answers = Teachers(self.runners, [*answering, *([] for _ in beside)], self.states)
        solving = self.architecture, answers, [*weights, *(0.0 for _ in beside)], self.config.ridge
        result = Refit(self.merge, *solving, self.written.write, self.excluded, progress).run()
        if judged and not result.alike:
            result.losses = self._losses(judged, len(batches))
            if result.losses is not None and result.losses[1] > result.losses[0]:
                self.written.names.clear()
        return result

    def _assigned(self, counts: Sequence[int]) -> tuple[list[list[tuple[int, int, float]]], list[float]]:
        """The teachers that answer to each batch (number, its batch, its share), and the weight of each batch.

        Args:
            counts: of the batches that each teacher brings.
        """
        shares = [teacher.share for teacher in self.teachers]
        if self.pooled:
            total = sum(counts)
            return [[(k, i, share) for k, share in enumerate(shares)] for i in range(total)], [1.0] * total
        pairs = [(k, i) for k, count in enumerate(counts) for i in range(count)]
        return [[(k, i, 1.0)] for k, i in pairs], [shares[k] * len(shares) for k, _ in pairs]

    def _batches(self, number: int) -> list[Batch]:
        """The samples that a teacher brings; those of its own are written now."""
        teacher = self.teachers[number]
        if teacher.batches is not None:
            return teacher.batches
        model, config = teacher.original, teacher.original.transformers_config
        writer = filled_model(config, model.tensors, model.architecture, self.exact, self.device)
        return samples_of(teacher, writer, teacher.samples, self.config.seed + number).batches

    def _runner(self, prefix: str, model: View, source: Tensors, batches: list[Batch], **fill: Any) -> Runner:
        """Runs tensors by the base's names as a model of another's config."""
        given = model.transformers_config, source, self.architecture, batches, self.states, prefix, self.exact
        return Runner(*given, self.device, untie=self.base.untie, **fill)

    def _filled(self, info: TensorInfo, tensor: Tensor) -> Tensor:
        """Tensors other than linear maps run as they will be stored; solved maps are rounded afterwards.

        The model may have more names than the checkpoint: tied tensors. Embeddings are large and are written at once.
        """
        blocks = (block for block in self.architecture.blocks if any(t.key == info.key for t in block.tensors))
        if not tensor.is_floating_point() or any(linear_map(block, info) is not None for block in blocks):
            return tensor
        if info.name in self.large and not self.excluded(info.name):
            return self.written.write(info.name, tensor)
        return self.written.rounded(info.name, tensor)

    def _losses(self, judged: Sequence[tuple[float, Data]], first: int) -> tuple[float, float] | None:
        """Losses of the start and the refitted merge on held-out samples, weighted by the models' shares.

        None if the merge's head has no such labels.

        Args:
            first: number of the first of their batches among the merge's.
        """
        batches = [batch for _, data in judged for batch in data.batches]
        fill = self.written.rounded
        start = self._runner("start", self.base, self.start, batches, fill=lambda info, x: fill(info.name, x))
        start.run_through()
        total, losses = sum(share for share, _ in judged), []
        for answers in (LayerwiseAnswers(start, 0), LayerwiseAnswers(self.merge, first)):
            try:
                losses.append(sum(share * score(answers, data).loss for share, data in judged) / total)
            except DataError as error:
                self.notes.append(f"The refit was not judged on held-out samples: {error}.")
                return None
        return losses[0], losses[1]

    def write_rest(self) -> None:
        """Write the start's tensors that were not solved."""
        for info in self.architecture.tensors():
            rest = [name for name in info.names if name not in self.written.names and not self.excluded(name)]
            tensor = read_tensor(info, self.start) if rest else None
            pieces = {} if tensor is None else unstack(info, tensor)
            for name in filter(pieces.__contains__, rest):
                self.written.write(name, pieces[name])

    def solve_heads(self) -> None:
        """Solve every teacher's own head, on its own samples under the merged body: the last maps of its refit.

        All layers have been run on these samples, by the merge and by the teachers.
        """
        body, first = Tensors(self.anchor.shapes, self.anchor.dtypes, by_name(self.written.__getitem__)), 0
        for teacher, source, runner in zip(self.teachers, self.sources, self.runners, strict=True):
            solved = self.heads.setdefault(teacher.original.name, {})
            if teacher.view is not self.base and not all(map(self.exclude, self.head_names)):
                merge, again = (
                    self._runner("", teacher.original, tensors, runner.batches)
                    for tensors in (selected(body, source, self.head_names.__contains__), source)
                )
                merge.follow(self.merge, first, is_head)
                again.follow(runner, 0, is_head)
                self._solve_head(merge, again, solved)
            first += len(runner.batches)
        if any(self.heads.values()):
            self.notes.append(
                "Refit also solved each donor's head, on its samples under the merged body ('exclude: NAME' "
                "leaves out tensors with NAME in their names)."
            )

    def _solve_head(self, merge: Runner, teacher: Runner, solved: dict[str, Tensor]) -> None:
        """Solve a head, whose tensors are put into `solved`."""

        def write(name: str, tensor: Tensor) -> Tensor:
            solved[name] = self.written.rounded(name, tensor).contiguous()
            return solved[name].to(tensor)

        def skip(name: str) -> bool:
            return name not in self.head_names or self.exclude(name)

        weights = [1.0] * len(teacher.batches)
        answers = Teachers([teacher], [[(0, i, 1.0)] for i in range(len(weights))], self.states)
        Refit(merge, self.architecture, answers, weights, self.config.ridge, write, skip).run()

    def words(self, result: RefitResult) -> list[str]:
        """The refit in words."""
        before, after = (fmean([getattr(m, name) for m in result.maps] or [0.0]) for name in ("before", "after"))
        target = "the mean of all models' answers" if self.pooled else "each sample's own model"
        sources = ", ".join(f"`{teacher.original.name}` {teacher.source}" for teacher in self.teachers)
        start = STARTS.get(self.config.start, f"merge by {self.config.start}")
        notes = [
            f"Refit solved {len(result.maps)} linear maps, layer by layer, towards {target} (ridge "
            f"{self.config.ridge:g}, from the {start}; samples: {sources}). The error of their outputs fell "
            f"from {before:.3f} to {after:.3f} of the target, on average over these samples."
        ]
        if result.losses is not None:
            before, after = result.losses
            examples = sum(teacher.held_out.examples for teacher in self.teachers if teacher.held_out is not None)
            written = f"; that is worse, so the {start} was written" * (after > before)
            change = f"{before:.4f} before the refit and {after:.4f} after it"
            notes.append(f"On {examples} held-out samples the loss was {change}{written}.")
        for why, names in result.kept.items():
            notes.append(f"Refit kept the {start} ({why}): {', '.join(f'`{name}`' for name in names)}.")
        if self.tied_head is not None:
            tied = "which is tied to an embedding ('untie: true' gives it its own tensor)"
            notes.append(f"Refit did not solve the head `{self.tied_head}`, {tied}.")
        if self.merge.whole:
            why = "transformers stores it in another form than the files"
            notes.append(f"Refit held each model whole in memory: {why}.")
        return notes


class LayerwiseAnswers:
    """A model that has been run block by block, asked for its answers to its batches, from a number on."""

    def __init__(self, runner: Runner, first: int) -> None:
        self.runner, self.config, self._numbers = runner, runner.model.config, count(first)

    def __call__(self, **_: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.runner.answer(next(self._numbers)).logits.cpu())
