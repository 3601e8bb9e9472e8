"""Polish: a few steps of distillation on a merge, with each teacher's outputs on its own samples.

The teachers' answers are on disk before training begins; a held-out part of the samples chooses the learning rate and
the step, and tells whether anything was gained. Distillation after Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor, nn

from rotation_merge.averaging.low_rank import initialise_along_gradient
from rotation_merge.config import Config, Count, Length, Rate, option
from rotation_merge.errors import CheckpointError, DataError
from rotation_merge.matching.resume import TrainingState
from rotation_merge.matching.teachers import AnsweredSamples, divergence
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.run.functions import check_answers, device_of, fused_attention, unlabelled
from rotation_merge.workers import Progress

RATES = {"weights": (2e-4, 5e-4, 1e-3), "lora": (1e-3, 2e-3, 5e-3), "new lora": (5e-4, 1e-3)}
"""Learning rates that are tried first: for all weights, for a LoRA that holds something, for one that begins along the
gradient."""

LOWER = (3e-4, 1e-4, 3e-5, 1e-5)
"""Learning rates that are tried next, in this order, while the lowest one so far is the best. Pretrained models need
them."""

STEP_TOKENS = 2048
"""Tokens of a step, of all teachers together: of short texts, a step sees more batches."""

GRADIENT_SAMPLES = 8
"""Batches of each teacher that say where a LoRA begins."""

TRIAL = 0.1
"""Share of the steps after which a learning rate is chosen."""

HELD_OUT = 0.15
"""Share of the samples that chooses the learning rate and the step."""

LEAST_SHARE = 0.5
"""Share of the best learning rate's gain in the trial that a larger one must reach to be chosen."""

WARM = 2
"""Steps of warming up at least, of which torch's schedule cannot have one."""

LOOKS = 10
"""Number of evaluations on the held-out samples."""

LEAST_GAIN = 1e-3
"""A held-out divergence lower by less than this share is no gain."""

ROUNDING = 1e-6
"""Nats from the teachers that a model which is one of them may show, of either sign."""


@config_dataclass(frozen=True)
class PolishConfig(Config):
    """Options of polishing."""

    samples: Length = option(64, "number of samples of each teacher")
    steps: Count = option(50, "optimiser steps")
    lora: Annotated[int, Ge(0)] = option(0, "train a LoRA of this rank; `0`: all weights")
    merge_lora: bool = option(False, "write the model with the LoRA merged in, instead of an adapter")
    learning_rate: Rate | None = option(None, "learning rate. Not given: chosen on held-out samples")
    length: Length = option(128, "tokens in a text")
    seed: int = option(0, "seed of all random numbers")


@dataclass(frozen=True)
class PolishOptions:
    """Options of one polishing run.

    Attributes:
        steps: of the optimiser.
        lora: rank of the LoRA that is trained; 0: all weights.
        new: the LoRA holds nothing yet and begins along the gradient (`low_rank.initialise_along_gradient`).
        rates: learning rates that are tried; empty: the usual ones.
        last: number of last batches of each teacher to hold out; empty: a random share of `HELD_OUT`.
        seed: of everything random.
        state: file for the state of an unfinished run; found there, the run goes on from it.
        batches: of every teacher that a step sees; 0: as many as hold `STEP_TOKENS`, or as there are.
    """

    steps: int = 50
    lora: int = 0
    new: bool = False
    rates: tuple[float, ...] = ()
    last: tuple[int, ...] = ()
    seed: int = 0
    state: Path | None = None
    batches: int = 0

    @property
    def usual(self) -> tuple[float, ...]:
        """The learning rates that are tried first."""
        return self.rates or RATES["weights" if not self.lora else "new lora" if self.new else "lora"]


@dataclass
class PolishReport:
    """The report on a polishing run.

    Attributes:
        before, after: divergence from the teachers on held-out samples (nats), at the start and of the kept state.
        rate: the learning rate that was chosen.
        trials: held-out divergence of each learning rate after a tenth of the steps.
        history: (step, seconds, held-out divergence).
    """

    before: float
    after: float
    rate: float = 0.0
    best_step: int = 0
    seconds: float = 0.0
    trials: dict[str, float] = field(default_factory=dict)
    history: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def gained(self) -> bool:
        return self.before > ROUNDING and self.after < self.before * (1 - LEAST_GAIN)

    def verdict(self) -> str:
        """One sentence on the result, in plain words."""
        if not self.gained:
            return f"polishing gains nothing: {self.before:.4g} nats from the teachers on held-out samples, as before"
        return (
            f"{self.before:.4g} nats from the teachers on held-out samples before, {self.after:.4g} after "
            f"(step {self.best_step}, learning rate {self.rate:g})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gained": self.gained, "verdict": self.verdict()}


class SharedBody(nn.ModuleList):
    """Models that share the parameters of their body, each with its own head: one for each teacher.

    Args:
        models: any of them may stand more than once; their equal parameters become those of `merge`.
        merge: the merge with its own head.
        heads: names of parameters that are never shared.
    """

    def __init__(self, models: Sequence[nn.Module], merge: nn.Module, heads: Collection[str]) -> None:
        super().__init__(models)
        merged = dict(merge.named_parameters(remove_duplicate=False))
        for model in models:
            for name, parameter in list(model.named_parameters(remove_duplicate=False)):
                shared = merged.get(name)
                if name not in heads and shared is not None and torch.equal(shared, parameter):
                    place, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(place), leaf, shared)


def polish(
    model: nn.Module, answered: Sequence[AnsweredSamples], options: PolishOptions, watch: Progress | None = None
) -> PolishReport:
    """Train a model in place towards the teachers' outputs, and keep the best state on held-out samples.

    Args:
        model: in evaluation mode, its trainable parameters those that require gradients; `SharedBody`: the model that
            learns from each teacher.
        answered: each teacher's samples and answers.
        watch: called at every step with a label, the steps done and the total.

    Raises:
        DataError: too few samples to hold some out.
    """
    device = device_of(model)
    with ExitStack() as attention:
        for student, answers in zip(_students(model, answered), answered, strict=True):
            attention.enter_context(fused_attention(student, unlabelled(answers.read(0, device)[0])))
        return _Polish(model, answered, options, watch or (lambda *_: None)).run()


def _students(model: nn.Module, answered: Sequence[AnsweredSamples]) -> list[nn.Module]:
    """The model that learns from each teacher."""
    return list(model) if isinstance(model, SharedBody) else [model] * len(answered)


class _Polish:
    def __init__(
        self, model: nn.Module, answered: Sequence[AnsweredSamples], options: PolishOptions, watch: Progress
    ) -> None:
        torch.manual_seed(options.seed)
        self.model, self.answered, self.options, self.watch = model, answered, options, watch
        self.students = _students(model, answered)
        self.device = device_of(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        draw = torch.Generator().manual_seed(options.seed)
        self.held: list[list[int]] = []
        self.training: list[list[int]] = []
        for number, answers in enumerate(answered):
            if answers.count < 2:
                problem, where = (
                    f"{answers.count} batches of samples are too few to hold one out",
                    f"teacher {number + 1}",
                )
                raise DataError(problem, where=where, remedy="give more of them ('samples')")
            order = torch.randperm(answers.count, generator=draw).tolist()
            held_count = max(1, round(answers.count * HELD_OUT))
            if options.last:
                order, held_count = list(reversed(range(answers.count))), options.last[number]
            self.held.append(order[:held_count])
            self.training.append(order[held_count:])
        tokens = sum(answers.tokens / answers.count for answers in answered)
        wanted = round(STEP_TOKENS / tokens) if tokens else 1
        self.batches = options.batches or max(1, min(wanted, *map(len, self.training)))

    def run(self) -> PolishReport:
        began = time.perf_counter()
        before = self.score()
        check_answers(self.model, [torch.tensor(before)])
        report = PolishReport(before, before, history=[(0, 0.0, before)])
        if self.options.new:
            initialise_along_gradient(self.model, self.accumulate_gradients)
        start = self.kept()
        resumed = self.options.state is not None and self.options.state.exists()
        if not resumed:
            report.rate = self.chosen_rate(start, report)
        best = self.train(report, began, start)
        self.restore(best)
        report.seconds = time.perf_counter() - began
        return report

    def chosen_rate(self, start: dict[str, Tensor], report: PolishReport) -> float:
        """The learning rate that trials choose, from `start`, which the model then is again."""
        rates = list(self.options.usual)
        lower = [] if self.options.rates else [rate for rate in LOWER if rate < min(rates)]
        for rate in rates if len(rates) > 1 else ():
            report.trials[f"{rate:g}"] = self.trial(rate, start)
        while (best := best_rate(rates, report.trials, report.before)) == min(rates) and lower:
            rates.append(lower.pop(0))
            report.trials[f"{rates[-1]:g}"] = self.trial(rates[-1], start)
        _check_number(report.trials.get(f"{best:g}", 0.0))
        return best

    def trial(self, rate: float, start: dict[str, Tensor]) -> float:
        """The held-out divergence after a whole schedule of a tenth of the steps; infinite if it is not finite."""
        steps = max(1, round(self.options.steps * TRIAL))
        optimiser = self.optimiser(rate)
        schedule = one_cycle(optimiser, rate, steps)
        batches = self.draws(torch.Generator().manual_seed(self.options.seed + 1))
        for step in range(steps):
            self.step(optimiser, next(batches))
            schedule.step()
            self.watch(f"learning rate {rate:g}", step + 1, steps)
        held_out_divergence = self.score()
        self.restore(start)
        return held_out_divergence if math.isfinite(held_out_divergence) else math.inf

    def train(self, report: PolishReport, began: float, start: dict[str, Tensor]) -> dict[str, Tensor]:
        steps = self.options.steps
        optimiser = self.optimiser(report.rate or 1.0)
        schedule = one_cycle(optimiser, report.rate or 1.0, steps)
        generator = torch.Generator().manual_seed(self.options.seed + 1)
        state = TrainingState(self.options.state, self.model, optimiser, schedule, generator, self.mark(start))
        first, best = state.restore(report)
        best = best if first else start
        every = max(1, steps // LOOKS)
        batches = self.draws(generator)
        for step in range(first, steps):
            _check_number(self.step(optimiser, next(batches)))
            schedule.step()
            if (step + 1) % every == 0 or step + 1 == steps:
                value = self.score()
                report.history.append((step + 1, time.perf_counter() - began, value))
                if value < report.after:
                    report.after, report.best_step, best = value, step + 1, self.kept()
                state.save(step + 1, best, report)
            self.watch("polishing", step + 1, steps)
        state.remove()
        return best

    def mark(self, start: dict[str, Tensor]) -> str:
        """The fingerprint of a polishing run: weights, answers and every option that has an effect."""
        fingerprint = Fingerprint()
        for name, tensor in start.items():
            fingerprint.add(name, tensor)
        chosen = {name: value for name, value in asdict(self.options).items() if name != "state"}
        return fingerprint.hexdigest({"answers": [answers.mark for answers in self.answered], **chosen})

    def optimiser(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def draws(self, generator: torch.Generator) -> Iterator[list[Tensor]]:
        """Yield the batch numbers of each teacher for every step."""
        while True:
            yield [torch.tensor(t)[torch.randint(len(t), (self.batches,), generator=generator)] for t in self.training]

    def step(self, optimiser: torch.optim.Optimizer, numbers: Sequence[Tensor]) -> float:
        """Run one step and return the divergence before it."""
        optimiser.zero_grad()
        total = sum(self.gradient(k, number) for k, batch in enumerate(numbers) for number in batch.tolist())
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        optimiser.step()
        return total

    def gradient(self, teacher: int, number: int) -> float:
        """Add the gradient of one batch of a teacher, and return its part of the divergence."""
        loss = self.divergence(teacher, number) / (len(self.answered) * self.batches)
        loss.backward()
        return float(loss.detach())

    def divergence(self, teacher: int, number: int) -> Tensor:
        """Divergence from a teacher on one of its batches."""
        batch, target = self.answered[teacher].read(number, self.device)
        return divergence(self.students[teacher](**unlabelled(batch)), target)

    def accumulate_gradients(self) -> None:
        """Accumulate the gradients of the first training batches of every teacher."""
        for teacher, numbers in enumerate(self.training):
            for number in numbers[:GRADIENT_SAMPLES]:
                self.gradient(teacher, number)

    @torch.no_grad()
    def score(self) -> float:
        """Divergence on held-out samples, the mean over teachers."""
        each = []
        for teacher, numbers in enumerate(self.held):
            values = [float(self.divergence(teacher, number)) for number in numbers]
            each.append(sum(values) / len(values))
        return sum(each) / len(each)

    def kept(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def restore(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def best_rate(rates: Sequence[float], trials: Mapping[str, float], before: float) -> float:
    """The largest rate with at least a share of the best gain; short trials favour small rates.

    Args:
        trials: held-out divergence after each rate's trial, by its name; empty with one rate.
        before: held-out divergence at the start.
    """
    gains = {rate: before - trials.get(f"{rate:g}", before) for rate in rates}
    best = max(gains, key=lambda rate: gains[rate])
    if gains[best] <= 0:
        return best
    return max(rate for rate in rates if gains[rate] >= LEAST_SHARE * gains[best])


def one_cycle(optimiser: torch.optim.Optimizer, rate: float, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that rises to a rate in a tenth of the steps, then falls to zero."""
    total = max(steps, 1 + WARM)
    warm = max(0.1, WARM / total)
    return torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=total, pct_start=warm, cycle_momentum=False)


def _check_number(loss: float) -> None:
    if not math.isfinite(loss):
        problem, remedy = "training gives NaN", "give a lower 'learning_rate', or look at the model's weights"
        raise CheckpointError(problem, remedy=remedy)
