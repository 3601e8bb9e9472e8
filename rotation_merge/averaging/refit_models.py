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

import torch
from mergekit import merge_methods
from torch import Tensor

from rotation_merge.averaging.average import averaged, check_merged
from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.methods import MergedModels
from rotation_merge.averaging.refit import Refit, RefitResult, Teachers
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.errors import DataError, RecipeError
from rotation_merge.model.forms import named_as
from rotation_merge.model.heads import head_names, is_head
from rotation_merge.model.tensors import Tensors, by_name, selected
from rotation_merge.model.view import View
from rotation_merge.run.data import (
    Data,
    Samples,
    batched_by_length,
    for_each,
    read_samples,
    split_batches,
    unpadded,
    with_small_first_batch,
)
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import Batch, empty_model
from rotation_merge.run.generated_samples import writes_text
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Runner
from rotation_merge.run.sample_kinds import SELF, SYNTHETIC
from rotation_merge.run.store import StateStore, StoredValue
from rotation_merge.workers import Progress, listener

STARTS = {"average": "average", "anchor": "anchor", "task_arithmetic": "sum of the task vectors"}
"""Starts in words; those that are not here are merges by a method of that name."""

Chosen = Callable[[str], bool]
"""Says of a tensor, by its name, whether it is chosen."""

TOKENS = 2048
"""In a batch of several texts, at most."""

HELD_OUT = 8
"""Of samples with labels a quarter judges the refit, and at least so many."""

JUDGED = ("next token", "masked token", "class", "labels", "regression")
"""Tasks of samples whose labels can judge a merge."""


@dataclass(frozen=True)
class Teacher:
    """A model that answers.

    Attributes:
        view: the model in the base's coordinates; of the base itself the base's view.
        original: the model as it is, which has its config and writes its own samples.
        share: its part in the average and among the answers; shares sum to one.
        source: where its samples come from: `self`, `synthetic`, a file.
        samples: number of samples.
        batches: the samples; None: not read yet, or written by the model itself in the refit.
        held_out: samples with labels that nothing is solved on; None: there are none.
    """

    view: View
    original: View
    share: float
    source: str
    samples: int
    batches: list[Batch] | None = field(default=None, repr=False)
    held_out: Data | None = field(default=None, repr=False)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights of models as shares that sum to one.

    Raises:
        RecipeError: one is negative or no number, or none is above 0.
    """
    total = sum(weights)
    if not (min(weights) >= 0 and 0 < total < float("inf")):
        remedy = "none may be negative, and one must be above 0"
        raise RecipeError("weights are shares of the models among the answers", where="models", remedy=remedy)
    return [weight / total for weight in weights]


def usual_source(model: View) -> str:
    """The source of a model's samples that needs no data.

    Raises:
        RecipeError: there is none.
    """
    kind = empty_model(model.transformers_config)
    if writes_text(kind):
        return SELF
    if kind.main_input_name == "pixel_values" and not hasattr(kind.config, "text_config"):
        return SYNTHETIC
    problem = f"delegate refit needs samples, {type(kind).__name__} cannot make its own"
    raise RecipeError(problem, where=model.name, remedy="add 'data: FILE' under its parameters")


def _with_samples(base: View, teachers: Sequence[Teacher], config: RefitConfig) -> tuple[list[Teacher], bool]:
    """The teachers with the samples of all but those that write their own, and whether these are one pool."""
    if config.start not in ("average", "anchor") and all(teacher.view is base for teacher in teachers):
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(f"'start: {config.start}' merges task vectors, but there are none", remedy=remedy)
    sources = [teacher.source for teacher in teachers]
    same = len(sources) > 1 and set(sources) == {sources[0]} != {SELF}
    if same and config.targets == "own":
        problem = f"'targets: own' needs different samples for each model, all have '{sources[0]}'"
        raise RecipeError(problem, remedy="write 'data' under each model, or 'targets: mean'")
    pooled = same if config.targets is None else config.targets == "mean"
    read = []
    for number, teacher in enumerate(teachers):
        known = pooled and teacher.source != SELF and teacher.source in sources[:number]
        read.append(replace(teacher, batches=[]) if known else _read(teacher, config.seed + number))
    return read, pooled


def _read(teacher: Teacher, seed: int) -> Teacher:
    """A teacher with its samples from a file, some of those with labels held out."""
    if teacher.batches is not None or teacher.source == SELF:
        return teacher
    beyond = 0 if teacher.source == SYNTHETIC else max(HELD_OUT, teacher.samples // 3)
    kind = empty_model(teacher.original.transformers_config)
    samples = read_samples(teacher.original, teacher.source, teacher.samples + beyond, seed=seed, module=kind)
    held_out = None
    if beyond and samples.examples >= 2 * HELD_OUT:
        count = min(teacher.samples, samples.examples - max(HELD_OUT, samples.examples // 4))
        samples, remaining = split_batches(samples, count)
        held_out = remaining if remaining.task in JUDGED else None
    batches = _in_batches(samples, teacher.source)
    return replace(teacher, batches=batches, samples=samples.examples, held_out=held_out)


def _in_batches(samples: Data, source: str) -> list[Batch]:
    return batched_by_length(unpadded(samples.batches, source), TOKENS)


def teachers_in_memory(
    views: Sequence[View], samples: Samples, config: RefitConfig, weights: Sequence[float] | None
) -> list[Teacher]:
    """Views in shared coordinates as teachers, without those of no weight, and with their samples.

    Args:
        samples: for all, or a list with those of each (`run.data.for_each`); None: each writes its own.
        weights: of the views; None: all equal.

    Raises:
        RotationMergeError: weights or samples are of no use.
    """
    sources = for_each(SELF if samples is None else samples, len(views))
    shared = samples is not None and all(source is sources[0] for source in sources)
    teachers: list[Teacher] = []
    for number, share in enumerate(shares_of([1.0] * len(views) if weights is None else weights)):
        view, name, batches = views[number], "samples" if shared else f"samples of model {number + 1}", list[Batch]()
        if share and not (shared and teachers):
            read = read_samples(view, sources[number], config.samples, seed=config.seed + number)
            batches = _in_batches(read, name)
        teachers += [Teacher(view, view, share, name, config.samples, batches)] if share else []
    return teachers


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
    base, refit = views[0], ModelRefit(views[0], teachers_in_memory(views, samples, config, weights), config, exclude)
    solved = cache(lambda: refit.run(listener()))
    return _with_tensors(base, lambda name: solved()[name], base.dtype)


def _with_tensors(base: View, read: Callable[[str], Tensor], dtype: torch.dtype | None) -> View:
    """A model with other tensors of the same names; `dtype` of floating ones, None: as they are read."""
    filled = replace(base, tensors=Tensors(base.shapes, base.dtypes, by_name(read)), at=None)
    return filled.blockwise(lambda *_: None, dtype)


@dataclass
class ModelRefit:
    """Averages models and solves the average's linear maps, layer by layer (`averaging.refit`).

    Samples of all teachers but those that write their own are read when it is made, before any weight is.

    Attributes:
        base: in the coordinates of the merge, folded where the teachers' views are.
        pooled: whether all teachers answer to all samples: by the config, or because all have the same source, which is
            read once then.
        exclude: tensors, by the base's names, that stay the base's.
        own_heads: every teacher answers under its own head, and without a pool each head is solved, too.
        dtype: of the result; None: each tensor has that of the base's files.
        notes: lines for a report.
        heads: solved tensors of every teacher's own head, by the teacher's name.

    Raises:
        RotationMergeError: samples are of no use, or the config asks for what these models cannot give.
    """

    base: View
    teachers: Sequence[Teacher]
    config: RefitConfig
    exclude: Chosen = lambda _: False
    own_heads: bool = False
    dtype: torch.dtype | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list, init=False)
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)
    pooled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.teachers, self.pooled = _with_samples(self.base, self.teachers, self.config)

    def run(self, progress: Progress = lambda *_: None) -> View:
        """The refitted merge, with the base's names; its tensors are read from where the refit leaves them.

        Raises:
            RotationMergeError: models or samples are of no use.
        """
        self.store = StateStore(None if self.base.files is None else gettempdir())
        self.states = StateStore()
        try:
            self._begin()
            result = self.solve(progress)
            if self.own_heads and not self.pooled:
                self.solve_heads()
        except BaseException:
            self.store.close()
            raise
        finally:
            self.states.close()
        self.notes += self.words(result)
        del self.merge, self.runners  # the view outlives them
        return _with_tensors(self.base, lambda name: self._rounded(name, self._present(name)), self.dtype)

    def _begin(self) -> None:
        """Settle the weights before solving; the merge runs as it is written."""
        self.architecture = self.base.architecture
        self.tied_head = None if self.base.untie else self.base.tied_head
        self.head_names = head_names(self.architecture)
        self.large = {i.name for i in self.architecture.tensors() if len(i.axes) > 1 and not i.stacked}
        infos = [(block, info) for block in self.architecture.blocks for info in block.tensors]
        self.map_names = {name for block, info in infos if linear_map(block, info) for name in info.names}
        anchor, *self.sources = (
            named_as(self.architecture, view.tensors, view.architecture)
            for view in (self.base, *(teacher.view for teacher in self.teachers))
        )
        self.start = anchor
        if self.config.start != "anchor":
            self.start = selected(anchor, self._merged(), lambda name: not self.excluded(name))
        self.written = dict[str, StoredValue]()
        self.exact = torch.promote_types(self._dtype_of(next(iter(self.base))), torch.float32)

    def _dtype_of(self, name: str) -> torch.dtype:
        stored = self.base.stored_dtypes
        return self.dtype or stored.get(name) or next(iter(stored.values()))

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it is stored."""
        return tensor.to("cpu", self._dtype_of(name)) if tensor.is_floating_point() else tensor

    def _write(self, name: str, tensor: Tensor) -> Tensor:
        """Write a tensor; returns it rounded, in the dtype and on the device that it had."""
        stored = self._rounded(name, tensor)
        self.written[name] = self.store.put(check_merged(stored, name))
        return stored.to(tensor)

    def _present(self, name: str) -> Tensor:
        """A tensor of the merge: as it was written, or that of its start."""
        tensor: Tensor = self.written[name].get() if name in self.written else self.start[name]
        return tensor

    def excluded(self, name: str) -> bool:
        """Whether a tensor of the merge stays the base's."""
        return self.exclude(name) or (self.own_heads and name in self.head_names)

    def _merged(self) -> Tensors:
        """The models' average, or a merge of the task vectors, by a merge method."""
        name = self.config.start
        tuned = [teacher for teacher in self.teachers if teacher.view is not self.base]
        total = 1.0 if name == "average" else sum(teacher.share for teacher in tuned) / len(tuned)
        weights, scale = [teacher.share / total for teacher in tuned], {"lambda": self.config.lambda_}
        views = [self.base, *(teacher.view for teacher in tuned)]
        for method in TASK_VECTORS:
            if method.spec.name == name:
                models = MergedModels.of(views, tied_head=self.tied_head)
                return averaged(views, method.on(models), {**scale, "weight": [1.0, *weights]})
        summed = {**scale, "weight": weights, "normalize": False}
        return averaged(views, merge_methods.get("task_arithmetic"), summed)

    def solve(self, progress: Progress) -> RefitResult:
        """Solve the merge's maps; where held-out samples say that this is worse, the start will be written."""
        parts = [with_small_first_batch(self._batches(number)) for number in range(len(self.teachers))]
        batches = [batch for part in parts for batch in part]
        self.runners = [
            self._runner(teacher.original, source, batches if self.pooled else part)
            for teacher, source, part in zip(self.teachers, self.sources, parts, strict=True)
        ]
        shares = [teacher.share for teacher in self.teachers]
        answering = [[(k, i, 1.0)] for k, part in enumerate(parts) for i in range(len(part))]
        if self.pooled:
            answering = [[(k, i, share) for k, share in enumerate(shares)] for i in range(len(batches))]
        weights = [1.0 if self.pooled else shares[each[0][0]] * len(shares) for each in answering]
        held_out = [(teacher.share, teacher.held_out) for teacher in self.teachers if teacher.held_out is not None]
        judged = [] if self.own_heads else held_out  # whose heads are not the merge's
        beside = [batch for _, data in judged for batch in data.batches]
        self.merge = self._runner(self.base, self.start.map(self._filled), [*batches, *beside])
        answers = Teachers(self.runners, [*answering, *([] for _ in beside)], self.states)
        solving = self.architecture, answers, [*weights, *(0.0 for _ in beside)], self.config.ridge
        result = Refit(self.merge, *solving, self._write, self.excluded, progress).run()
        if judged:
            result.losses = self._losses(judged, len(batches))
            if result.losses is not None and result.losses[1] > result.losses[0]:
                self.written.clear()
        return result

    def _batches(self, number: int) -> list[Batch]:
        """The samples that a teacher brings; those of its own are written now."""
        teacher = self.teachers[number]
        if teacher.batches is not None:
            return teacher.batches
        model, seed = teacher.original, self.config.seed + number
        writer = Runner(replace(model, untie=False), [], dtype=self.exact, device=self.device).fill_all()
        return read_samples(model, teacher.source, teacher.samples, seed=seed, module=writer).batches

    def _runner(self, model: View, source: Tensors, batches: list[Batch]) -> Runner:
        """Runs tensors by the base's names as a model of another's config."""
        view = replace(model, tensors=source, architecture=self.architecture, untie=self.base.untie)
        return Runner(view, batches, self.states, self.exact, self.device)

    def _filled(self, name: str, tensor: Tensor) -> Tensor:
        """Tensors other than linear maps run as they will be stored; solved maps are rounded afterwards.

        Embeddings are large and are written at once.
        """
        if not tensor.is_floating_point() or name in self.map_names:
            return tensor
        return (
            self._write(name, tensor) if name in self.large and not self.excluded(name) else self._rounded(name, tensor)
        )

    def _losses(self, judged: Sequence[tuple[float, Data]], first: int) -> tuple[float, float] | None:
        """Losses of the start and the refitted merge on held-out samples, weighted by the models' shares.

        None if the merge's head has no such labels.

        Args:
            first: number of the first of their batches among the merge's.
        """
        batches = [batch for _, data in judged for batch in data.batches]
        start = self._runner(self.base, self.start.map(self._rounded), batches)
        start.run_through()
        total, losses = sum(share for share, _ in judged), []
        for answers in (LayerwiseAnswers(start, 0), LayerwiseAnswers(self.merge, first)):
            try:
                losses.append(sum(share * score(answers, data).loss for share, data in judged) / total)
            except DataError as error:
                self.notes.append(f"The refit was not judged on held-out samples: {error}.")
                return None
        return losses[0], losses[1]

    def solve_heads(self) -> None:
        """Solve every teacher's own head, on its own samples under the merged body: the last maps of its refit.

        All layers have been run on these samples, by the merge and by the teachers.
        """
        body, first = Tensors(self.start.shapes, self.start.dtypes, by_name(self._present)), 0
        for teacher, source, runner in zip(self.teachers, self.sources, self.runners, strict=True):
            solved = self.heads.setdefault(teacher.original.name, {})
            if teacher.view is not self.base and not all(map(self.exclude, self.head_names)):
                merge, again = (
                    self._runner(teacher.original, tensors, runner.batches)
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
            solved[name] = self._rounded(name, tensor).contiguous()
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
        return notes


class LayerwiseAnswers:
    """A model that has been run block by block, asked for its answers to its batches, from a number on."""

    def __init__(self, runner: Runner, first: int) -> None:
        self.runner, self.config, self._numbers = runner, runner.model.config, count(first)

    def __call__(self, **_: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.runner.answer(next(self._numbers)).logits.cpu())
