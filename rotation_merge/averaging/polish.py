"""Polish: a few steps of distillation on a merge, with each teacher's outputs on its own samples.

The teachers' answers are on disk before training begins; a held-out part of the samples chooses the learning rate and
the step, and tells whether anything was gained. Distillation after Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from annotated_types import Ge
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from rotation_merge.config import Config, Count, Length, Rate, option
from rotation_merge.errors import CheckpointError, DataError, RotationMergeError
from rotation_merge.matching.objective import Answered, divergence
from rotation_merge.matching.training import Training, kept_in, restore, trained
from rotation_merge.model.tensors import Fingerprint
from rotation_merge.run.batches import device_of, inputs_for
from rotation_merge.run.functions import check_answers, fused_attention
from rotation_merge.run.ledger import Ledger
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

RATE = "rate"
"""What a ledger calls the learning rate that was chosen, and the trials."""

ROUNDING = 1e-6
"""Nats from the teachers that a model which is one of them may show, of either sign."""

MIXER, PAST = ("A_log", "D"), ("out_proj", "conv1d")
"""Parameters of a state-space mixer, and its maps whose weights kernels read past a LoRA; peft refuses them in some
models."""


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
        start = f"{self.before:.4g} nats from the teachers on held-out samples"
        if not self.gained:
            return f"polishing gains nothing: {start}, as before"
        return f"{start} before, {self.after:.4g} after (step {self.best_step}, learning rate {self.rate:g})"

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


@dataclass
class Polish:
    """Training of a model towards the teachers' outputs, in place; the best state on held-out samples is kept.

    Attributes:
        model: in evaluation mode, its trainable parameters those that require gradients; `SharedBody`: the model that
            learns from each teacher.
        answered: each teacher's samples and answers.
        new: the LoRA holds nothing yet and begins along the gradient (`initialise_along_gradient`).
        last: number of last batches of each teacher to hold out; empty: a random share of `HELD_OUT`.
        batches: of every teacher that a step sees; 0: as many as hold `STEP_TOKENS`, or as there are.
        state: folder for the state of an unfinished run; found there, the run goes on from it.
        watch: called at every step with a label, the steps done and the total.

    Raises:
        DataError: too few samples to hold some out.
    """

    model: nn.Module
    answered: Sequence[Answered]
    config: PolishConfig
    new: bool = False
    last: Sequence[int] = ()
    batches: int = 0
    state: Path | None = None
    watch: Progress = lambda *_: None

    def __post_init__(self) -> None:
        torch.manual_seed(self.config.seed)
        self.students = list(self.model) if isinstance(self.model, SharedBody) else [self.model] * len(self.answered)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        draw = torch.Generator().manual_seed(self.config.seed)
        parts = [self._parts(number, draw) for number in range(len(self.answered))]
        self.held_out, self.training = [part for part, _ in parts], [part for _, part in parts]
        sizes = ([batch["input_ids"].numel() for batch, _ in each if "input_ids" in batch] for each in self.answered)
        tokens = sum(fmean(texts) for texts in sizes if texts)
        batch_size = round(STEP_TOKENS / tokens) if tokens else 1
        self.batches = self.batches or max(1, min(batch_size, *map(len, self.training)))

    def _parts(self, teacher: int, draw: torch.Generator) -> tuple[list[int], list[int]]:
        """The batches of a teacher that are held out, and those that are trained on."""
        count = len(self.answered[teacher])
        if count < 2:
            problem, remedy = f"{count} batches of samples are too few to hold one out", "give more of them ('samples')"
            raise DataError(problem, where=f"teacher {teacher + 1}", remedy=remedy)
        order, size = torch.randperm(count, generator=draw).tolist(), max(1, round(count * HELD_OUT))
        if self.last:
            order, size = list(reversed(range(count))), self.last[teacher]
        return order[:size], order[size:]

    def run(self) -> PolishReport:
        """Train; with the fast attention that gives each student's usual outputs."""
        with ExitStack() as attention:
            for student, answers in zip(self.students, self.answered, strict=True):
                attention.enter_context(fused_attention(student, inputs_for(student, answers[0][0])))
            began, before = time.perf_counter(), self.score()
            check_answers(self.model, [torch.tensor(before)])
            report = PolishReport(before, before, history=[(0, 0.0, before)])
            if self.new:
                initialise_along_gradient(self.model, self._first_gradients)
            start = copy.deepcopy(trained(self.model))
            with kept_in(self.state, partial(self._key, start)) as ledger:
                report.rate, report.trials = ledger.get(RATE) or self._chosen_rate(start, before)
                ledger.keep(RATE, lambda: (report.rate, report.trials))
                self._train(report, ledger)
            report.seconds = time.perf_counter() - began
            return report

    def _chosen_rate(self, start: dict[str, Tensor], before: float) -> tuple[float, dict[str, float]]:
        """The learning rate that trials choose, from `start`, which the model then is again; and the trials."""
        if self.config.learning_rate is not None:
            return self.config.learning_rate, {}
        rates = list(RATES["weights" if not self.config.lora else "new lora" if self.new else "lora"])
        lower, trials = [rate for rate in LOWER if rate < min(rates)], dict[str, float]()
        for rate in rates:  # grows while the lowest one is the best
            trials[f"{rate:g}"] = self._trial(rate, start)
            best = best_rate(rates, trials, before)
            if len(trials) == len(rates) and best == min(rates) and lower:
                rates.append(lower.pop(0))
        _check_number(trials[f"{best:g}"])
        return best, trials

    def _trial(self, rate: float, start: dict[str, Tensor]) -> float:
        """The held-out divergence after a whole schedule of a tenth of the steps; infinite if it is not finite."""
        steps, generator = max(1, round(self.config.steps * TRIAL)), self._generator()
        optimiser, schedule = self._optimiser(rate, steps)
        for step in range(steps):
            self._step(optimiser, generator)
            schedule.step()
            self.watch(f"learning rate {rate:g}", step + 1, steps)
        result = self.score()
        restore(self.model, start)
        return result if math.isfinite(result) else math.inf

    def _train(self, report: PolishReport, ledger: Ledger) -> None:
        """Take all steps at the chosen rate."""
        steps, generator = self.config.steps, self._generator()
        optimiser, schedule = self._optimiser(report.rate, steps)

        def step() -> None:
            _check_number(self._step(optimiser, generator))

        training = Training(self.model, optimiser, schedule, generator, report, step, lambda: (self.score(),))
        training.run(steps, LOOKS, lambda done: self.watch("polishing", done, steps), ledger)

    def _key(self, start: dict[str, Tensor]) -> str:
        """The fingerprint of a polishing run: weights, answers and every option that has an effect."""
        fingerprint = Fingerprint()
        pairs = (pair for samples in self.answered for pair in samples)
        for number, tensors in enumerate([start, *itertools.chain.from_iterable(pairs)]):
            for name, tensor in tensors.items():
                fingerprint.add(f"{number}.{name}", tensor)
        options = asdict(replace(self.config, merge_lora=False))  # which is of writing
        return fingerprint.hexdigest({"new": self.new, "last": list(self.last), "batches": self.batches, **options})

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.config.seed + 1)

    def _optimiser(self, rate: float, steps: int) -> tuple[Optimizer, LRScheduler]:
        """AdamW with a schedule that rises to a rate in a tenth of the steps, then falls to zero."""
        optimiser = torch.optim.AdamW(self.trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        total = max(steps, 1 + WARM)
        warm = max(0.1, WARM / total)
        return optimiser, OneCycleLR(optimiser, rate, total_steps=total, pct_start=warm, cycle_momentum=False)

    def _step(self, optimiser: Optimizer, generator: torch.Generator) -> float:
        """Take one step on random batches of each teacher and return the divergence before it."""
        optimiser.zero_grad()
        numbers = [torch.tensor(t)[torch.randint(len(t), (self.batches,), generator=generator)] for t in self.training]
        total = sum(self._gradient(k, number) for k, batch in enumerate(numbers) for number in batch.tolist())
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        optimiser.step()
        return total

    def _gradient(self, teacher: int, number: int) -> float:
        """Add the gradient of one batch of a teacher, and return its part of the divergence."""
        loss = self._divergence(teacher, number) / (len(self.answered) * self.batches)
        loss.backward()
        return float(loss.detach())

    def _divergence(self, teacher: int, number: int) -> Tensor:
        """Divergence from a teacher on one of its batches."""
        student, (batch, answer) = self.students[teacher], self.answered[teacher][number]
        device = device_of(self.model)
        target = {name: tensor.to(device) for name, tensor in answer.items()}
        return divergence(student(**inputs_for(student, batch)), target)

    def _first_gradients(self) -> None:
        """Add up the gradients of the first training batches of every teacher."""
        for teacher, numbers in enumerate(self.training):
            for number in numbers[:GRADIENT_SAMPLES]:
                self._gradient(teacher, number)

    @torch.no_grad()
    def score(self) -> float:
        """Divergence on held-out samples, the mean over teachers."""
        return fmean(
            fmean(float(self._divergence(k, number)) for number in numbers) for k, numbers in enumerate(self.held_out)
        )


def best_rate(rates: Sequence[float], trials: Mapping[str, float], before: float) -> float:
    """The largest rate with at least a share of the best gain; short trials favour small rates.

    Args:
        trials: held-out divergence after each rate's trial, by its name.
        before: held-out divergence at the start.
    """
    gains = {rate: before - trials.get(f"{rate:g}", before) for rate in rates}
    best = max(gains, key=lambda rate: gains[rate])
    if gains[best] <= 0:
        return best
    return max(rate for rate in rates if gains[rate] >= LEAST_SHARE * gains[best])


def _check_number(loss: float) -> float:
    """A loss, if it is finite."""
    if not math.isfinite(loss):
        problem, remedy = "training gives NaN", "give a lower 'learning_rate', or look at the model's weights"
        raise CheckpointError(problem, remedy=remedy)
    return loss


def with_lora(model: Any, rank: int, seed: int) -> Any:
    """Add a rank-stabilised LoRA to a model and freeze everything else.

    It covers all linear maps, except those with which a state-space mixer writes the stream, and tied heads.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RotationMergeError("--lora needs peft", remedy="pip install peft") from error
    from transformers.pytorch_utils import Conv1D

    plain = nn.Linear.forward, Conv1D.forward  # a router may be a linear map that gives more than its product
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and type(module).forward in plain
        if module.weight not in tables
        if not (name.endswith(PAST) and all(hasattr(model.get_submodule(name.rpartition(".")[0]), k) for k in MIXER))
    ]
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=rank, use_rslora=True, target_modules=maps or "all-linear")
    return get_peft_model(model, config).eval()


def initialise_along_gradient(model: nn.Module, gradients: Callable[[], object]) -> None:
    """Initialise every LoRA of a model along the gradient G of its map, in place.

    A gets orthonormal rows that span the dominant row space of G and B is 0, so the model's outputs stay the same.

    Found by half a step of subspace iteration, for which the LoRA's own gradients do: that of B is G Aᵀ, that of A is
    Bᵀ G. No gradient of a whole weight is ever held.

    Args:
        gradients: adds up those of the loss on some samples.

    Source: the idea is LoRA-GA's (Wang, Yu and Li 2024), which takes singular vectors of G.
    """
    factors = [
        (a.weight, module.get_parameter(f"lora_B.{name}.weight"))
        for module in model.modules()
        for name, a in getattr(module, "lora_A", {}).items()
    ]
    fresh = [a.detach().clone() for a, _ in factors]
    gradients()
    with torch.no_grad():
        for a, b in factors:
            if b.grad is not None:
                basis = torch.linalg.qr(b.grad.double())[0]
                b.zero_()[:, : basis.shape[1]] = basis
                a.zero_()
    model.zero_grad()
    gradients()
    with torch.no_grad():
        for (a, b), drawn in zip(factors, fresh, strict=True):
            if a.grad is not None:
                basis = torch.linalg.qr(a.grad.double().mT)[0].mT
                a.copy_(drawn)[: len(basis)] = basis
                b.zero_()
    model.zero_grad()
