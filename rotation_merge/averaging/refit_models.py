"""Refit of whole models: which model answers to which samples, the start, and the solved merge as a View.

One pass over all models: each tensor of the result is left in a store, so that no model is held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.refit import Refit, RefitResult, Teachers
from rotation_merge.averaging.task_vectors import TASK_VECTORS
from rotation_merge.errors import DataError, RecipeError, RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.blocks import read_tensor, unstack, with_tied
from rotation_merge.model.forms import translated
from rotation_merge.model.heads import head_names, is_head
from rotation_merge.model.tensors import Tensors, by_name, extrapolated, selected, weighted_mean
from rotation_merge.model.view import View
from rotation_merge.run.data import (
    Data,
    Samples,
    batched_by_length,
    for_each,
    read_batches,
    read_samples,
    split_batches,
    unpadded,
    with_small_first_batch,
)
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import Batch, local_path
from rotation_merge.run.generated_samples import SELF, SYNTHETIC, writes_text
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Fill, Runner, filled_model
from rotation_merge.run.store import StateStore
from rotation_merge.workers import Progress, listener

AT_ONCE = 16
"""Examples in a batch."""

LENGTH = 128
"""Tokens of a text."""

HELD_OUT = 8
"""Of samples with labels a quarter judges the refit, and at least so many."""

JUDGED = ("next token", "masked token", "class", "labels", "regression")
"""Tasks of samples whose labels can judge a merge."""

STARTS = {"average": "average", "anchor": "anchor", "task_arithmetic": "sum of the task vectors"}
"""Starts in words; those that are not here are merges by a method of that name."""

# --- teachers and their samples --------------------------------------------------------------------------------------


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
    raise RecipeError(
        f"delegate refit needs samples, {type(kind).__name__} cannot make its own",
        where=model.name,
        remedy="add 'data: FILE' under its parameters",
    )


def read_teachers(base: View, teachers: Sequence[Teacher], config: RefitConfig) -> tuple[list[Teacher], bool]:
    """Read the samples of all teachers but those that write their own, before any weight is read.

    Args:
        teachers: those whose batches are known keep them.

    Returns:
        The teachers with their samples, and whether these are one pool that all teachers answer to; a source that
        several teachers of a pool name is read once.

    Raises:
        RotationMergeError: samples are of no use, or the config asks for what these models cannot give.
    """
    if config.start not in ("average", "anchor") and all(teacher.view is base for teacher in teachers):
        problem = f"'start: {config.start}' merges task vectors, but there are none"
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(problem, remedy=remedy)
    pooled = _pooled(teachers, config.targets)
    read: list[Teacher] = []
    for number, teacher in enumerate(teachers):
        known = pooled and teacher.source != SELF and any(earlier.source == teacher.source for earlier in read)
        read.append(replace(teacher, batches=[]) if known else _read(teacher, config.seed + number))
    return read, pooled


def _pooled(teachers: Sequence[Teacher], targets: str | None) -> bool:
    """Whether all models share one pool of samples, by the config or because all have the same ones."""
    source = teachers[0].source
    same = len(teachers) > 1 and source != SELF and all(teacher.source == source for teacher in teachers)
    if same and targets == "own":
        problem = f"'targets: own' needs different samples for each model, all have '{source}'"
        remedy = "write 'data' under each model, or 'targets: mean'"
        raise RecipeError(problem, remedy=remedy)
    return same if targets is None else targets == "mean"


def _read(teacher: Teacher, seed: int) -> Teacher:
    """A teacher with its samples from a file, a quarter of those with labels held out."""
    if teacher.batches is not None or teacher.source == SELF:
        return teacher
    beyond = 0 if teacher.source == SYNTHETIC else max(HELD_OUT, teacher.samples // 3)
    kind = empty_model(teacher.original.transformers_config)
    samples = _samples(teacher, kind, teacher.samples + beyond, seed)
    held_out = None
    if beyond and samples.examples >= 2 * HELD_OUT:
        count = min(teacher.samples, samples.examples - max(HELD_OUT, samples.examples // 4))
        samples, remaining = split_batches(samples, count)
        held_out = remaining if remaining.task in JUDGED else None
    batches = in_batches(samples.batches, teacher.source)
    return replace(teacher, batches=batches, samples=samples.examples, held_out=held_out)


def _samples(teacher: Teacher, model: Any, count: int, seed: int) -> Data:
    path = local_path(teacher.original.reference.model.path)
    return read_batches(teacher.source, path, model, count, AT_ONCE, LENGTH, seed)


def in_batches(samples: Sequence[Batch], source: str) -> list[Batch]:
    """Samples without padding in few batches; see `run.data`."""
    return batched_by_length(unpadded(samples, source), AT_ONCE * LENGTH)


def teachers_in_memory(
    views: Sequence[View], samples: Samples, config: RefitConfig, weights: Sequence[float] | None = None
) -> list[Teacher]:
    """Teachers with samples from Python; models without weight are left out.

    Args:
        views: in shared coordinates.
        samples: for all models, or a list with those of each (`run.data.for_each`); None: each writes its own.
        weights: of the models; None: all equal.

    Raises:
        RotationMergeError: weights or samples are of no use.
    """
    shares = shares_of([1.0] * len(views) if weights is None else weights)
    sources = for_each(SELF if samples is None else samples, len(views))
    shared = samples is not None and all(source is sources[0] for source in sources)
    teachers: list[Teacher] = []
    for number, (view, share, source) in enumerate(zip(views, shares, sources, strict=True)):
        if share == 0:
            continue
        name, batches = "samples" if shared else f"samples of model {number + 1}", list[Batch]()
        if not shared or not teachers:
            read = read_samples(view, source, config.samples, seed=config.seed + number)
            batches = in_batches(read.batches, name)
        teachers.append(Teacher(view, view, share, name, config.samples, batches))
    return teachers


# --- the refit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RefittedModel:
    """A refitted merge.

    Attributes:
        view: with the base's names; its tensors are read from the store that the refit wrote them to.
        notes: lines for a report.
        heads: solved tensors of every teacher's own head, by the teacher's name.
        close: removes the tensors from their store.
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
    exclude: Callable[[str], bool] = lambda _: False,
    own_heads: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    results: StateStore | None = None,
    progress: Progress = lambda *_: None,
) -> RefittedModel:
    """Average models and solve the average's linear maps, layer by layer (`averaging.refit`).

    Args:
        base: in the coordinates of the merge, folded where the teachers' views are.
        teachers, pooled: as `read_teachers` gives them.
        exclude: says of a tensor, by the base's name, that it stays the base's.
        own_heads: every teacher answers under its own head, and without a pool each head is solved, too.
        dtype: of the result; None: each tensor has that of the base's files.
        results: where solved tensors are put; None: in memory, or in the config's folder.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    store = StateStore(config.spill) if results is None else results
    states = StateStore(config.spill)
    try:
        work = _Refit(base, teachers, config, pooled, exclude, own_heads, dtype, device, states, store)
        result = work.solve(progress)
        work.write_rest()
        if own_heads and not pooled and not result.alike:
            work.solve_heads()
    except BaseException:
        store.close()
        raise
    finally:
        states.close()
    return RefittedModel(work.view(), [*work.notes, *_notes(work, result)], work.heads, store.close)


def refitted_later(
    base: View, teachers: Sequence[Teacher], config: RefitConfig, *, exclude: Callable[[str], bool] = lambda _: False
) -> View:
    """A merge that is refitted in memory when its first tensor is asked for; arguments as of `refitted`.

    Args:
        teachers: with their samples, or with sources that `read_teachers` reads now.
    """
    answering, pooled = read_teachers(base, teachers, config)

    @cache
    def solved() -> View:
        return refitted(base, answering, config, pooled=pooled, exclude=exclude, progress=listener()).view

    tensors = Tensors(base.shapes, base.dtypes, by_name(lambda name: solved()[name]))
    return with_tensors(base, tensors, base.dtype)


def with_tensors(base: View, tensors: Tensors, dtype: torch.dtype | None) -> View:
    """A model with other tensors of the same names, as those of the base are stored.

    Args:
        dtype: of floating tensors; None: as they are.
    """
    filled = replace(base, tensors=tensors, at=None)
    return filled.blockwise(lambda *_: None, dtype, left_out=base.left_out, notes=base.notes)


def _notes(work: _Refit, result: RefitResult) -> list[str]:
    """A refit in words."""
    before, after = (fmean([getattr(m, name) for m in result.maps] or [0.0]) for name in ("before", "after"))
    target = "the mean of all models' answers" if work.pooled else "each sample's own model"
    sources = ", ".join(f"`{teacher.original.name}` {teacher.source}" for teacher in work.teachers)
    start = STARTS.get(work.config.start, f"merge by {work.config.start}")
    notes = [
        f"Refit solved {len(result.maps)} linear maps, layer by layer, towards {target} (ridge {work.config.ridge:g}, "
        f"from the {start}; samples: {sources}). The error of their outputs fell "
        f"from {before:.3f} to {after:.3f} of the target, on average over these samples."
    ]
    if result.losses is not None:
        before, after = result.losses
        count = sum(teacher.held_out.examples for teacher in work.teachers if teacher.held_out is not None)
        written = f"; that is worse, so the {start} was written" * (after > before)
        change = f"{before:.4f} before the refit and {after:.4f} after it"
        notes.append(f"On {count} held-out samples the loss was {change}{written}.")
    for why, names in result.kept.items():
        listed = ", ".join(f"`{name}`" for name in names)
        notes.append(f"Refit kept the {start} ({why}): {listed}.")
    if work.tied_head is not None:
        notes.append(
            f"Refit did not solve the head `{work.tied_head}`, which is tied to an embedding ('untie: true' gives it "
            "its own tensor)."
        )
    if result.whole:
        notes.append("Refit held each model whole in memory: transformers stores it in another form than the files.")
    return notes


class _Refit:
    """One refit in progress; arguments as of `refitted`.

    Attributes:
        sources: the teachers' tensors by the base's names.
        start: the weights before solving; the merge runs as it is written.
        written: names of the tensors in the store of results.
    """

    def __init__(
        self,
        base: View,
        teachers: Sequence[Teacher],
        config: RefitConfig,
        pooled: bool,
        exclude: Callable[[str], bool],
        own_heads: bool,
        dtype: torch.dtype | None,
        device: str,
        states: StateStore,
        results: StateStore,
    ) -> None:
        self.base, self.teachers, self.config, self.pooled = base, teachers, config, pooled
        self.exclude, self.own_heads, self.dtype, self.device = exclude, own_heads, dtype, device
        self.states, self.results = states, results
        self.architecture, self.tied_head = base.architecture, None if base.untie else base.tied_head
        self.head_names = head_names(self.architecture)
        self.exact = torch.promote_types(self.dtype_of(base.names[0]), torch.float32)
        self.anchor = self._source(base)
        self.sources = [self._source(teacher.view) for teacher in teachers]
        self.start = self._start()
        self.written: set[str] = set()
        self.large = {i.name for i in self.architecture.tensors() if len(i.axes) > 1 and not i.stacked}
        self.notes: list[str] = []
        self.heads: dict[str, dict[str, Tensor]] = {}

    def _source(self, view: View) -> Tensors:
        """A model's tensors by the base's names, a tied one under both of its names."""
        return with_tied(self.architecture, translated(view.tensors, view.architecture, self.architecture))

    def excluded(self, name: str) -> bool:
        """Whether a tensor of the merge stays the base's."""
        return self.exclude(name) or (self.own_heads and name in self.head_names)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of an output tensor."""
        stored = self.base.stored_dtypes
        return self.dtype or stored.get(name) or next(iter(stored.values()))

    # --- the start ---

    def _start(self) -> Tensors:
        if self.config.start == "anchor":
            return self.anchor
        merged = self._average() if self.config.start == "average" else self._merged()
        return selected(merged, self.anchor, self.excluded)

    def _average(self) -> Tensors:
        average = weighted_mean(self.sources, [teacher.share for teacher in self.teachers])
        scale = self.config.lambda_
        return average if scale == 1.0 else extrapolated(average, self.anchor, scale)

    def _merged(self) -> Tensors:
        """A merge of the task vectors."""
        pairs = zip(self.teachers, self.sources, strict=True)
        tuned = [(teacher.share, source) for teacher, source in pairs if teacher.view is not self.base]
        total = sum(share for share, _ in tuned)
        shares, sources = [share / total for share, _ in tuned], [source for _, source in tuned]
        if self.config.start == "task_arithmetic":
            mean = weighted_mean(sources, shares)
            return extrapolated(mean, self.anchor, self.config.lambda_ * len(tuned))
        weights = [1.0, *(share * len(tuned) for share in shares)]
        return self._by_task_vectors([self.anchor, *sources], weights)

    def _by_task_vectors(self, sources: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
        """Models merged by the method that the start names, the base first."""
        from rotation_merge.mergekit_plugin.planning.delegate import merged_tensors

        method = next(method for method in TASK_VECTORS if method.spec.name == self.config.start)
        named: Any = list(enumerate(sources))
        parameters = {"lambda": self.config.lambda_}
        return merged_tensors(method, self.architecture, named, weights, parameters, self.tied_head is not None)

    # --- solving ---

    def solve(self, progress: Progress) -> RefitResult:
        """Solve the merge's maps; where held-out samples say that this is worse, the start will be written."""
        parts = [with_small_first_batch(self._batches(number)) for number in range(len(self.teachers))]
        batches, shares = [batch for part in parts for batch in part], [teacher.share for teacher in self.teachers]
        if self.pooled:
            inputs = [batches for _ in parts]
            assignment = [[(k, i, share) for k, share in enumerate(shares)] for i in range(len(batches))]
            weights = [1.0] * len(batches)
        else:
            inputs = parts
            assignment = [[(k, i, 1.0)] for k, part in enumerate(parts) for i in range(len(part))]
            weights = [shares[k] * len(shares) for k, part in enumerate(parts) for _ in part]
        self.runners = [
            self._runner(str(number), teacher.original, source, model_batches)
            for number, (teacher, source, model_batches) in enumerate(
                zip(self.teachers, self.sources, inputs, strict=True)
            )
        ]
        held_out = [(teacher.share, teacher.held_out) for teacher in self.teachers if teacher.held_out is not None]
        judged = [] if self.own_heads else held_out  # whose heads are not the merge's
        beside = [batch for _, data in judged for batch in data.batches]
        self.merge = self._runner("merge", self.base, self.start, [*batches, *beside], self._rounded)
        answers = Teachers(self.runners, [*assignment, *([] for _ in beside)], self.states)
        weights += [0.0] * len(beside)
        solving = self.architecture, answers, weights, self.config.ridge, self._write
        result = Refit(self.merge, *solving, skip=self.excluded, watch=progress).run()
        if judged and not result.alike:
            result.losses = self._losses(judged, len(batches))
            if result.losses is not None and result.losses[1] > result.losses[0]:
                self.written.clear()
        return result

    def _batches(self, number: int) -> list[Batch]:
        """The samples that a teacher brings; those of its own are written now."""
        teacher = self.teachers[number]
        if teacher.batches is not None:
            return teacher.batches
        model = teacher.original
        config, device = model.transformers_config, self.device
        writer = filled_model(config, model.tensors, model.architecture, self.exact, device)
        return _samples(teacher, writer, teacher.samples, self.config.seed + number).batches

    def _runner(
        self, prefix: str, model: View, source: Tensors, batches: list[Batch], fill: Fill = lambda _, tensor: tensor
    ) -> Runner:
        """Runs tensors by the base's names as a model of another's config."""
        config, untie = model.transformers_config, self.base.untie
        stored, exact, device = self.architecture, self.exact, self.device
        return Runner(config, source, stored, batches, self.states, prefix, exact, device, fill, untie)

    def _losses(self, judged: Sequence[tuple[float, Data]], first: int) -> tuple[float, float] | None:
        """Losses of the start and the refitted merge on held-out samples, weighted by the models' shares.

        None if the merge's head has no such labels.

        Args:
            first: number of the first of their batches among the merge's.
        """
        batches = [batch for _, data in judged for batch in data.batches]
        start = self._runner("start", self.base, self.start, batches, lambda info, x: self._stored(info.name, x))
        start.run_through()
        losses = []
        for answers in (LayerwiseAnswers(start, 0), LayerwiseAnswers(self.merge, first)):
            try:
                losses.append(sum(share * score(answers, data).loss for share, data in judged))
            except DataError as error:
                self.notes.append(f"The refit was not judged on held-out samples: {error}.")
                return None
        total = sum(share for share, _ in judged)
        return losses[0] / total, losses[1] / total

    def solve_heads(self) -> None:
        """Solve every teacher's own head, on its own samples under the merged body: the last maps of its refit.

        All layers have been run on these samples, by the merge and by the teachers.
        """
        body, first = self._solved(), 0
        for teacher, source, runner in zip(self.teachers, self.sources, self.runners, strict=True):
            solved = self.heads.setdefault(teacher.original.name, {})
            if teacher.view is not self.base and not all(map(self.exclude, self.head_names)):
                self._solve_head(teacher, source, runner, body, first, solved)
            first += len(runner.batches)
        if any(self.heads.values()):
            self.notes.append(
                "Refit also solved each donor's head, on its samples under the merged body ('exclude: NAME' "
                "leaves out tensors with NAME in their names)."
            )

    def _solve_head(
        self, teacher: Teacher, source: Tensors, runner: Runner, body: Tensors, first: int, solved: dict[str, Tensor]
    ) -> None:
        """Solve one teacher's head.

        Args:
            runner: that has run the teacher.
            first: number of the first of its batches among the merge's.
            solved: takes the solved tensors.
        """

        def write(name: str, tensor: Tensor) -> Tensor:
            solved[name] = self._stored(name, tensor).contiguous()
            return solved[name].to(tensor)

        def skip(name: str) -> bool:
            return name not in self.head_names or self.exclude(name)

        merge = self._runner("", teacher.original, selected(body, source, self.head_names.__contains__), runner.batches)
        merge.follow(self.merge, first, is_head)
        again = self._runner("", teacher.original, source, runner.batches)
        again.follow(runner, 0, is_head)
        count = len(runner.batches)
        answers = Teachers([again], [[(0, i, 1.0)] for i in range(count)], self.states)
        Refit(merge, self.architecture, answers, [1.0] * count, self.config.ridge, write, skip).run()

    # --- results ---

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it is stored."""
        return tensor.to("cpu", self.dtype_of(name)) if tensor.is_floating_point() else tensor

    def _write(self, name: str, tensor: Tensor) -> Tensor:
        stored = self._stored(name, tensor)
        self.results.put(name, [stored])
        self.written.add(name)
        return stored.to(tensor)

    def _rounded(self, info: TensorInfo, tensor: Tensor) -> Tensor:
        """Tensors other than linear maps run as they will be stored; solved maps are rounded afterwards.

        The model may have more names than the checkpoint: tied tensors. Embeddings are large and are written at once.
        """
        blocks = (block for block in self.architecture.blocks if any(t.key == info.key for t in block.tensors))
        if not tensor.is_floating_point() or any(linear_map(block, info) is not None for block in blocks):
            return tensor
        if info.name in self.large and not self.excluded(info.name):
            return self._write(info.name, tensor)
        return tensor.to(self.dtype_of(info.name))

    def write_rest(self) -> None:
        """Write the start's tensors that were not solved."""
        for info in self.architecture.tensors():
            if all(name in self.written for name in info.names):
                continue
            tensor = read_tensor(info, self.start)
            for name, piece in {} if tensor is None else unstack(info, tensor).items():
                if name not in self.written and not self.excluded(name):
                    self._write(name, piece)

    def _solved(self) -> Tensors:
        """The tensors that were written, all others from the base."""

        def read(name: str) -> Tensor:
            return self.results.get(name)[0] if name in self.written else self.anchor[name]

        return Tensors(self.anchor.shapes, self.anchor.dtypes, by_name(read))

    def view(self) -> View:
        """The refitted merge; of a base that keeps tensors, these are rounded as the others are."""
        return with_tensors(self.base, self._solved().map(self._finite), self.dtype)

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        stored = self._stored(name, tensor)
        if not all_finite([stored]):
            problem = f"tensor '{name}' of the merged model would hold NaN or infinity"
            raise RotationMergeError(problem, remedy="look at the weights of the models and at the samples")
        return stored


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
