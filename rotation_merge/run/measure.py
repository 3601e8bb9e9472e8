r"""Measuring a model: activations of its maps on samples, and gradients of its outputs with respect to weights.

The Fisher matrix is the mean of squared gradients of log-probabilities: F = E_x E_{y ~ p(y|x)} (d log p(y|x))^2. Over
the labels of a classifier the inner expectation is taken exactly: the sum over labels c of p_c (d log p_c)^2 is the sum
of squared gradients of sqrt(p_c) log p_c with the root held constant (Matena and Raffel 2022, section 2.2). Over the
vocabulary of a language model one label is drawn at each position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.config import Config, Count, Length, option
from rotation_merge.errors import DataError, StatisticsError
from rotation_merge.run.arrays import one_by_one
from rotation_merge.run.functions import check_answers, device_of, unlabelled
from rotation_merge.run.passes import Progress, StatisticsPass, UnfinishedMeasurement, packed, room, run_passes
from rotation_merge.run.recorder import HookedModel
from rotation_merge.run.sample_kinds import SAMPLES, Statistic
from rotation_merge.run.statistics import Statistics
from rotation_merge.run.sums import Collector, Sums, first_readers, means

Batch = Mapping[str, Tensor]

MOST_DIFFERENCE = 1e-3
"""Of outputs while the maps are watched, relative to their size; more means that they cannot be watched in this way."""


@config_dataclass(frozen=True)
class MeasureConfig(Config):
    """Options of measuring a model."""

    kinds: Annotated[tuple[Statistic, ...], MinLen(1)] = option(("gram",), "what to measure")
    labels: Literal["sampled", "data"] = option(
        "sampled",
        "labels of the gradients: sampled from the model (exact for classifiers), or those of the data",
    )
    seed: int = option(0, "seed of the samples that the model writes and of sampled labels")
    memory: Count | None = option(
        None, "largest number of bytes for the sums. Not given: half of the free memory", command=False
    )
    samples: Count | None = option(
        None, f"largest number of samples. Not given: all of a file, {SAMPLES} of `self` and `synthetic`"
    )
    batch_size: Count = option(16, "examples in a batch")
    length: Length = option(128, "tokens in a window of text")


class ModelMeasurement:
    """A model under measurement."""

    def __init__(self, model: nn.Module, architecture: Architecture, batches: Sequence[Batch], task: str) -> None:
        """Look at one example.

        Args:
            model: in evaluation mode; left as it is.
            architecture: under the names of its state dict.
            batches: without padding.
        """
        self.model, self.architecture, self.batches, self.task = model, architecture, batches, task
        self.tapped = HookedModel.of(model, architecture)
        _expert_by_expert(model)
        self.device = device_of(model)
        first = one_by_one(batches[0])[0]
        probe = Probe()
        with torch.no_grad(), self.tapped.watched(probe):
            plain = self.outputs(first)
        self.axes = probe.axes(self.tapped)
        self.layers_only = False
        for layers_only in (False, True):
            with torch.no_grad(), self.tapped.split(self.axes, layers_only), self.tapped.watched(probe):
                self.split = frozenset(self.axes[name] for name in self.tapped.splits)
                if check_watched(_tensors(plain), _tensors(self.outputs(first)), model, must=layers_only):
                    self.layers_only = layers_only
                    return

    def outputs(self, batch: Batch) -> Any:
        """The model's outputs for a batch, without labels.

        Raises:
            CheckpointError: NaN.
        """
        dtype = next(self.model.parameters()).dtype
        inputs = {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in unlabelled(batch).items()
        }
        result = self.model(**inputs)
        check_answers(self.model, _tensors(result))
        return result

    def passes(self, options: MeasureConfig) -> list[StatisticsPass]:
        """The passes that the options need."""
        return [*self._input_passes(options), *self._fisher_passes(options)]

    def run(self, options: MeasureConfig, state: UnfinishedMeasurement | None, progress: Progress) -> Statistics:
        """Everything that the options ask for, by the module's names; without a state all of it stays in memory."""
        tensors = run_passes(self.passes(options), state, progress)
        uncalled = frozenset(self.tapped.maps) - self.axes.keys()
        buffers = sorted(name for name, _ in self.model.named_buffers())
        return Statistics(tensors, self.axes, self.split, uncalled, {"buffers": buffers})

    def _dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def _input_passes(self, options: MeasureConfig) -> list[StatisticsPass]:
        if "gram" not in options.kinds:
            return []
        sizes: Counter[str] = Counter()
        for name in first_readers(self.axes).values():
            linear = self.tapped.maps[name]
            n = (linear.inputs.size or 0) + 1
            copies = (linear.info.axes[0].size or 1) if linear.stacked else 1
            sizes[linear.block.name] += 8 * copies * n * n
        order = {block.name: sizes[block.name] for block in self.architecture.blocks if sizes[block.name]}
        return [self._input_pass(blocks) for blocks in packed(order, options.memory or room())]

    def _input_pass(self, blocks: frozenset[str]) -> StatisticsPass:
        axes = {name: axis for name, axis in self.axes.items() if self.tapped.maps[name].block.name in blocks}

        def run(step: int, sums: Sums) -> None:
            collector = Collector(self.tapped.maps, axes, sums)
            with torch.no_grad(), self.tapped.split(self.axes, self.layers_only), self.tapped.watched(collector):
                self.outputs(self.batches[step])

        def finish(sums: Sums) -> dict[str, Tensor]:
            return means(sums, self._dtype())

        return StatisticsPass("inputs of the maps", blocks, len(self.batches), run, finish)

    def _fisher_passes(self, options: MeasureConfig) -> list[StatisticsPass]:
        if "fisher" not in options.kinds:
            return []
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        parts = [part for batch in self.batches for part in one_by_one(batch)]
        blocks: dict[str, dict[str, Tensor]] = {}
        for block in self.architecture.blocks:
            names = [name for info in block.tensors for name in info.names if name in parameters]
            blocks[block.name] = {name: parameters[name].requires_grad_() for name in names}
        sizes = {
            name: 8 * sum(p.numel() for p in block_parameters.values())
            for name, block_parameters in blocks.items()
            if block_parameters
        }
        passes = []
        for group in packed(sizes, options.memory or room()):
            block_parameters = {name: p for block in sizes if block in group for name, p in blocks[block].items()}
            passes.append(self._fisher_pass(options, block_parameters, group, parts))
        return passes

    def _fisher_pass(
        self,
        options: MeasureConfig,
        parameters: dict[str, Tensor],
        blocks: frozenset[str],
        parts: Sequence[Batch],
    ) -> StatisticsPass:
        def run(step: int, sums: Sums) -> None:
            batch = parts[step]
            draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
            with torch.enable_grad():
                result = self.outputs(batch)
                label_scores = list(scores(self.model, result, batch, self.task, options.labels, draw))
            for number, score in enumerate(label_scores):
                gradients = torch.autograd.grad(
                    score, list(parameters.values()), retain_graph=number + 1 < len(label_scores), allow_unused=True
                )
                for name, gradient in zip(parameters, gradients, strict=True):
                    key = f"{name}.fisher"
                    if key not in sums:
                        sums[key] = torch.zeros(parameters[name].shape, dtype=torch.float64, device=self.device)
                    if gradient is not None:
                        sums[key] += gradient.double().square()

        def finish(sums: Sums) -> dict[str, Tensor]:
            return {key: (total / len(parts)).to(self._dtype()) for key, total in sums.items()}

        return StatisticsPass("Fisher", blocks, len(parts), run, finish)


def check_watched(plain: Sequence[Tensor], watched: Sequence[Tensor], model: nn.Module, must: bool) -> bool:
    """Check that recording leaves the outputs of a model (or a layer) unchanged.

    Raises:
        StatisticsError: it did not, although it must.
    """
    same = _difference(plain, watched) <= MOST_DIFFERENCE
    if must and not same:
        raise StatisticsError(
            f"the maps of {type(model).__name__} cannot be recorded without changing its outputs",
            remedy="its architecture file lists the readers of a norm wrongly; see docs/add-architecture.md",
        )
    return same


class Probe:
    """The maps that run, and those that share an input tensor."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        self.inputs.setdefault(name, []).append(x)

    def on_output(self, name: str, expert: int | None, y: Tensor) -> None:
        pass

    def axes(self, tapped: HookedModel, known: Mapping[str, str] | None = None) -> dict[str, str]:
        """The (block, axis) of each map that ran; those that read one tensor behind the same norm have the same.

        Args:
            known: those of other maps, which are left out.
        """
        known, axes = known or {}, dict[str, str]()
        by_input: dict[tuple[Any, ...], str] = {}
        for name, linear in tapped.maps.items():
            if name not in self.inputs or name in known:
                continue
            tensors = tuple(map(id, self.inputs[name]))
            read = linear.block.name, tensors, linear.norm, linear.stacked
            if read not in by_input:
                taken = {*known.values(), *by_input.values()}
                by_input[read] = _unused(f"{linear.block.name}/{linear.inputs.label}", taken)
            axes[name] = by_input[read]
        return axes


def _unused(axis: str, taken: Collection[str]) -> str:
    """A name for an input along an axis of a block; further ones are numbered."""
    names = chain([axis], (f"{axis}/{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def _expert_by_expert(model: nn.Module) -> None:
    """Make experts run one after the other, so that each one's product is seen."""
    config: Any = model.config
    for settings in (config, config.get_text_config() if hasattr(config, "get_text_config") else config):
        settings._experts_implementation = "eager"


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in result.values() if isinstance(x, Tensor) and x.is_floating_point()]


def _difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Largest difference of two sets of outputs, relative to the size of each of the first."""
    return max(
        (
            float((b - a).abs().max()) / float(a.abs().max().clamp(min=1e-12))
            for a, b in zip(first, second, strict=True)
        ),
        default=0.0,
    )


MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""

KINDS = ("sampled", "data")


def label_kind(logits: Tensor, config: Any, label_source: str) -> str:
    """The source of labels: exact, sampled, data, or gaussian for a regression."""
    if label_source == "data":
        return "data"
    if logits.ndim != 2:
        return "sampled"
    if getattr(config, "problem_type", None) == "regression" or logits.shape[-1] == 1:
        return "gaussian"
    return "exact" if logits.shape[-1] <= MOST_LABELS else "sampled"


def answers(model: Any, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The logits of a model's heads.

    Raises:
        DataError: it has none.
    """
    logits = {k: v for k, v in outputs.items() if k.endswith("logits") and isinstance(v, Tensor)}
    if not logits:
        raise DataError(
            f"{type(model).__name__} has no head that gives probabilities",
            remedy="measure the kind 'gram', or a model with its head",
        )
    return logits


def scores(
    model: Any,
    outputs: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    task: str,
    label_source: str,
    draw: torch.Generator,
) -> Iterator[Tensor]:
    """Scalars whose squared gradients, of each example by itself, add up to the example's Fisher matrix.

    Args:
        outputs: of the model for the batch, inside the graph.
        task: task of the labels (see `samples`).
        label_source: sampled (or exact, where that can be), or data: the labels that came with the samples.
        draw: where drawn labels come from.
    """
    for logits in answers(model, outputs).values():
        logits = logits.float() if logits.dtype != torch.float64 else logits
        kind = label_kind(logits, model.config, label_source)
        multiple = getattr(model.config, "problem_type", None) == "multi_label_classification"
        if kind == "data" and task in ("regression", "labels"):
            yield _of_numbers(logits, batch, task)
        elif kind == "gaussian":
            yield from (logits[:, c].sum() for c in range(logits.shape[1]))
        elif kind == "exact" and multiple:
            spread = (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach()
            yield from ((spread * logits)[:, c].sum() for c in range(logits.shape[1]))
        elif kind == "exact":
            logs = logits.log_softmax(-1)
            weighted = (logs.detach() / 2).exp() * logs
            yield from (weighted[:, c].sum() for c in range(logits.shape[1]))
        else:
            yield _of_labels(logits, batch, task, kind, draw)


def _of_numbers(logits: Tensor, batch: Mapping[str, Tensor], task: str) -> Tensor:
    """The log-probability of the data's numbers (under a normal distribution of variance one), or of all labels."""
    labels = batch["labels"].to(logits).reshape(logits.shape)
    if task == "regression":
        return -(logits - labels).square().sum() / 2
    return -torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _of_labels(logits: Tensor, batch: Mapping[str, Tensor], task: str, kind: str, draw: torch.Generator) -> Tensor:
    """The log-probability of one label for each example or position."""
    labels = batch.get("labels")
    if task == "next token":
        logits = logits[:, :-1]
        labels = None if labels is None else labels[:, 1:]
    if labels is not None and labels.shape != logits.shape[:-1]:
        labels = None
    if kind == "data" and labels is None:
        raise DataError("the samples have no labels for this head", remedy="leave out 'labels: data'")
    labelled = torch.ones(logits.shape[:-1], dtype=torch.bool) if labels is None else labels != -100
    logs = logits[labelled].log_softmax(-1)
    if kind == "data" and labels is not None:
        chosen = labels[labelled]
    else:
        chosen = torch.multinomial(logs.detach().exp().cpu(), 1, generator=draw)[:, 0].to(logs.device)
    return logs.gather(-1, chosen[:, None]).sum()
