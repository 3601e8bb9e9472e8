"""Measuring a model that does not fit in memory: the weights and the sums of one layer at a time.

Recording is as in `measure`: norms run without gain and shift, and hidden states are those of that run. Each weight is
read once. Fisher diagonals need gradients of the whole model, which are not measured in this way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from rotation_merge.architecture.model import Block
from rotation_merge.errors import StatisticsError
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.generated_samples import SELF
from rotation_merge.run.maps import linear_maps
from rotation_merge.run.measure import MeasureConfig, Probe, check_watched
from rotation_merge.run.passes import Progress, StatisticsPass, UnfinishedMeasurement, together
from rotation_merge.run.recorder import HookedModel, Watcher
from rotation_merge.run.runner import Runner, streamed_model
from rotation_merge.run.statistics import Statistics
from rotation_merge.run.store import hooked
from rotation_merge.run.sums import Collector, means


def in_layers(checkpoint: View, options: MeasureConfig, data: str, device: str) -> Any:
    """A model that does not fit in memory, to look at, or to write its samples.

    It has no weights at all where it is only to be looked at; where it is to write text, its layers read their weights
    as they run.

    Raises:
        StatisticsError: its Fisher is to be measured.
        CheckpointError: it cannot be run in that way.
    """
    config, name = checkpoint.transformers_config, str(checkpoint.reference)
    if "fisher" in options.kinds:
        problem = "a Fisher diagonal needs the whole model in memory"
        remedy = "measure the kind 'gram', or use a machine with more memory ('--whole' tries it on this one)"
        raise StatisticsError(problem, where=name, remedy=remedy)
    if data != SELF:
        return empty_model(config)
    return streamed_model(config, checkpoint, checkpoint.architecture, torch.float32, device, name)


class LayerwiseMeasurement:
    """A model under measurement, layer after layer.

    Args:
        runner: about to run on the samples, which are without padding.
    """

    def __init__(self, runner: Runner, state: UnfinishedMeasurement, progress: Progress) -> None:
        self.runner, self.state, self.progress = runner, state, progress
        self.opened = 0
        self.axes: dict[str, str] = {}
        self.split: set[str] = set()

    def run(self) -> Statistics:
        """Measures all layers; one that an interrupted run has measured is only run forward."""
        parts: list[Tensors] = []
        total = len(self.runner.architecture.blocks)
        while (block := self.runner.advance()) is not None:
            self.progress("inputs of the maps, layer by layer", self.opened, total)
            self.opened += 1
            parts.append(self._block(block))
        self.progress("inputs of the maps, layer by layer", total, total)
        uncalled = frozenset(linear_maps(self.runner.architecture)) - self.axes.keys()
        return Statistics(together(parts), self.axes, frozenset(self.split), uncalled)

    def _block(self, block: Block) -> Tensors:
        """Measure the maps of a block, and carry the hidden states on."""
        tapped = HookedModel.of(self.runner.model, self.runner.architecture)
        axes = self._look(block, tapped)
        layer_pass = StatisticsPass("inputs of the maps", frozenset({block.name}), 0, lambda *_: None, lambda _: {})
        results = self.state.result(layer_pass)
        collector = Collector(tapped.maps, axes if results is None else {})
        with tapped.split(self._splits), tapped.watched(collector), self.runner.recording():
            for batch in range(len(self.runner.batches)):
                self.runner.run(batch)
        self.axes.update(axes)
        if results is not None:
            return results
        dtype = torch.promote_types(self.runner.dtype, torch.float32)
        return self.state.done(layer_pass, means(collector.sums, dtype))

    def _look(self, block: Block, tapped: HookedModel) -> dict[str, str]:
        """Find the inputs of maps that run for the first time, and settle the split norms."""
        probe = Probe()
        plain = self._outputs(block, tapped, probe)
        axes = probe.axes(tapped, self.axes)
        for splits in [axes, ()] if plain else [()]:
            self._splits: Iterable[str] = splits
            with tapped.split(splits):
                split = {axes[name] for name in tapped.splits}
                again = self._outputs(block, tapped, Probe())
            if not plain or check_watched(plain, again, self.runner.model, must=block.index is not None):
                break
        self.split |= split
        return axes

    def _outputs(self, block: Block, tapped: HookedModel, watcher: Watcher) -> list[Tensor]:
        """Outputs of a layer (or, outside of the layers, the model) for the first batch; empty if it ends early."""
        outputs: list[Any] = []
        place = self.runner.module_of(block) or self.runner.model
        hook = place.register_forward_hook(lambda _, __, output: outputs.append(output))
        with torch.no_grad(), hooked([hook]), tapped.watched(watcher):
            self.runner.run(0)
        leaves = _pytree.tree_leaves(outputs[-1]) if outputs else []
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
