"""What a merge method of our own is told in a recipe: the models as views, their statistics, samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from mergekit.common import ModelReference
from mergekit.parameter_resolver import resolve_parameters

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.models import MergedModels, MergeLog, ModelStatistics
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.average import check_heads
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.mergekit_plugin.loader import PlacedModel
from rotation_merge.mergekit_plugin.output import MergeOutput, OutputBlock
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.statistics import RecipeStatistics
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.run.data import read_batches, unpadded
from rotation_merge.run.functions import Batch, load, local_path

SAMPLES = 200
"""Samples that activations are taken on."""


class ToldMethod:
    """A method of our own, told about the models of a recipe.

    Args:
        placed: the references by which mergekit knows the models.
        dtype: of the result; None: each tensor has that of the anchor's files.
    """

    def __init__(
        self,
        session: Session,
        donors: Donors,
        output: MergeOutput,
        parts: RecipeViews,
        placed: Mapping[ModelReference, PlacedModel],
        dtype: torch.dtype | None,
    ) -> None:
        self.session, self.donors, self.output, self.parts, self.placed = session, donors, output, parts, placed
        self.recipe, self.dtype = session.recipe, dtype
        assert session.recipe.own_method is not None
        self.delegate = session.recipe.own_method

    def told(self) -> OwnMethod:
        """The method, once nothing speaks against any tensor.

        Raises:
            RotationMergeError: weights are of no use, statistics or samples are missing.
        """
        base, log = self.recipe.base, MergeLog(str(self.recipe.base))
        models = MergedModels(
            base=self.placed[base],
            places=self.output.architecture.places(),
            tied_head=self.donors.tied_head,
            views={reference: self.parts.view(model) for model, reference in self.placed.items()},
            statistics=self._statistics() if self.delegate.statistics else {},
            storage=self.storage,
            samples=self._samples() if self.delegate.on_samples else None,
            log=log,
        )
        method = self.delegate.on(models)
        for out in self.output.blocks:
            self._check(method, out)
        run, known = self.session.run, tuple(log.lines)
        for line in known:
            run.note(line)
        run.add_notes_later(lambda: [*(line for line in log.lines if line not in known), *method.words(log)])
        return method

    def storage(self, name: str) -> torch.dtype | None:
        """The type that an output tensor is rounded to."""
        return self.dtype or self.parts.storage(self.recipe.base, self._anchor_infos[name])

    @cached_property
    def _anchor_infos(self) -> Mapping[str, TensorInfo]:
        return {name: frame for out in self.output.blocks for info, frame in out.pairs() for name in info.names}

    def _check(self, method: OwnMethod, out: OutputBlock) -> None:
        """Look at the parameters of every tensor of a block before anything is merged."""
        for name, values, weights in self._resolved(out):
            check_heads(self.recipe.value("heads_of"), values)
            method.participants(name, {self.placed[model]: weight for model, weight in weights.items()}, values)

    def _resolved(self, out: OutputBlock) -> Iterable[tuple[str, dict[str, object], dict[ModelReference, float]]]:
        """Parameters and weights of a block's tensors, by their names."""
        for info in out.block.tensors:
            for piece, name in enumerate(info.names):
                if self.recipe.excluded(name):
                    continue
                inputs = {model: (block.tensor(info.key) or info).names[piece] for model, block in out.sources.items()}
                shared, by_model = resolve_parameters(
                    self.delegate.spec,
                    tensor_name=name,
                    inputs=inputs,
                    sources=out.reader.parameter_sources,
                    base_model=None if self.recipe.plain else self.recipe.base,
                    t=out.reader.t,
                )
                yield name, shared, {model: float(values["weight"]) for model, values in by_model.items()}

    def _statistics(self) -> Mapping[Hashable, ModelStatistics]:
        """The statistics of all models that count, moved with them."""
        counting = {
            model: out.reader
            for out in reversed(self.output.blocks)
            for _, _, weights in self._resolved(out)
            for model, weight in weights.items()
            if weight != 0
        }
        opened = RecipeStatistics(self.session, self.delegate).opened(counting)
        return {self.placed[model]: self.parts.statistics(model, book) for model, book in opened.items()}

    def _samples(self) -> Callable[[], Sequence[Batch]] | None:
        """Reads the one pool of samples that activations are compared on; None: weights are compared.

        Raises:
            RecipeError: models have samples of their own.
        """
        first = self.output.blocks[0].reader
        files = {self.recipe.of_model("data", first, model) for model in self.placed}
        if len(files) > 1:
            raise RecipeError(
                f"delegate {self.delegate.spec.name} compares activations on the same samples, but models have their "
                "own 'data'",
                where="parameters",
                remedy="write 'data' once, under the recipe's parameters",
            )
        data = files.pop()
        if data is None:
            return None
        self.session.run.used("matching of activations", str(data), SAMPLES)
        anchor, seed = str(self.recipe.base), self.session.options.random_seed or 0

        def pool() -> Sequence[Batch]:
            batches = read_batches(str(data), local_path(anchor), load(anchor), SAMPLES, seed=seed).batches
            return unpadded(batches, str(data))

        return pool
