"""Refit of whole models: a start, and its maps solved layer by layer.

One pass over all models: each solved tensor is left in a store, so that no model is held as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean
from tempfile import gettempdir
from types import SimpleNamespace

import torch
from mergekit import merge_methods
from torch import Tensor

from rotation_merge.averaging.average import averaged, check_merged
from rotation_merge.averaging.config import AUTO, RIDGE, RefitConfig
from rotation_merge.averaging.methods import MergedModels
from rotation_merge.averaging.refit import Refit, teacher_answers
from rotation_merge.averaging.registry import STARTS
from rotation_merge.errors import DataError, RecipeError
from rotation_merge.model.heads import head_names, is_head, under_head
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.record import with_margin
from rotation_merge.run.batches import Batch, batched_by_length, unpadded, with_small_first_batch
from rotation_merge.run.data import UNLABELLED, Data, Samples, read_samples, split_batches
from rotation_merge.run.evaluate import margin, score
from rotation_merge.run.functions import empty_model, in_memory
from rotation_merge.run.maps import linear_maps
from rotation_merge.run.runner import Runner, StateStore
from rotation_merge.run.sample_kinds import SELF, SYNTHETIC
from rotation_merge.run.sources import writes_text
from rotation_merge.workers import Progress

TOKENS = 2048
"""In a batch of several texts, at most."""

HELD_OUT = 8
"""Of samples with labels a quarter judges the refit, and at least so many."""

Sides = tuple[list[Batch], list[Batch]]
"""A teacher's samples that maps are solved on, and those that their ridges are chosen on."""


@dataclass(frozen=True)
class Teacher:
    """A model that answers.

    Attributes:
        view: the model in the base's coordinates; of the base itself the base's view.
        original: the model as it is, which has its config and writes its own samples.
        share: its part in the average and among the answers, beside those of the others.
        source: where its samples come from: `self`, `synthetic`, a file; or batches.
        samples: number of samples.
    """

    view: View
    original: View
    share: float
    source: Samples
    samples: int

    @property
    def key(self) -> str | int:
        """The name of its source, or what tells batches in memory from others."""
        return os.fspath(self.source) if isinstance(self.source, str | os.PathLike) else id(self.source)

    @property
    def words(self) -> str:
        """Its source in words."""
        return self.key if isinstance(self.key, str) else "samples in memory"


def usual_source(model: View) -> str:
    """The source of a model's samples that needs no data.

    Raises:
        RecipeError: there is none.
    """
    kind = empty_model(model)
    if writes_text(kind):
        return SELF
    if kind.main_input_name == "pixel_values" and not hasattr(kind.config, "text_config"):
        return SYNTHETIC
    problem = f"delegate refit needs samples, {type(kind).__name__} cannot make its own"
    raise RecipeError(problem, where=model.name, remedy="add 'data: FILE' under its parameters")


def _is_pool(base: View, teachers: Sequence[Teacher], config: RefitConfig) -> bool:
    """Whether the samples of all teachers are one pool; refuses a config that does not fit the teachers."""
    if config.start not in ("average", "anchor") and all(teacher.view is base for teacher in teachers):
        remedy = "name the fine-tunes under 'models', and their base as 'base_model'"
        raise RecipeError(f"'start: {config.start}' merges task vectors, but there are none", remedy=remedy)
    sources = {teacher.key for teacher in teachers}
    same = len(teachers) > 1 and len(sources) == 1 and sources != {SELF}
    if same and config.targets == "own":
        problem = f"'targets: own' needs different samples for each model, all have '{teachers[0].words}'"
        raise RecipeError(problem, remedy="write 'data' under each model, or 'targets: mean'")
    return same if config.targets is None else config.targets == "mean"


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
        held_out: samples with labels that nothing is solved on, with their teachers.
        notes: lines for a report.
        heads: solved tensors of every teacher's own head, by the teacher's name.

    Raises:
        RotationMergeError: samples are of no use, or the config asks for what these models cannot give.
    """

    base: View
    teachers: Sequence[Teacher]
    config: RefitConfig
    exclude: Callable[[str], bool] = lambda _: False
    own_heads: bool = False
    dtype: torch.dtype | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list, init=False)
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)
    held_out: list[tuple[Teacher, Data]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        total = sum(teacher.share for teacher in self.teachers)
        if not (all(teacher.share >= 0 for teacher in self.teachers) and 0 < total < float("inf")):
            remedy = "none may be negative, and one must be above 0"
            raise RecipeError("weights are shares of the models among the answers", where="models", remedy=remedy)
        self.teachers = [replace(teacher, share=teacher.share / total) for teacher in self.teachers]
        self.pooled = _is_pool(self.base, self.teachers, self.config)
        self._samples = dict[int, Sides]()
        self.head_names, dtypes = head_names(self.base.architecture), list(self.base.stored_dtypes.values())
        self.exact = torch.promote_types(self.dtype or dtypes[0], torch.float32)
        for number, teacher in enumerate(self.teachers):
            known = self.pooled and teacher.key in [earlier.key for earlier in self.teachers[:number]]
            if teacher.key != SELF:
                self._samples[number] = ([], []) if known else self._read_samples(number)

    def run(self, progress: Progress = lambda *_: None) -> Tensors:
        """The refitted merge, with the base's names; its tensors are read from where the refit leaves them.

        Raises:
            RotationMergeError: models or samples are of no use.
        """
        self.store = StateStore(None if self.base.files is None else gettempdir())
        try:
            written = self._solved(progress)
        except BaseException:
            self.store.close()
            raise
        return written.map(self._rounded)

    def excluded(self, name: str) -> bool:
        """Whether a tensor of the merge stays the base's."""
        return self.exclude(name) or (self.own_heads and name in self.head_names)

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it is stored."""
        stored = self.base.stored_dtypes
        dtype = self.dtype or stored.get(name) or next(iter(stored.values()))
        return tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor

    def _start(self) -> Tensors:
        """The weights before solving: the models' average, or a merge of the task vectors, by a merge method."""
        name, base = self.config.start, self.base
        if name == "anchor":
            return base.tensors
        tuned = [teacher for teacher in self.teachers if teacher.view is not base]
        total = 1.0 if name == "average" else sum(teacher.share for teacher in tuned) / len(tuned)
        weights, scale = [teacher.share / total for teacher in tuned], {"lambda": self.config.lambda_}
        views = [base, *(teacher.view for teacher in tuned)]
        if (method := STARTS.get(name)) is None:
            values = {**scale, "weight": weights, "normalize": False}
            merged = averaged(views, merge_methods.get("task_arithmetic"), values)
        else:
            models = MergedModels.of(views, tied_head=None if base.untie else base.tied_head)
            merged = averaged(views, method.on(models), {**scale, "weight": [1.0, *weights]})
        return base.tensors.replaced(merged.only(name for name in merged if not self.excluded(name)))

    def _solved(self, progress: Progress) -> Tensors:
        """The start with the solved tensors, or without where held-out samples say that they are worse."""
        start, maps = self._start(), {n for m in linear_maps(self.base.architecture).values() for n in m.info.names}
        numbers, known = range(len(self.teachers)), self._samples
        sides = [known[n] if n in known else self._read_samples(n) for n in numbers]
        parts = [[*solved_on, *chosen_on] for solved_on, chosen_on in sides]
        batches = [batch for part in parts for batch in part]
        chosen_on = [number for side in sides for number, part in enumerate(side) for _ in part]
        views = [teacher.view for teacher in self.teachers]
        donors = [self._runner(v, batches if self.pooled else part) for v, part in zip(views, parts, strict=True)]
        shares = [teacher.share * len(parts) for teacher, part in zip(self.teachers, parts, strict=True) for _ in part]
        # all but linear maps run as they are stored; solved maps are rounded afterwards
        running = start.map(lambda name, tensor: tensor if name in maps else self._rounded(name, tensor))
        merge = self._runner(replace(self.base, tensors=running), batches)
        refit = self._refit(merge, donors, chosen_on, None if self.pooled else shares)
        refit.skip, refit.watch = self.excluded, progress
        solved = refit.run().solved()
        written = start.replaced(solved)
        if self.own_heads and not self.pooled:
            self._solve_heads(written, merge, donors, chosen_on)
        losses = list[list[list[float]]]()
        try:
            losses += [self._losses(*of) for of in ((start, {}), (written, self.heads)) if self.held_out]
        except DataError as error:
            self.notes.append(f"The refit was not judged on held-out samples: {error}.")
        worse = bool(losses) and _mean(losses[1]) > _mean(losses[0])
        self._note(refit, losses, worse)
        if worse:
            written, self.heads = start, {}
        if any(self.heads.values()):
            self.notes.append(
                "Refit also solved each donor's head, on its samples under the merged body ('exclude: NAME' "
                "leaves out tensors with NAME in their names)."
            )
        return written

    def _read_samples(self, number: int) -> Sides:
        """The samples that a teacher brings, or writes; some with labels, or of those that it writes, are held out."""
        teacher, seed, beyond = self.teachers[number], self.config.seed + number, 0
        few = teacher.key == SELF and teacher.samples < HELD_OUT
        labelled = isinstance(teacher.key, str) and teacher.key != SYNTHETIC  # or may be
        if labelled and not few and not (self.own_heads and self.pooled):  # labels of which of the heads?
            beyond = max(HELD_OUT, teacher.samples // 3)
        if teacher.key == SELF:
            module = in_memory(replace(teacher.original, untie=False), self.exact).to(self.device)
        else:
            module = empty_model(teacher.original)
        samples = read_samples(teacher.original, teacher.source, teacher.samples + beyond, seed=seed, module=module)
        if beyond:  # all batches in memory count
            judges = samples.task not in (*UNLABELLED, "similarity") and samples.examples >= 2 * HELD_OUT
            most = samples.examples - (max(HELD_OUT, samples.examples // 4) if judges else 0)
            samples, remaining = split_batches(samples, min(teacher.samples, most))
            self.held_out += [(teacher, remaining)] if judges else []
        quarter = samples.examples // 4 if self.config.ridge == AUTO else 0
        sides = (unpadded(x.batches, x.source) for x in split_batches(samples, samples.examples - quarter))
        solved_on, chosen_on = (batched_by_length(batches, TOKENS) for batches in sides)
        return with_small_first_batch(solved_on), chosen_on

    def _runner(self, view: View, batches: list[Batch]) -> Runner:
        """Runs a model in the coordinates of the merge."""
        return Runner(replace(view, untie=self.base.untie), batches, dtype=self.exact, device=self.device)

    def _refit(
        self,
        merge: Runner,
        donors: Sequence[Runner],
        chosen_on: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> Refit:
        """A refit towards donors.

        Args:
            chosen_on: by batch, 1 where ridges are chosen on it, else 0.
            weights: of each batch, which one donor answers; None: all answer to all batches.
        """
        answers = teacher_answers([teacher.share for teacher in self.teachers] if weights is None else None)
        of_batch, targets = weights or [1.0] * len(merge.batches), (donors, answers)
        ridge = RIDGE if self.config.ridge == AUTO else self.config.ridge
        refit = Refit(merge, self.base.architecture, *targets, of_batch, ridge, self.store, held_out=chosen_on)
        refit.rounded = lambda name, tensor: check_merged(self._rounded(name, tensor), name)
        return refit

    def _losses(self, merge: Tensors, heads: Mapping[str, Mapping[str, Tensor]]) -> list[list[float]]:
        """The losses of a merge on held-out examples, set by set, times the share of the set's teacher in the mean.

        Where heads stay apart, each set is answered under its teacher's.

        Args:
            heads: solved tensors of them, as of `self.heads`.

        Raises:
            DataError: a head has no such labels.
        """
        batches, body = [batch for _, data in self.held_out for batch in data.batches], merge.map(self._rounded)
        runner, first = self._runner(replace(self.base, tensors=body), batches), 0
        runner.run_through()
        mean_share, losses = fmean(teacher.share for teacher, _ in self.held_out), list[list[float]]()
        for teacher, data in self.held_out:
            answering, numbers = runner, count(first)
            if self.own_heads:
                solved = heads.get(teacher.view.name, {})
                answering, numbers = self._runner(self._headed(body, teacher.view, solved), data.batches), count()
                answering.follow(runner, first, is_head)
                answering.run_through()
            answer = partial(_logits, answering, numbers)
            losses.append([teacher.share / mean_share * loss for loss in score(answer, data).losses])
            first += len(data.batches)
        return losses

    def _headed(self, body: Tensors, view: View, solved: Mapping[str, Tensor]) -> View:
        """A merged body under a model's own head, of which some tensors are solved."""
        return under_head(replace(self.base, tensors=body), replace(view, tensors=view.tensors.replaced(solved)))

    def _solve_heads(self, body: Tensors, merge: Runner, donors: Sequence[Runner], chosen_on: Sequence[int]) -> None:
        """Solve every teacher's own head, on its own samples under the merged body: the last maps of its refit.

        All layers have been run on these samples, by the merge and by the teachers.
        """
        first = 0
        for teacher, donor in zip(self.teachers, donors, strict=True):
            view, count = teacher.view, len(donor.batches)
            if view is not self.base and not all(map(self.exclude, self.head_names)):
                headed, alone = (self._runner(each, donor.batches) for each in (self._headed(body, view, {}), view))
                headed.follow(merge, first, is_head)
                alone.follow(donor, 0, is_head)
                refit = self._refit(headed, [alone], chosen_on[first : first + count], [1.0] * count)
                refit.skip = lambda name: name not in self.head_names or self.exclude(name)
                self.heads[view.name] = {name: x.contiguous() for name, x in refit.run().solved().items()}
            first += count

    def _note(self, refit: Refit, losses: Sequence[list[list[float]]], worse: bool) -> None:
        """Put the refit in words into the notes.

        Args:
            losses: of the start and of the refit on held-out samples, as `_losses` gives them; may be empty.
            worse: whether the refit's are higher.
        """
        before, after = map(fmean, zip(*(refit.errors.values() or [(0.0, 0.0)]), strict=True))
        of_maps = refit.ridges.values() or [refit.ridge]
        ridges = " to ".join(dict.fromkeys(f"{ridge:g}" for ridge in (min(of_maps), max(of_maps))))
        target = "the mean of all models' answers" if self.pooled else "each sample's own model"
        sources = ", ".join(f"`{teacher.original.name}` {teacher.words}" for teacher in self.teachers)
        start = {"average": "average", "anchor": "anchor"}.get(self.config.start, f"merge by {self.config.start}")
        self.notes.append(
            f"Refit solved {len(refit.errors)} linear maps, layer by layer, towards {target} (ridge "
            f"{ridges}, from the {start}; samples: {sources}). The error of their outputs fell "
            f"from {before:.3f} to {after:.3f} of the target, on average over these samples."
        )
        if losses:
            examples = sum(data.examples for _, data in self.held_out)
            (first, second), error = map(_mean, losses), margin(*losses)
            clear = error is not None and first - second > error
            outcome = f"; that is worse, so the {start} was written" if worse else "" if clear else "; no clear gain"
            change = f"{first:.4f} before the refit and {second:.4f} after it"
            change += f" (a difference of {with_margin(f'{second - first:.4f}', error)})"
            self.notes.append(f"On {examples} held-out samples the loss was {change}{outcome}.")
        unsolved = {**refit.unsolved}
        if self.base.tied_head is not None and not self.base.untie:
            unsolved["tied to the embedding, 'untie: true' gives it its own tensor"] = [self.base.tied_head]
        for reason, names in unsolved.items():
            self.notes.append(f"Refit kept the {start} ({reason}): {', '.join(f'`{name}`' for name in names)}.")


def _logits(runner: Runner, numbers: Iterator[int], **_: Tensor) -> SimpleNamespace:
    """A runner's logits for its next batch."""
    return SimpleNamespace(logits=runner.answer(next(numbers)).logits.cpu())


def _mean(sets: Sequence[Sequence[float]]) -> float:
    """The mean over sets of their means."""
    return fmean(map(fmean, sets))
