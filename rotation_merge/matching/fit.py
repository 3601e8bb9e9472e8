"""Learns alignments by gradient descent on the loss of models between the parents.

Generalized Linear Mode Connectivity for Transformers (Theus and others, 2025) learns permutations and a residual map in
this way; here every space of any supported architecture is learned, inside its group on one model whose
weights are mixed as they are used (`between.py`), and the output is an alignment that recipes apply.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture import Architecture
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.aligned_output import reported
from rotation_merge.matching.alignment import Alignment, Transforms
from rotation_merge.matching.between import LARGEST_KEPT, LearnedTransforms, Mixture, mixed_model, renamed
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.objective import choose, distillation, labels_loss, mix, taught_output
from rotation_merge.matching.options import AlignConfig, FitConfig
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.matching.stream import space_groups
from rotation_merge.matching.training import Training, kept_in, split_at_random
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.forms import restructured
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.tensors import Tensors, checksum
from rotation_merge.model.view import View
from rotation_merge.run.batches import Batch, device_of, unlabelled
from rotation_merge.run.data import Samples, data_in_memory, listed, read_samples
from rotation_merge.run.functions import architecture_of, in_memory
from rotation_merge.workers import Progress, listener

CONCENTRATION = 8.0
"""Of the Dirichlet distribution that coefficients of three or more models are drawn from."""

LEAST_GAIN = 1e-6
"""A held-out loss lower by less than this (nats) is no better."""

LARGEST_ANSWERS = 1 << 30
"""Bytes of the parents' outputs that are kept; others are computed again."""

LOOKS = 12
"""How often the held-out samples are looked at."""

PATIENCE = 5
"""Looks without a better state after which a fit stops."""

MIXING = 0.5
"""Share of distillation steps on mixtures of two samples, which helps with few samples; token ids are not mixed."""

WITHOUT_EFFECT = ("minutes", "state", "checkpointing")
"""Options that do not change where a fit goes."""

POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Points of the path from the anchor to the donors that a fit is judged at."""

WIDEST = AlignConfig(heads="permutation", residual="largest")
"""The largest groups a model admits."""


@dataclass
class FitReport:
    """The report on a fit.

    Attributes:
        start: where it began: matched or identity.
        objective: what was minimised.
        before, after: held-out loss (nats, mean over the inner points of the path) at the start and of what was kept.
        barrier_before, barrier_after: highest held-out loss above the straight line between the ends' losses.
        unaligned: held-out loss of the plain merge, for comparison.
        history: (step, seconds, held-out loss, barrier).
    """

    start: str
    objective: str
    before: float
    after: float
    barrier_before: float
    barrier_after: float
    unaligned: float
    best_step: int
    seconds: float
    history: list[tuple[int, float, float, float]] = field(default_factory=list)

    def verdict(self) -> str:
        """One sentence on whether the fit helped."""
        if self.after >= self.unaligned - 1e-3 * abs(self.unaligned) - 1e-4:
            return f"the fit gains nothing over the plain merge (held-out loss {self.unaligned:.4g})"
        return (
            f"held-out loss between the models: plain {self.unaligned:.4g}, at the start {self.before:.4g}, "
            f"learned {self.after:.4g} (barrier {self.barrier_after:.3g} nats)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict()}


@dataclass(frozen=True)
class FitResult:
    """The result of a fit: one alignment for each donor, and the report."""

    alignments: list[Alignment]
    report: FitReport


def fit(
    anchor: ModelLike,
    donors: ModelLike | Sequence[ModelLike],
    batches: Samples,
    match: AlignConfig | None = None,
    options: FitConfig | None = None,
    progress: Progress | None = None,
    untie: bool | None = None,
    module: nn.Module | None = None,
    devices: Sequence[str] = (),
) -> FitResult:
    """Learn the transforms that lower the loss of models between an anchor and its donors.

    Args:
        anchor: as `rotation_merge.align` takes models. A module is put into evaluation mode, its weights are not
            modified; what is between the models is computed on its device.
        donors: one or more of the same class and sizes, modules on any devices. More than one are learned jointly.
        batches: inputs by the names the model's forward takes, with `labels` where there are any; or the name of a
            source (a file, `self`, `synthetic`, `demo:NAME`).
        match: groups to use and to start from; by default every local group and the largest residual one.
        options: how to learn.
        progress: told about every step.
        untie: give tied heads a tensor of their own; None: where the residual group needs it.
        module: the anchor in memory, where it is there anyway.
        devices: where the models' weights are put, one of them for each model in turn; those between are computed on
            the first. Empty: each where it is, and the anchor's.

    Returns:
        Alignments that are never worse on the held-out batches than where the fit started.

    Raises:
        RotationMergeError: models that do not fit together, groups that are not admitted, data without use.
    """
    options = FitConfig.of(options)
    is_state = isinstance(donors, tuple) and len(donors) == 2 and isinstance(donors[0], Mapping)  # with its config
    several = isinstance(donors, list | tuple) and (isinstance(donors[0], View) or not is_state) if donors else True
    models = [anchor, *(donors if several else [donors])]
    pairs = _pairs(models, AlignConfig.of(match or WIDEST), untie)
    if options.coefficients is not None and len(options.coefficients) != len(pairs) + 1:
        problem = f"{len(options.coefficients)} 'coefficients' for {len(pairs) + 1} models"
        raise RecipeError(problem, remedy="give one share for each model, the anchor first")
    module = module or pairs[0].anchor.module or in_memory(open_model(pairs[0].anchor), None)
    samples = _samples(batches, pairs, module)
    with seeded(options.seed):
        return _Fit(pairs, module, samples, options, progress or listener(), devices).run()


def _pairs(models: Sequence[ModelLike], match: AlignConfig, untie: bool | None = None) -> list[Pair]:
    """The anchor with each donor."""
    if len(models) < 2:
        raise RecipeError("no donors are given", remedy="give one model or more to align to the anchor")
    anchor, *donors = (open_model(model, f"donor {n}" if n else "anchor") for n, model in enumerate(models))
    pairs = [open_pair(anchor, donor, match, untie is not False) for donor in donors]
    if untie is None and not (pairs[0].folded and anchor.tied):
        return [open_pair(anchor, donor, match) for donor in donors]
    return pairs


def _samples(batches: Samples, pairs: Sequence[Pair], module: nn.Module) -> list[Batch]:
    """Batches that all models can run on.

    Raises:
        RotationMergeError: they cannot, or there are too few.
    """
    if isinstance(batches, str | os.PathLike):
        samples = read_samples(pairs[0].anchor, batches, module=module).batches
    else:
        batches = listed(batches)
        for model in (module, *(pair.donor.module for pair in pairs if pair.donor.module is not None)):
            data_in_memory(batches, model)
        samples = [dict(batch) for batch in batches]
    if len(samples) < 2:
        raise RecipeError("at least two batches are needed", remedy="give more data, or smaller batches")
    return samples


class _Fit:
    """One fit in progress.

    Attributes:
        held_out, training: numbers of batches.
        model: a module that computes the model of `mixture`.
    """

    def __init__(
        self,
        pairs: list[Pair],
        module: nn.Module,
        batches: list[Batch],
        options: FitConfig,
        progress: Progress,
        devices: Sequence[str] = (),
    ) -> None:
        self.pairs, self.options, self.progress = pairs, options, progress
        self.count, self.match = len(pairs) + 1, pairs[-1].options
        module = (module.to(devices[0]) if devices else module).eval()
        self.device, self.architecture = device_of(module), architecture_of(module, untie=True)
        size = 4 * sum(parameter.numel() for parameter in module.parameters())
        self.parents = list[Tensors]()
        for number, view in enumerate((pairs[0].anchor, *(pair.donor for pair in pairs))):
            tensors = view.tensors.on(devices[number % len(devices)]) if devices else view.tensors
            self.parents.append(restructured(tensors, view.architecture, self.architecture).cached(math.inf))
            _check_names(self.architecture, pairs[0].anchor, view, set(self.parents[0]) ^ set(self.parents[-1]))
        keeps = size <= LARGEST_KEPT and not options.checkpointing
        self.mixture = Mixture(self.architecture, self.parents, pairs[-1].folded, self.device, keeps)
        self.model = mixed_model(module, self.mixture, options.checkpointing)
        self.batches: list[Batch] = [{k: v.to(self.device) for k, v in batch.items()} for batch in batches]
        draw = torch.Generator().manual_seed(options.seed)
        self.training, self.held_out = split_at_random(range(len(batches)), draw)
        self.objective = choose(options.objective, self.batches[0])
        self.generator = torch.Generator().manual_seed(options.seed + 1)
        self._answers: dict[int, list[Tensor]] = {}
        self._free = LARGEST_ANSWERS

    # --- samples and losses ------------------------------------------------------------------------------------

    def loss(self, batch: Batch, answers: list[Tensor] | None, coefficients: Tensor) -> Tensor:
        """Loss of the chosen model on one batch: from its labels, or from its parents' answers."""
        half = self.options.half and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            outputs = self.model(**batch)
            if answers is None:
                return labels_loss(outputs)
            return distillation(outputs, answers, coefficients, batch.get("attention_mask"))

    @torch.no_grad()
    def answers(self, batch: Batch) -> list[Tensor]:
        """The parents' answers to a batch, computed in float32 at least."""
        answers = []
        for share in torch.eye(self.count):
            with self.mixture.at([{}] * len(self.pairs), share):
                answers.append(taught_output(self.model(**batch)))
        return answers

    def batch_with_answers(self, number: int) -> tuple[Batch, list[Tensor] | None]:
        """A batch, with the parents' answers unless its labels count."""
        if self.objective == "labels":
            return self.batches[number], None
        batch = unlabelled(self.batches[number])
        answers = self._answers.get(number) or self.answers(batch)
        size = sum(answer.nbytes for answer in answers)
        if number not in self._answers and size <= self._free:
            self._answers[number] = answers
            self._free -= size
        return batch, answers

    def next_batch(self) -> tuple[Batch, list[Tensor] | None]:
        """Draw a training batch, or a mix of two with the parents' answers."""
        number = self._pick()
        batch = unlabelled(self.batches[number])
        mixable = all(tensor.is_floating_point() for tensor in batch.values())
        if not mixable or float(torch.rand((), generator=self.generator)) >= MIXING:
            return self.batch_with_answers(number)
        mixed = mix(batch, unlabelled(self.batches[self._pick()]), self.generator)
        return mixed, self.answers(mixed)

    def _pick(self) -> int:
        return self.training[int(torch.randint(len(self.training), (), generator=self.generator))]

    @torch.no_grad()
    def score(self, transforms: list[Transforms]) -> tuple[float, float]:
        """Held-out loss inside the path (mean), and the barrier: highest loss above the straight line."""
        samples = [self.batch_with_answers(number) for number in self.held_out]
        losses = []
        for point in POINTS:
            coefficients = along(point, self.count).to(self.device)
            with self.mixture.at(transforms, coefficients):
                values = [float(self.loss(*sample, coefficients)) for sample in samples]
            losses.append(sum(values) / len(values))
        line = [losses[0] + point * (losses[-1] - losses[0]) for point in POINTS]
        barrier = max(value - straight for value, straight in zip(losses[1:-1], line[1:-1], strict=True))
        return (sum(losses[1:-1]) / 3 if self.count == 2 else losses[2]), barrier

    def draw(self) -> Tensor:
        """Draw the coefficients of one step, mostly near the middle."""
        if self.options.coefficients is not None:
            return torch.tensor(self.options.coefficients, device=self.device)
        if self.count == 2:
            first, second = torch.rand(2, generator=self.generator).tolist()
            share = 0.5 + 0.9 * (first - 0.5) * second
            return torch.tensor([1 - share, share], device=self.device)
        gamma = torch._standard_gamma(torch.full((self.count,), CONCENTRATION), generator=self.generator)
        return (gamma / gamma.sum()).to(self.device)

    # --- the fit -----------------------------------------------------------------------------------------------

    def starts(self) -> dict[str, list[Transforms]]:
        """Return the starting points of the fit: all donors unmoved, or as matching moves them."""
        starts: dict[str, list[Transforms]] = {}
        if self.options.start != "matched":
            groups = space_groups(self.architecture, self.match)
            starts["identity"] = [{name: group.identity() for name, group in groups.items()} for _ in self.pairs]
        if self.options.start != "identity":
            starts["matched"] = [
                self._matched(pair, donor) for pair, donor in zip(self.pairs, self.parents[1:], strict=True)
            ]
        return starts

    def _matched(self, pair: Pair, donor: Tensors) -> Transforms:
        """The transforms that matching finds: on weights, or also on the training samples."""
        samples = [self.batches[i] for i in self.training]
        match = matcher(self.options.match_on, pair.anchor, pair.donor, samples, device=str(self.device))
        sources = (tensors.on(self.device) for tensors in (self.parents[0], donor))
        return match(self.architecture, *sources, self.match, None).transforms

    def run(self) -> FitResult:
        """Learn from the better start."""
        began = time.perf_counter()
        starts = self.starts()
        scores = {name: self.score(transforms) for name, transforms in starts.items()}
        plain = scores.get("identity") or self.score([{} for _ in self.pairs])
        name = min(scores, key=lambda start: scores[start][0])
        learned = [LearnedTransforms(self.architecture, maps, bool(self.match.scaling)) for maps in starts[name]]
        loss, barrier = scores[name]
        report = FitReport(name, self.objective, loss, loss, barrier, barrier, plain[0], 0, 0.0)
        self._optimise(nn.ModuleList(learned).to(self.device), report, began)
        report.seconds, alignments = time.perf_counter() - began, []
        for module, pair in zip(learned, self.pairs, strict=True):
            transforms = renamed(module.final_transforms(), self.architecture, pair.architecture)
            facts = {"learned": report.to_dict()}
            alignment = reported(pair, Alignment(transforms, pair.folded, summary=dict(facts)))
            alignments.append(replace(alignment, metadata={**alignment.metadata, **facts}))
        return FitResult(alignments, report)

    def _optimise(self, learned: nn.ModuleList, report: FitReport, began: float) -> None:
        """Take the steps, and leave the parameters with the lowest held-out loss."""
        if next(learned.parameters(), None) is None:
            problem = "the groups chosen have nothing to learn (signs and permutations only)"
            remedy = "allow 'attention: rotation', 'scaling' or 'residual: rotation'"
            raise RecipeError(problem, remedy=remedy)
        options, steps = self.options, self.options.steps
        optimiser = torch.optim.Adam(learned.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
        report.history = [(0, 0.0, report.before, report.barrier_before)]
        step, score = partial(self._step, learned, optimiser), partial(self._score, learned)
        training = Training(learned, optimiser, schedule, self.generator, report, step, score, LEAST_GAIN)
        seconds = 60 * options.minutes - (time.perf_counter() - began) if options.minutes else math.inf
        with kept_in(options.state, self._mark) as ledger:
            training.run(steps, LOOKS, lambda done: self.progress("learning", done, steps), ledger, PATIENCE, seconds)
        report.barrier_after = next(barrier for step, _, _, barrier in report.history if step == report.best_step)

    def _mark(self) -> str:
        """A stable key of the fit: models, data, and every option that has an effect."""
        chosen = {name: value for name, value in asdict(self.options).items() if name not in WITHOUT_EFFECT}
        models = [view.fingerprint for view in (self.pairs[0].anchor, *(pair.donor.as_filed for pair in self.pairs))]
        batches = [{name: checksum(tensor) for name, tensor in batch.items()} for batch in self.batches]
        return mark_of([], fitted=models, batches=batches, match=asdict(self.match), options=chosen)

    def _step(self, learned: nn.ModuleList, optimiser: torch.optim.Optimizer) -> None:
        """Run one step.

        Nothing may survive it: a remaining graph would fragment memory for the next one.
        """
        optimiser.zero_grad()
        coefficients, sample = self.draw(), self.next_batch()
        with self.mixture.at([module() for module in learned], coefficients):
            loss = self.loss(*sample, coefficients)
            if loss.requires_grad:
                loss.backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimiser.step()

    @torch.no_grad()
    def _score(self, learned: nn.ModuleList) -> tuple[float, float]:
        return self.score([module() for module in learned])


def _check_names(architecture: Architecture, anchor: View, donor: View, odd: set[str]) -> None:
    """Refuse a donor if one of the tensors that only one of the two has is more than a second copy of another."""
    infos = list(architecture.tensors())
    known = {name for info in infos if not info.tied for name in info.names}
    if odd := odd & known - {name for info in infos for name in info.tied}:
        problem = f"tensor '{min(odd)}' is only in one of {anchor.name} and {donor.name}"
        raise CheckpointError(problem, where=donor.name, remedy="give models of one class")


def along(point: float, models: int) -> Tensor:
    """Coefficients at a point of the path from the anchor (0) over the mean of all models to the donors (1)."""
    even, ends = torch.full((models,), 1.0 / models), torch.zeros(2, models)
    ends[0, 0], ends[1, 1:] = 1.0, 1.0 / (models - 1)
    return torch.lerp(ends[0], even, 2 * point) if point <= 0.5 else torch.lerp(even, ends[1], 2 * point - 1)
