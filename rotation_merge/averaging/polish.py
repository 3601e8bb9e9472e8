"""Polish: a few steps of distillation on a merge, with each teacher's outputs on its own samples.

Each teacher answers its samples and is let go, then the merge learns from the answers. A held-out part of the samples
chooses the learning rate and the step, and tells whether anything was gained. Distillation after Hinton, Vinyals and
Dean (2015).
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from rotation_merge.architecture.sentence import KEY
from rotation_merge.averaging.config import PolishConfig
from rotation_merge.errors import CheckpointError, DataError, RecipeError, RotationMergeError
from rotation_merge.files import Store, TemporaryFolder
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.objective import Answered, divergence, write_answers
from rotation_merge.matching.training import Training, kept_in, split_at_random, trained
from rotation_merge.model.adapters import WEIGHTS, Adapter
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.contents import ADAPTER_CONFIG, read_json
from rotation_merge.model.forms import restructured
from rotation_merge.model.heads import head_names, heads_of_teachers
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View, as_stored
from rotation_merge.model.vocabulary import same_tokens
from rotation_merge.run.batches import Batch, data_hash, device_of, inputs_for, unpadded
from rotation_merge.run.data import Samples, for_each, listed, read_samples
from rotation_merge.run.functions import architecture_of, check_answers, fused_attention, in_memory
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress

RATES = (5e-3, 2e-3, 1e-3, 5e-4, 3e-4, 1e-4, 3e-5, 1e-5)
"""Learning rates, tried from the largest on until a lower one gains less. Pretrained models need low ones."""

OF_WEIGHTS, OF_FACTORS = 1e-3, 5e-3
"""The largest rate for all weights and for a LoRA that begins along the gradient, and for one that holds something."""

GRADIENT_SAMPLES = 8
"""Batches of each teacher that say where a LoRA begins."""

STEP_TOKENS = 2048
"""Tokens of a step, of all teachers together: of short texts, a step sees more batches."""

TRIAL = 0.1
"""Share of the steps after which a learning rate is chosen."""

LEAST_SHARE = 0.5
"""Share of the best learning rate's gain in its trial that a larger one must reach: short trials favour small rates."""

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

TOGETHER = 16
"""Examples in one batch of every teacher, of all teachers together."""

MIXER, PAST = ("A_log", "D"), ("out_proj", "conv1d")
"""Parameters of a state-space mixer, and its maps whose weights kernels read past a LoRA; peft refuses them in some
models."""


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


SplitAnswers = tuple[Answered, Answered]
"""A teacher's samples with its answers: to train on, and held out."""


def share_body(models: Sequence[nn.Module], merge: nn.Module, heads: Collection[str]) -> None:
    """Give models the parameters of a merge that theirs are equal to, but for those of heads, by their names."""
    merged = dict(merge.named_parameters(remove_duplicate=False))
    for model in models:
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            shared = merged.get(name)
            if name not in heads and shared is not None and torch.equal(shared, parameter):
                place, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(place), leaf, shared)


@dataclass
class Polish:
    """Training of models towards their teachers' outputs, in place; the best state on held-out samples is kept.

    Attributes:
        students: the model that learns from each teacher, in evaluation mode: one model, or several of one body.
            Parameters that require gradients are trained.
        samples: of each teacher.
        largest_rate: the first learning rate that is tried.
        batches: of every teacher that a step sees; 0: as many as hold `STEP_TOKENS`, or as there are.
        state: folder for the state of an unfinished run; found there, the run goes on from it. It lies in one that no
            run has of other weights or samples.
        watch: called at every step with a label, the steps done and the total.

    Raises:
        DataError: too few samples to hold some out.
    """

    students: Sequence[nn.Module]
    samples: Sequence[SplitAnswers]
    config: PolishConfig
    largest_rate: float = OF_WEIGHTS
    batches: int = 0
    state: Path | None = None
    watch: Progress = lambda *_: None

    def __post_init__(self) -> None:
        self.model, tokens = nn.ModuleList(self.students), 0.0
        for number, parts in enumerate(self.samples, 1):
            if not all(parts):
                problem = f"{sum(map(len, parts))} batches of samples are too few to hold one out"
                raise DataError(problem, where=f"teacher {number}", remedy="give more of them ('samples')")
            texts = [batch["input_ids"].numel() for part in parts for batch, _ in part if "input_ids" in batch]
            tokens += fmean(texts) if texts else 0.0
        self.training, self.held_out = zip(*self.samples, strict=True)
        at_a_step = round(STEP_TOKENS / tokens) if tokens else 1
        self.batches = self.batches or max(1, min(at_a_step, *map(len, self.training)))

    def run(self) -> PolishReport:
        """Train; with the fast attention that gives each student's usual outputs."""
        with ExitStack() as attention:
            for student, samples in zip(self.students, self.training, strict=True):
                attention.enter_context(fused_attention(student, inputs_for(student, samples[0][0])))
            began, before = time.perf_counter(), self.score()
            check_answers(self.students[0], [torch.tensor(before)])
            report = PolishReport(before, before, history=[(0, 0.0, before)])
            start = copy.deepcopy(trained(self.model))
            training = str(replace(self.config, merge_lora=False))  # which is of writing
            with kept_in(self.state, lambda: training) as ledger:
                report.rate, report.trials = ledger.get(RATE) or self._chosen_rate(start, before)
                ledger.keep(RATE, lambda: (report.rate, report.trials))
                self._train(report, report.rate, self.config.steps, "polishing", LOOKS, ledger)
            if not math.isfinite(report.history[-1][2]):
                problem, remedy = "training gives NaN", "give a lower 'learning_rate', or look at the model's weights"
                raise CheckpointError(problem, remedy=remedy)
            report.seconds = time.perf_counter() - began
            return report

    def _chosen_rate(self, start: dict[str, Tensor], before: float) -> tuple[float, dict[str, float]]:
        """The learning rate that trials choose, each from `start`, which the model then is again; and the trials.

        A trial's value is the held-out divergence after a whole schedule of a tenth of the steps.
        """
        if self.config.learning_rate is not None:
            return self.config.learning_rate, {}
        steps, trials = max(1, round(self.config.steps * TRIAL)), dict[float, float]()
        for rate in (rate for rate in RATES if rate <= self.largest_rate):
            trial = PolishReport(before, before)
            self._train(trial, rate, steps, f"learning rate {rate:g}")
            self.model.load_state_dict(start, strict=False)
            value = trial.history[-1][2]
            trials[rate] = value if math.isfinite(value) else math.inf
            if trials[rate] > min(trials.values()):
                break
        least = min(trials.values())
        enough = least + (1 - LEAST_SHARE) * max(0.0, before - least)
        chosen = next(rate for rate, value in trials.items() if value <= enough)
        return chosen, {f"{rate:g}": value for rate, value in trials.items()}

    def _train(
        self, report: PolishReport, rate: float, steps: int, label: str, looks: int = 1, ledger: Ledger = NOWHERE
    ) -> None:
        """AdamW with a schedule that rises to a rate in a tenth of the steps, then falls to zero."""
        generator = torch.Generator().manual_seed(self.config.seed + 1)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        total = max(steps, 1 + WARM)
        warm = max(0.1, WARM / total)
        schedule = OneCycleLR(optimiser, rate, total_steps=total, pct_start=warm, cycle_momentum=False)

        def step() -> None:
            """Take one step on random batches of each teacher."""
            optimiser.zero_grad()
            for teacher, samples in enumerate(self.training):
                for number in torch.randint(len(samples), (self.batches,), generator=generator).tolist():
                    self._add_gradient(teacher, samples[number])
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()

        training = Training(self.model, optimiser, schedule, generator, report, step, lambda: (self.score(),))
        training.run(steps, looks, lambda done: self.watch(label, done, steps), ledger)

    def _add_gradient(self, teacher: int, sample: tuple[Batch, dict[str, Tensor]]) -> None:
        """Add the gradient of one batch of a teacher."""
        (self._divergence(teacher, sample) / (len(self.students) * self.batches)).backward()

    def _divergence(self, teacher: int, sample: tuple[Batch, dict[str, Tensor]]) -> Tensor:
        """Divergence from a teacher on one of its batches."""
        student, (batch, answer) = self.students[teacher], sample
        target = {name: tensor.to(device_of(student)) for name, tensor in answer.items()}
        return divergence(student(**inputs_for(student, batch)), target)

    def first_gradients(self) -> None:
        """Add up the gradients of the first training batches of every teacher."""
        for teacher, samples in enumerate(self.training):
            for sample in samples[:GRADIENT_SAMPLES]:
                self._add_gradient(teacher, sample)

    @torch.no_grad()
    def score(self) -> float:
        """Divergence on held-out samples, the mean over teachers."""
        parts = enumerate(self.held_out)
        return fmean(fmean(float(self._divergence(k, sample)) for sample in samples) for k, samples in parts)


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


def polished(
    merged: View,
    teachers: Sequence[View],
    samples: Samples,
    config: PolishConfig,
    work: Store,
    *,
    state: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Any:
    """Distil teachers into a merge for a few steps, every sample answered by its own teacher.

    Args:
        merged: where it has heads (`heads_of: each`), each of their teachers trains the body under its own.
        samples: for all teachers, or a list with those of each (`run.data.for_each`).
        work: keeps the teachers' answers; those to the same samples that are there already are used.
        state: folder in it for the state of unfinished training, which continues from there.

    Returns:
        The trained model, its heads with it, or the LoRA that was trained beside it; where nothing was gained, the
        merge as it was. `notes` says which, and `report` is a `PolishReport`.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    heads = heads_of_teachers(merged, teachers)
    _check_models(merged, teachers, bool(config.lora) and any(heads))
    students = [head or merged for head in heads]
    sources = [listed(source) for source in for_each(samples, len(teachers))]
    marks = [_mark(teacher, source) for teacher, source in zip(teachers, sources, strict=True)]
    numbers = config.samples, config.length, config.seed
    work.begin(mark_of([merged, *students, *teachers], marks, samples=[marks, numbers]))
    with seeded(config.seed):
        answered = _answers(students, teachers, sources, config, work, device)
        views = {view.name: view for view in (merged, *students)}
        modules = {name: in_memory(view, trained=True).to(device).requires_grad_(True) for name, view in views.items()}
        if config.lora:
            modules[merged.name] = with_lora(modules[merged.name], config.lora, config.seed)
        learning = [modules[view.name] for view in students]
        if any(heads):
            share_body(learning, modules[merged.name], head_names(merged.architecture))
        draw, watch = torch.Generator().manual_seed(config.seed), progress or (lambda *_: None)
        parts = [split_at_random(answers, draw) for answers in answered]
        polish = Polish(learning, parts, config, state=state, watch=watch)
        if config.lora:
            initialise_along_gradient(modules[merged.name], polish.first_gradients)
        report = polish.run()
    if config.lora and report.gained:
        student = modules[merged.name]
        if not config.merge_lora:
            return replace(_adapter(student, merged.name), notes=(report.verdict(),), report=cast(Any, report))
        modules[merged.name] = student.merge_and_unload()
    result, *headed = (
        _with_weights(view, modules[view.name]) if report.gained else as_stored(view)
        for view in (merged, *filter(None, heads))
    )
    named = {os.path.basename(view.name): view for view in headed}
    return replace(result, heads=named, notes=(report.verdict(),), report=cast(Any, report))


def _check_models(merged: View, teachers: Sequence[View], one_lora_of_heads: bool) -> None:
    """Refuse modules that cannot be trained, one LoRA of several heads, and teachers with other tokens, or none."""
    if not teachers:
        raise RecipeError("no teachers are given", remedy="give the models that were merged")
    if one_lora_of_heads:
        problem = "has a separate head for each teacher, but one LoRA cannot hold them"
        raise RotationMergeError(problem, where=merged.name, remedy="train all weights, without 'lora'")
    if merged.config.get(KEY):
        problem = "is a sentence-transformers folder, whose modules cannot be trained"
        remedy = "leave it out of polish; merge with 'delegate: regmean' for a better average"
        raise RotationMergeError(problem, where=merged.name, remedy=remedy)
    for teacher in teachers if merged.files is not None else ():
        if teacher.files is not None and not same_tokens(merged, teacher):
            problem = f"its tokens are not those of {merged.reference}"
            remedy = "give teachers with the merge's tokenizer"
            raise RotationMergeError(problem, where=str(teacher.reference), remedy=remedy)


def _with_weights(view: View, module: Any) -> View:
    """A model with the weights of a trained module, each in the dtype that it is stored in, by the model's names."""
    weights = as_tensors(module.state_dict())
    if view.architecture.family != "unknown":
        weights = restructured(weights, architecture_of(module), view.architecture)
    weights = weights.only(view).map(lambda name, x: x.to("cpu", view.dtype or view.stored_dtypes[name]))
    trained = replace(view, tensors=view.tensors.replaced(weights), at=None)
    return as_stored(trained.blockwise(lambda *_: None, view.dtype))


def _adapter(student: Any, base: str) -> Adapter:
    """A trained LoRA, as peft writes it."""
    config = student.peft_config["default"]
    config.base_model_name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    config.target_modules = sorted(config.target_modules)
    config.target_parameters = sorted(config.target_parameters or ()) or None
    with TemporaryFolder() as folder:
        student.save_pretrained(folder)
        tensors = load_file(os.path.join(folder, WEIGHTS[0]))
        return Adapter(read_json(os.path.join(folder, ADAPTER_CONFIG)), tensors)


def _mark(model: View, samples: Samples) -> str:
    """What tells samples of a model from others: the name of their source, or a hash of batches in memory."""
    named = isinstance(samples, str | os.PathLike)
    return os.fspath(samples) if named else data_hash(read_samples(model, samples).batches)


def _answers(
    students: Sequence[View],
    teachers: Sequence[View],
    sources: Sequence[Samples],
    config: PolishConfig,
    work: Store,
    device: str,
) -> list[Answered]:
    """The answers of every teacher, in its student's order of classes; existing ones are used."""
    answered, size = [], max(1, min(TOGETHER // len(teachers), config.samples // 4))
    for number, (student, teacher, source) in enumerate(zip(students, teachers, sources, strict=True)):
        part = f"answers {number}"
        if (answers := work.get(part, mapped=True)) is None:
            module = in_memory(with_classes_of(teacher, student)).to(device)
            data = read_samples(teacher, source, config.samples, size, config.length, config.seed + number, module)
            answers = write_answers(module, unpadded(data.batches, data.source), work, part, teacher.name)
            del module
        answered.append(answers)
    return answered
