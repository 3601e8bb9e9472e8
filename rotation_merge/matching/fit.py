"""Learns alignments by gradient descent on the loss of models between the parents.

Generalized Linear Mode Connectivity for Transformers (Theus and others, 2025) learns permutations and a residual map in
this way; here every space of any supported architecture is learned, inside its group (`learned.py`), on one model whose
weights are mixed as they are used (`between.py`), and the output is an alignment that recipes apply.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotation_merge.errors import RecipeError
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.aligned_output import reported, with_basis
from rotation_merge.matching.alignment import Alignment, Transforms
from rotation_merge.matching.basis import Basis
from rotation_merge.matching.between import LARGEST_KEPT, Mixture, mixed_model, renamed
from rotation_merge.matching.fit_records import LOOKS, FitConfig, FitReport
from rotation_merge.matching.gauge import space_groups
from rotation_merge.matching.learned import LearnedTransforms
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.match_on import activation_matcher
from rotation_merge.matching.objective import choose, distillation, labels_loss, mix, taught_output
from rotation_merge.matching.options import WEIGHTS, AlignConfig
from rotation_merge.matching.pair import check_pair, check_shapes, open_pair
from rotation_merge.matching.training import Training, kept_in, train
from rotation_merge.model.fingerprint import checksum
from rotation_merge.model.labels import in_order
from rotation_merge.model.open import ModelLike, check_names, open_model
from rotation_merge.model.run_keys import mark_of
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Samples, data_in_memory, listed, read_samples
from rotation_merge.run.functions import Batch, architecture_of, device_of, inputs_for, module_of, unlabelled
from rotation_merge.run.sample_kinds import SAMPLES, SOURCES

LOG = logging.getLogger(__name__)

CONCENTRATION = 8.0
"""Of the Dirichlet distribution that coefficients of three or more models are drawn from."""

LEAST_GAIN = 1e-6
"""A held-out loss lower by less than this (nats) is no better."""

LARGEST_ANSWERS = 1 << 30
"""Bytes of the parents' outputs that are kept; others are computed again."""

WITHOUT_EFFECT = ("minutes", "state", "checkpointing")
"""Options that do not change where a fit goes."""

POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Points of the path from the anchor to the donors that a fit is judged at."""

WIDE = (torch.float32, torch.float64)

WIDEST = AlignConfig(heads="permutation", residual="largest")
"""The largest groups a model admits."""

Watch = Callable[[int, int, dict[str, float]], None]
"""Told about every step: steps done, steps in all, and the figures known now."""


@dataclass(frozen=True)
class FitResult:
    """The result of a fit: alignments, report and the matched start.

    One alignment for each donor, with the space names of `architecture`.
    """

    architecture: Any = field(repr=False)
    alignments: list[Alignment]
    report: FitReport
    match: AlignConfig

    def write(
        self, anchor: str, donors: Mapping[str, str], untie: bool = False, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Write one alignment file for each donor, under the checkpoint's names of spaces.

        Args:
            anchor: name or path of the anchor's checkpoint.
            donors: the donor's checkpoint for each file, in the order of `alignments`.
            untie: whether the checkpoints' tied heads count as tensors of their own.
            facts: further entries of the files' metadata.
        """
        entries = {**(facts or {}), "learned": self.report.to_dict()}
        stored = self.of_checkpoints([anchor, *donors.values()], untie)
        for file, alignment in zip(donors, stored.alignments, strict=True):
            replace(alignment, metadata={**alignment.metadata, **entries}).write(file)

    def of_checkpoints(self, models: Sequence[ModelLike], untie: bool) -> FitResult:
        """The same for stored models, the anchor first, instead of the modules that were fitted; with reports."""
        alignments, architecture = [], self.architecture
        for donor, alignment in zip(models[1:], self.alignments, strict=True):
            pair = open_pair(models[0], donor, self.match, untie)
            architecture = pair.architecture
            transforms = renamed(alignment.transforms, self.architecture, architecture)
            alignments.append(with_basis(pair, reported(pair, replace(alignment, transforms=transforms))))
        return replace(self, architecture=architecture, alignments=alignments)


def fit(
    anchor: ModelLike,
    donors: ModelLike | Sequence[ModelLike],
    batches: Samples,
    match: AlignConfig | None = None,
    options: FitConfig | None = None,
    watch: Watch | None = None,
    label: str = "samples",
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
        watch: told about every step.
        label: what messages call the samples.

    Returns:
        Alignments that are never worse on the held-out batches than where the fit started.

    Raises:
        RotationMergeError: models that do not fit together, groups that are not admitted, data without use.
    """
    match, options = AlignConfig.or_default(match or WIDEST), FitConfig.or_default(options)
    models = [anchor, *_as_list(donors)]
    if len(models) < 2:
        raise RecipeError("no donors are given", remedy="give one model or more to align to the anchor")
    shares = options.coefficients
    if shares is not None and len(shares) != len(models):
        problem = f"{len(shares)} 'coefficients' for {len(models)} models"
        raise RecipeError(problem, remedy="give one share for each model, the anchor first")
    views = [open_model(model, f"donor {number}" if number else "anchor") for number, model in enumerate(models)]
    modules = [
        model if isinstance(model, nn.Module) else module_of(view) for model, view in zip(models, views, strict=True)
    ]
    first, *others = (open_model(module, view.name) for module, view in zip(modules, views, strict=True))
    for other in others:
        check_names(first, other)
        check_shapes(first, other, remedy="bring the models to one vocabulary and one size first")
    samples = _samples(batches, views[0], modules)
    with seeded(options.seed):
        result = _Fit(modules, samples, match, options, watch or (lambda *_: None), label).run()
    if all(module is model for module, model in zip(modules, models, strict=True)):
        return result
    return result.of_checkpoints(views, any(alignment.known_basis.untie for alignment in result.alignments))


def _as_list(donors: Any) -> list[ModelLike]:
    """The donors; a pair of a state dict and its config is one."""
    is_state = isinstance(donors, tuple) and len(donors) == 2 and isinstance(donors[0], Mapping)
    if isinstance(donors, list | tuple) and not (is_state and not isinstance(donors[0], View)):
        return list(donors)
    return [donors]


def _samples(batches: Samples, anchor: View, modules: Sequence[nn.Module]) -> list[Batch]:
    """Batches that all models can run on.

    Raises:
        RotationMergeError: they cannot, or there are too few.
    """
    if isinstance(batches, str | os.PathLike):
        limit = SAMPLES if str(batches) in SOURCES else None
        samples = read_samples(anchor, batches, limit, module=modules[0]).batches
    else:
        batches = listed(batches)
        for module in modules:
            data_in_memory(batches, module)
        samples = [dict(batch) for batch in batches]
    if len(samples) < 2:
        raise RecipeError("at least two batches are needed", remedy="give more data, or smaller batches")
    return samples


class _Fit:
    """One fit in progress.

    Attributes:
        models: the parents, the anchor first.
        held_out, training: numbers of batches.
        model: a module that computes the model of `mixture`.
    """

    def __init__(
        self,
        models: list[nn.Module],
        batches: list[Batch],
        match: AlignConfig,
        options: FitConfig,
        watch: Watch,
        label: str,
    ) -> None:
        self.models, self.options, self.watch, self.label = [m.eval() for m in models], options, watch, label
        self.device = device_of(models[0])
        self.architecture = architecture_of(models[0], untie=True)
        self.views = [open_model(model, type(model).__name__, untie=True) for model in models]
        pairs = [check_pair(self.views[0], donor, match, untie=True) for donor in self.views[1:]]
        self.match, self.folded, self.rows = pairs[-1].options, pairs[-1].folded, [pair.rows for pair in pairs]
        self.states = [dict(model.state_dict()) for model in models]
        for state, rows in zip(self.states[1:], self.rows, strict=True):
            state.update({name: in_order(state[name], order) for name, order in rows.items()})
        size = 4 * sum(parameter.numel() for parameter in models[0].parameters())
        keeps = size <= LARGEST_KEPT and not options.checkpointing
        self.mixture = Mixture(self.architecture, self.states, self.folded, self.device, keeps)
        self.model = mixed_model(models[0], self.mixture, options.checkpointing)
        self.batches: list[Batch] = [{k: v.to(self.device) for k, v in batch.items()} for batch in batches]
        count = max(1, round(len(batches) * options.held_out))
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(options.seed)).tolist()
        self.held_out, self.training = order[:count], order[count:]
        self.objective = choose(options.objective, self.batches[0])
        self.generator = torch.Generator().manual_seed(options.seed + 1)
        self._answers: dict[int, list[Tensor]] = {}
        self._free = LARGEST_ANSWERS

    # --- samples and losses ------------------------------------------------------------------------------------

    def loss(self, batch: Batch, answers: list[Tensor] | None, coefficients: Tensor) -> Tensor:
        """Loss of the chosen model on one batch: from its labels, or from its parents' answers."""
        with self._precision():
            outputs = self.model(**batch)
            if answers is None:
                return labels_loss(outputs)
            return distillation(outputs, answers, coefficients, batch.get("attention_mask"))

    @torch.no_grad()
    def answers(self, batch: Batch) -> list[Tensor]:
        """The parents' answers to a batch, computed in float32 at least."""
        return [taught_output(self._outputs_of(number, batch)).to(self.device) for number in range(len(self.models))]

    def _outputs_of(self, number: int, batch: Batch) -> Any:
        """A parent's outputs: of the model itself, unless it is stored in less or its classes have another order."""
        model = self.models[number]
        if all(p.dtype in WIDE for p in model.parameters()) and not (number and self.rows[number - 1]):
            return model(**inputs_for(model, batch))
        with self.mixture.at([{} for _ in self.states[1:]], torch.eye(len(self.models))[number]):
            return self.model(**batch)

    def batch_with_answers(self, number: int) -> tuple[Batch, list[Tensor] | None]:
        """A batch, with the parents' answers unless its labels count."""
        if self.objective == "labels":
            return self.batches[number], None
        batch = unlabelled(self.batches[number])
        if number in self._answers:
            return batch, self._answers[number]
        answers = self.answers(batch)
        size = sum(answer.nbytes for answer in answers)
        if size <= self._free:
            self._answers[number] = answers
            self._free -= size
        return batch, answers

    def next_batch(self) -> tuple[Batch, list[Tensor] | None]:
        """Draw a training batch, or a mix of two with the parents' answers."""
        number = self._pick()
        batch = unlabelled(self.batches[number])
        mixable = all(tensor.is_floating_point() for tensor in batch.values())
        if not mixable or float(torch.rand((), generator=self.generator)) >= self.options.mixing:
            return self.batch_with_answers(number)
        mixed = mix(batch, unlabelled(self.batches[self._pick()]), self.generator)
        return mixed, self.answers(mixed)

    def _pick(self) -> int:
        return self.training[int(torch.randint(len(self.training), (), generator=self.generator))]

    def _precision(self) -> torch.autocast:
        half = self.options.half and self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    @torch.no_grad()
    def score(self, transforms: list[Transforms]) -> tuple[float, float]:
        """Held-out loss inside the path (mean), and the barrier: highest loss above the straight line."""
        samples = [self.batch_with_answers(number) for number in self.held_out]
        losses = []
        for point in POINTS:
            coefficients = along(point, len(self.models)).to(self.device)
            with self.mixture.at(transforms, coefficients):
                values = [float(self.loss(*sample, coefficients)) for sample in samples]
            losses.append(sum(values) / len(values))
        line = [losses[0] + point * (losses[-1] - losses[0]) for point in POINTS]
        barrier = max(value - straight for value, straight in zip(losses[1:-1], line[1:-1], strict=True))
        return (sum(losses[1:-1]) / 3 if len(self.models) == 2 else losses[2]), barrier

    def draw(self) -> Tensor:
        """Draw the coefficients of one step, mostly near the middle."""
        if self.options.coefficients is not None:
            return torch.tensor(self.options.coefficients, device=self.device)
        if len(self.models) == 2:
            first, second = torch.rand(2, generator=self.generator).tolist()
            share = 0.5 + 0.9 * (first - 0.5) * second
            return torch.tensor([1 - share, share], device=self.device)
        shape = torch.full((len(self.models),), CONCENTRATION)
        gamma = torch._standard_gamma(shape, generator=self.generator)
        return (gamma / gamma.sum()).to(self.device)

    # --- the fit -----------------------------------------------------------------------------------------------

    def starts(self) -> dict[str, list[Transforms]]:
        """Return the starting points of the fit: all donors unmoved, or as matching moves them."""
        starts: dict[str, list[Transforms]] = {}
        if self.options.start != "matched":
            groups = space_groups(self.architecture, self.match)
            starts["identity"] = [{name: group.identity() for name, group in groups.items()} for _ in self.states[1:]]
        if self.options.start != "identity":
            anchor, *donors = (as_tensors(state).on(self.device) for state in self.states)
            starts["matched"] = [
                self._matcher(number)(self.architecture, anchor, donor, self.match, None).transforms
                for number, donor in enumerate(donors, start=1)
            ]
        return starts

    def _matcher(self, number: int) -> Match:
        """Return the function that matches a donor: on weights, or also on the training samples."""
        if self.options.match_on == WEIGHTS:
            return match_model
        samples = [self.batches[i] for i in self.training]
        anchor, donor = (self._runnable(self.models[i]) for i in (0, number))
        return activation_matcher(self.options.match_on, anchor, donor, samples, self.label)

    def _runnable(self, model: nn.Module) -> nn.Module:
        """A model in float32 at least, on the samples' device; a copy if it has to change."""
        if all(p.dtype in WIDE and p.device == self.device for p in model.parameters()):
            return model
        copy_of_model = copy.deepcopy(model).to(self.device)
        for parameter in copy_of_model.parameters():
            if parameter.dtype not in WIDE:
                parameter.data = parameter.data.float()
        return copy_of_model

    def run(self) -> FitResult:
        began = time.perf_counter()
        starts = self.starts()
        scores = {name: self.score(transforms) for name, transforms in starts.items()}
        plain = scores.get("identity") or self.score([{} for _ in self.models[1:]])
        name = min(scores, key=lambda start: scores[start][0])
        learned = nn.ModuleList(
            LearnedTransforms(self.architecture, transforms, bool(self.match.scaling), self.options.permutations)
            for transforms in starts[name]
        ).to(self.device)
        loss, barrier = scores[name]
        report = FitReport(name, self.objective, loss, loss, barrier, barrier, plain[0], 0, 0.0)
        self._optimise(learned, report, began)
        report.seconds = time.perf_counter() - began
        final = [cast(LearnedTransforms, module).final_transforms() for module in learned]
        alignments = [
            Alignment(transforms, self.folded, summary={"learned": report.to_dict()}, basis=basis)
            for transforms, basis in zip(final, self._bases(), strict=True)
        ]
        return FitResult(self.architecture, alignments, report, self.match)

    def _bases(self) -> list[Basis]:
        """The facts on every donor and the anchor for its alignment."""
        untie = bool(self.folded) and any(info.tied for info in self.architecture.tensors())
        names = ["anchor", *(f"donor {number}" for number in range(1, len(self.models)))]
        anchor, *donors = (open_model(*pair, untie=untie) for pair in zip(self.models, names, strict=True))
        return [check_pair(anchor, donor, self.match, untie=untie).basis(self.folded) for donor in donors]

    def _optimise(self, learned: nn.ModuleList, report: FitReport, began: float) -> None:
        """Take the steps, and leave the parameters with the lowest held-out loss."""
        if next(learned.parameters(), None) is None:
            problem = "the groups chosen have nothing to learn (signs and permutations only)"
            remedy = "allow 'attention: rotation', 'scaling' or 'residual: rotation', or learn permutations"
            raise RecipeError(problem, remedy=remedy)
        options, steps = self.options, self.options.steps
        optimiser = torch.optim.Adam(learned.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
        report.history = [(0, 0.0, report.before, report.barrier_before)]
        step, look = partial(self._step, learned, optimiser), partial(self._look, learned, report)
        run = Training(
            learned,
            optimiser,
            schedule,
            self.generator,
            report,
            step,
            look,
            steps,
            LOOKS,
            began,
            options.patience,
            options.minutes,
        )

        def watch(done: int, loss: float) -> None:
            self.watch(done, steps, {"loss": loss, "held out": report.after, "barrier": report.barrier_after})

        with kept_in(options.state, self._mark) as ledger:
            train(run, watch, ledger)

    def _mark(self) -> str:
        """A stable key of the fit: models, data, and every option that has an effect."""
        chosen = {name: value for name, value in asdict(self.options).items() if name not in WITHOUT_EFFECT}
        models = [(type(view.module).__name__, view.fingerprint) for view in self.views]
        batches = [{name: checksum(tensor) for name, tensor in batch.items()} for batch in self.batches]
        return mark_of([], fitted=models, batches=batches, match=asdict(self.match), options=chosen)

    def _step(self, learned: nn.ModuleList, optimiser: torch.optim.Optimizer) -> float:
        """Run one step and return the loss before it.

        Nothing else may survive the step: a remaining graph would fragment memory for the next one.
        """
        optimiser.zero_grad()
        coefficients, sample = self.draw(), self.next_batch()
        with self.mixture.at([module() for module in learned], coefficients):
            loss = self.loss(*sample, coefficients)
            if loss.requires_grad:
                loss.backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimiser.step()
        return float(loss.detach())

    @torch.no_grad()
    def _look(self, learned: nn.ModuleList, report: FitReport, step: int, seconds: float) -> bool:
        """Score the learned transforms; whether they have the lowest held-out loss so far."""
        value, barrier = self.score([module() for module in learned])
        report.history.append((step, seconds, value, barrier))
        LOG.info("step %d: held-out loss %.4f (so far %.4f), barrier %.4f", step, value, report.after, barrier)
        if value > report.after - LEAST_GAIN:
            return False
        report.after, report.barrier_after, report.best_step = value, barrier, step
        return True


def along(point: float, models: int) -> Tensor:
    """Coefficients at a point of the path from the anchor (0) over the mean of all models to the donors (1)."""
    even = torch.full((models,), 1.0 / models)
    ends = torch.zeros(models)
    if models == 2:
        return torch.tensor([1 - point, point])
    if point <= 0.5:
        ends[0] = 1.0
        return ends + 2 * point * (even - ends)
    ends[1:] = 1.0 / (models - 1)
    return even + (2 * point - 1) * (ends - even)
