"""Learns an alignment by gradient descent on the loss of models between the parents.

Generalized Linear Mode Connectivity for Transformers (Theus and others, 2025) learns permutations and a residual map in
this way; here every space of any supported architecture is learned, inside its group, and the output is an alignment
(`matching/alignment.py`) that recipes apply.

Every element is a fixed start times a learned element that begins at the identity (`GroupElement.tangent`): ``exp(A)``
with A skew-symmetric for orthogonal maps (in the complement of the all-ones vector for LayerNorm streams), an added
angle for RoPE pairs, ``exp(s)`` for positive scales. Orders of heads and experts, and signs, do not change.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Space
from rotation_merge.errors import RecipeError
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.alignment import Alignment, Basis, Transforms
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.matching.engine import (
    Batch,
    Path,
    checkpointed,
    lookalike,
    renamed,
    same_names,
    untie_heads,
)
from rotation_merge.matching.fit_processes import ProcessGroup
from rotation_merge.matching.fit_records import LOOKS, FitConfig, FitReport
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.objective import (
    ParentOutputs,
    attention_mask,
    choose,
    distillation,
    labels_loss,
    loss_weight,
    mix,
)
from rotation_merge.matching.open_pair import open_pair, write_alignment
from rotation_merge.matching.options import WEIGHTS, AlignConfig
from rotation_merge.matching.resume import TrainingState, fit_mark
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.run.functions import architecture_of, device_of, inputs_for, take_rows, unlabelled
from rotation_merge.symmetry import GroupElement, SpaceTransform
from rotation_merge.symmetry.admitted import neurons
from rotation_merge.symmetry.tangent import Freedom


class LearnedElement(nn.Module):
    """One batch of group elements: `start` moved along its group by the module's parameters."""

    def __init__(self, start: GroupElement, freedom: Freedom) -> None:
        super().__init__()
        self.start, self.freedom = start, freedom
        for name, step in start.tangent(freedom).items():
            self.register_parameter(name, nn.Parameter(step))

    def forward(self, exact: bool = False) -> GroupElement:
        """The current element; with `exact` in float64 and projected onto the group."""
        steps = dict(self.named_parameters())
        if not steps:
            return self.start
        return self.start.to(next(iter(steps.values())).device).along(steps, self.freedom, exact)


class LearnedTransforms(nn.Module):
    """Trainable transforms of all spaces of one donor."""

    def __init__(
        self,
        architecture: Architecture,
        start: Mapping[str, SpaceTransform],
        scaling: bool = True,
        permutations: bool = False,
    ) -> None:
        super().__init__()
        self.start = dict(start)
        spaces: dict[str, Space] = dict(architecture.streams)
        spaces |= {s.name: s for block in architecture.blocks for s in block.spaces.values()}
        self.elements = nn.ModuleDict()
        for name, transform in self.start.items():
            if spaces[name].span is not None:
                continue  # stays as it was found, for all its layers alike
            freedom = _freedom(architecture, spaces[name], scaling, permutations)
            for part, element in transform.elements().items():
                self.elements[_key(name, part)] = LearnedElement(element, freedom)

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name; differentiable in the parameters unless `exact`."""
        return {name: self._moved(name, transform, exact) for name, transform in self.start.items()}

    def _moved(self, name: str, start: SpaceTransform, exact: bool) -> SpaceTransform:
        keys = {part: _key(name, part) for part in start.elements()}
        learned = {part: self.elements[key](exact) for part, key in keys.items() if key in self.elements}
        return start.with_elements({**start.elements(), **learned})

    @torch.no_grad()
    def final_transforms(self) -> Transforms:
        """The transforms for storage: float64, on the CPU, exactly inside their groups."""
        was = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        result = self.forward(exact=True)
        self.to(was)
        return {name: transform.to(torch.device("cpu")) for name, transform in result.items()}


def _freedom(architecture: Architecture, space: Space, scaling: bool, permutations: bool) -> Freedom:
    """Return the free parameters of a space's elements."""
    if space.kind == "stream":
        return Freedom(scales=False, fixes_ones=architecture.layer_normed(space.name))
    if space.kind in ("attention", "mixer", "convolution"):
        return Freedom(scales=scaling)
    if space.kind == "latent":
        return Freedom(scales=False)
    return Freedom(scales=scaling and neurons(space).degree > 0, permutations=permutations)


def _key(space: str, part: str) -> str:
    """Module names must not hold dots."""
    return f"{space}|{part}".replace(".", "/")


def identities(transforms: Mapping[str, SpaceTransform]) -> Transforms:
    """Identity elements of the same groups, as the start for models that share their coordinates."""
    return {name: transform.still() for name, transform in transforms.items()}


LOG = logging.getLogger(__name__)

CONCENTRATION = 8.0
"""Of the Dirichlet distribution that coefficients of three or more models are drawn from."""

LEAST_GAIN = 1e-6
"""A held-out loss lower by less than this (nats) is no better."""

ActivationMatcher = Callable[[str, nn.Module, nn.Module, Sequence[Batch]], Match]
"""Makes what matches anchor and donor on samples: on activations, or both."""

WIDE = (torch.float32, torch.float64)

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
        for (file, donor), alignment in zip(donors.items(), self.alignments, strict=True):
            pair = open_pair(anchor, donor, self.match, untie)
            transforms = renamed(alignment.transforms, self.architecture, pair.architecture)
            write_alignment(pair, replace(alignment, transforms=transforms), file, self.match, facts=entries)


WIDEST = AlignConfig(heads="permutation", residual="largest")
"""The largest groups a model admits."""


def fit(
    anchor: nn.Module,
    donors: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    match: AlignConfig | None = None,
    options: FitConfig | None = None,
    watch: Watch | None = None,
    matcher: ActivationMatcher | None = None,
) -> FitResult:
    """Learn the transforms that lower the loss of models between an anchor and its donors.

    Args:
        anchor: a transformers model; put into evaluation mode, its weights are not modified. What is between the models
            is computed on its device.
        donors: one or more of the same class and sizes; likewise, on any devices. More than one are learned jointly.
        batches: inputs by the names the model's forward takes, with `labels` where there are any.
        match: groups to use and to start from; by default every local group and the largest residual one.
        options: how to learn.
        watch: told about every step.
        matcher: makes what matches on samples, where `options.match_on` says so.

    Returns:
        Alignments that are never worse on the held-out batches than where the fit started.

    Raises:
        RotationMergeError: models that do not fit together, groups that are not admitted, data without use.
    """
    options = options or FitConfig()
    parents = [anchor, *([donors] if isinstance(donors, nn.Module) else donors)]
    for donor in parents[1:]:
        same_names(anchor, donor)
    if len(batches) < 2:
        raise RecipeError("at least two batches are needed", remedy="give more data, or smaller batches")
    with seeded(options.seed):
        return _Fit(parents, list(batches), match or WIDEST, options, watch or (lambda *_: None), matcher).run()


class _Fit:
    """One fit in progress."""

    def __init__(
        self,
        parents: list[nn.Module],
        batches: list[Batch],
        match: AlignConfig,
        options: FitConfig,
        watch: Watch,
        matcher: ActivationMatcher | None,
    ) -> None:
        if matcher is None and options.match_on != WEIGHTS:
            problem = f"a start matched on {options.match_on} needs a matcher on samples"
            raise RecipeError(problem, remedy="start on weights, or use 'rotation-merge fit'")
        self.options, self.match, self.watch, self.matcher = options, match, watch, matcher
        self.device = device_of(parents[0])
        self.given = parents
        self.parents = [parent.eval() for parent in parents]
        self.architecture = architecture_of(self.parents[0], untie=True)
        members = [open_model(parent, type(parent).__name__, untie=True) for parent in self.parents]
        pairs = [check_pair(members[0], donor, match, untie=True) for donor in members[1:]]
        self.match, self.folded = pairs[-1].options, pairs[-1].folded
        self.rows = [checked.rows for checked in pairs]
        for number, checked in enumerate(pairs, start=1):
            if checked.rows:
                self.parents[number] = copy.deepcopy(self.parents[number])
                take_rows(self.parents[number], checked.rows)
        if self.folded and any(info.tied for info in self.architecture.tensors()):
            self.parents = [lookalike(parent) for parent in self.parents]
            for parent in self.parents:
                untie_heads(parent, self.architecture)
        states = [dict(p.state_dict()) for p in self.parents]
        model = self.parents[0]
        if options.checkpointing and getattr(model, "supports_gradient_checkpointing", False):
            model = checkpointed(model)
        self.path = Path.between(model, self.architecture, states[0], states[1:], self.folded, self.device)
        self.states = states
        held_out = max(1, round(len(batches) * options.held_out))
        shuffled = torch.randperm(len(batches), generator=torch.Generator().manual_seed(options.seed)).tolist()
        self.batches = [{k: v.to(self.device) for k, v in b.items()} for b in batches]
        self.held_out, self.training = shuffled[:held_out], shuffled[held_out:]
        self.objective = choose(options.objective, self.batches[0])
        self.together = ProcessGroup()
        self.teachers = ParentOutputs([self._answers_of(number) for number in range(len(self.parents))], self.device)
        self.generator = torch.Generator().manual_seed(options.seed + 1)

    # --- losses ------------------------------------------------------------------------------------------------

    def loss(
        self, weights: dict[str, Tensor], batch: Batch, parent_outputs: list[Tensor] | None, coefficients: Tensor
    ) -> Tensor:
        """Loss of one model on one batch: from its labels or from its parents' outputs.

        With several processes each returns its share of the loss: their sum is the loss.
        """
        mass = torch.zeros((), device=self.device)
        value = mass
        if next(iter(batch.values())).shape[0]:
            with self._precision():
                outputs = self.path.outputs(weights, batch)
                if parent_outputs is None:
                    value = labels_loss(outputs)
                else:
                    value = distillation(outputs, parent_outputs, coefficients, attention_mask(batch))
            if self.together.count == 1:
                return value
            mass = loss_weight(self.parents[0], outputs, batch, parent_outputs, coefficients).to(mass)
        total = self.together.total(mass)
        return value * mass / total if float(mass) else mass

    def batch_with_answers(self, index: int) -> tuple[Batch, list[Tensor] | None]:
        """A batch, with the parents' answers unless its labels count."""
        batch = self.together.part(self.batches[index])
        return (batch, None) if self.objective == "labels" else (unlabelled(batch), self.teachers(index, batch))

    def _answers_of(self, number: int) -> Callable[..., Any]:
        """A parent that computes in float32 at least."""
        parent = self.parents[number]
        if all(p.dtype in WIDE for p in parent.parameters()):
            return lambda **batch: parent(**inputs_for(parent, batch))
        share = torch.zeros(len(self.parents), device=self.device)
        share[number] = 1.0
        alone: list[Transforms] = [{} for _ in self.parents[1:]]
        return lambda **batch: self.path.outputs(self.path.weights(alone, share), batch)

    def next_batch(self) -> tuple[Batch, list[Tensor] | None]:
        """Draw a training batch, or a mix of two with the parents' answers.

        Call it before the path's model gets other weights, because that model is one of the parents.
        """
        index = self._pick()
        batch = unlabelled(self.batches[index])
        mixable = all(x.is_floating_point() for x in batch.values())
        if not mixable or float(torch.rand((), generator=self.generator)) >= self.options.mixing:
            return self.batch_with_answers(index)
        mixed = mix(batch, unlabelled(self.batches[self._pick()]), self.generator)
        mixed = self.together.part(mixed)
        return mixed, self.teachers.answer(mixed)

    def _pick(self) -> int:
        return self.training[int(torch.randint(len(self.training), (), generator=self.generator))]

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.options.half and self.device.type == "cuda"
        )

    @torch.no_grad()
    def score(self, transforms: list[Transforms]) -> tuple[float, float]:
        """Held-out loss inside the path (mean), and the barrier: highest loss above the straight line."""
        losses = {}
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            coefficients = self._along(share)
            weights = self.path.weights(transforms, coefficients)
            values = [self.loss(weights, *self.batch_with_answers(index), coefficients) for index in self.held_out]
            losses[share] = sum(map(float, map(self.together.total, values))) / len(values)
        inner = [losses[s] for s in (0.25, 0.5, 0.75)]
        line = [losses[0.0] + s * (losses[1.0] - losses[0.0]) for s in (0.25, 0.5, 0.75)]
        barrier = max(value - straight for value, straight in zip(inner, line, strict=True))
        if len(self.parents) > 2:
            return losses[0.5], barrier
        return sum(inner) / len(inner), barrier

    def _along(self, share: float) -> Tensor:
        """Coefficients at a point of the path: anchor (0), uniform mean, donors (1)."""
        count = len(self.parents)
        if count == 2:
            return torch.tensor([1 - share, share], device=self.device)
        even = torch.full((count,), 1.0 / count, device=self.device)
        ends = torch.zeros(count, device=self.device)
        if share <= 0.5:
            ends[0] = 1.0
            return ends + 2 * share * (even - ends)
        ends[1:] = 1.0 / (count - 1)
        return even + (2 * share - 1) * (ends - even)

    def draw(self) -> Tensor:
        """Draw the coefficients of one step between two models, mostly near the middle."""
        if self.options.coefficients is not None:
            return torch.tensor(self.options.coefficients, device=self.device)
        if len(self.parents) == 2:
            first, second = torch.rand(2, generator=self.generator).tolist()
            share = 0.5 + 0.9 * (first - 0.5) * second
            return torch.tensor([1 - share, share], device=self.device)
        shape = torch.full((len(self.parents),), CONCENTRATION)
        gamma = torch._standard_gamma(shape, generator=self.generator)
        return (gamma / gamma.sum()).to(self.device)

    # --- the fit -----------------------------------------------------------------------------------------------

    def starts(self) -> dict[str, list[Transforms]]:
        """Return the starting points of the fit: all donors unmoved, or as weight matching moves them."""
        starts: dict[str, list[Transforms]] = {}
        if self.options.start != "matched":
            gauge = random_gauge(self.architecture, self.match, torch.Generator().manual_seed(0))
            starts["identity"] = [identities(gauge) for _ in self.states[1:]]
        if self.options.start != "identity":
            anchor, *moved = (as_tensors(state).to(self.device) for state in self.states)
            starts["matched"] = [
                self._matcher(donor)(self.architecture, anchor, state, self.match, None).transforms
                for donor, state in zip(self.parents[1:], moved, strict=True)
            ]
        return starts

    def _matcher(self, donor: nn.Module) -> Match:
        """Return the function that matches a donor: on weights, or also on the training samples."""
        if self.matcher is None or self.options.match_on == WEIGHTS:
            return match_model
        samples = [self.batches[i] for i in self.training]
        return self.matcher(self.options.match_on, self._runnable(self.parents[0]), self._runnable(donor), samples)

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
        starts = self.together.agreed(self.starts)
        scores = {name: self.score(transforms) for name, transforms in starts.items()}
        plain = scores.get("identity") or self.score([{} for _ in self.parents[1:]])
        name = min(scores, key=lambda n: scores[n][0])
        learned = nn.ModuleList(
            LearnedTransforms(self.architecture, t, bool(self.match.scaling), self.options.permutations)
            for t in starts[name]
        ).to(self.device)
        report = FitReport(name, self.objective, *(scores[name][0],) * 2, *(scores[name][1],) * 2, plain[0], 0, 0.0)
        best = self._optimise(learned, report, began)
        learned.load_state_dict(best)
        report.seconds = time.perf_counter() - began
        alignments = [
            Alignment(
                cast(LearnedTransforms, module).final_transforms(), self.folded, summary={"learned": report.to_dict()}
            )
            for module in learned
        ]
        known = [replace(alignment, basis=self._basis(number)) for number, alignment in enumerate(alignments, start=1)]
        return FitResult(self.architecture, known, report, self.match)

    def _basis(self, number: int) -> Basis:
        """The facts on one donor and the anchor for the alignment."""
        untie = bool(self.folded) and any(info.tied for info in self.architecture.tensors())
        anchor, donor = (
            open_model(model, name, untie=untie)
            for model, name in ((self.given[0], "anchor"), (self.given[number], f"donor {number}"))
        )
        return Basis.of(anchor, donor, self.folded, self.rows[number - 1])

    def _optimise(self, learned: nn.ModuleList, report: FitReport, began: float) -> dict[str, Tensor]:
        if next(learned.parameters(), None) is None:
            raise RecipeError(
                "the groups chosen have nothing to learn (signs and permutations only)",
                remedy="allow 'attention: rotation', 'scaling' or 'residual: rotation', or learn permutations",
            )
        optimiser = torch.optim.Adam(learned.parameters(), lr=self.options.learning_rate, betas=(0.9, 0.95))
        steps = self.options.steps
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
        mark = fit_mark(self.parents, self.batches, self.match, self.options) if self.options.state else ""
        state = TrainingState(self.options.state, learned, optimiser, schedule, self.generator, mark, self.together)
        first, best = state.restore(report)
        every = max(1, steps // LOOKS)
        report.history = report.history or [(0, 0.0, report.before, report.barrier_before)]
        for step in range(first, steps):
            if step - report.best_step >= self.options.patience * every:
                break
            loss = self._step(learned, optimiser)
            schedule.step()
            seconds = self.together.agreed(lambda: time.perf_counter() - began)
            late = self.options.minutes and seconds > 60 * self.options.minutes
            if (step + 1) % every == 0 or step + 1 == steps or late:
                best = self._keep_best(learned, report, best, step + 1, seconds)
                state.save(step + 1, best, report)
            figures = {
                "loss": float(self.together.total(loss)),
                "held out": report.after,
                "barrier": report.barrier_after,
            }
            self.watch(step + 1, steps, figures)
            if late:
                break
        state.remove()
        return best

    def _step(self, learned: nn.ModuleList, optimiser: torch.optim.Optimizer) -> Tensor:
        """Run one step and return the loss before it.

        Nothing else may survive the step: a remaining graph would fragment memory for the next one.
        """
        optimiser.zero_grad()
        coefficients, batch_and_answers = self.draw(), self.next_batch()
        weights = self.path.weights([module() for module in learned], coefficients)
        with self.path.holding(weights):
            loss = self.loss(weights, *batch_and_answers, coefficients)
            if loss.requires_grad:
                loss.backward()
        self.together.gradients(learned.parameters())
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimiser.step()
        return loss.detach()

    def _keep_best(
        self, learned: nn.ModuleList, report: FitReport, best: dict[str, Tensor], step: int, seconds: float
    ) -> dict[str, Tensor]:
        """Keep the state if it has the lowest held-out loss so far."""
        with torch.no_grad():
            value, barrier = self.score([module() for module in learned])
        report.history.append((step, seconds, value, barrier))
        LOG.info("step %d: held-out loss %.4f (so far %.4f), barrier %.4f", step, value, report.after, barrier)
        if value > report.after - LEAST_GAIN:
            return best
        report.after, report.barrier_after, report.best_step = value, barrier, step
        return {name: tensor.detach().clone() for name, tensor in learned.state_dict().items()}
