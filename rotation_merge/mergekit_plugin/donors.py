"""A recipe's donors: what each is matched to, by which options, and the alignments of whole models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.carrying.vocabulary import check_no_added_tokens, check_same_set
from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.alignment_file import check_fingerprints, load_file
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Pair, check_depth, check_pair, residual_of
from rotation_merge.matching.report_rows import figures_in
from rotation_merge.matching.run import AppliedAlignment, Run
from rotation_merge.mergekit_plugin.carried import CarryPlan, added_as_it_is, carried, check_adapter
from rotation_merge.mergekit_plugin.keys import UNMOVED
from rotation_merge.mergekit_plugin.models import Models, settle_presets
from rotation_merge.mergekit_plugin.recipe import Recipe, title
from rotation_merge.mergekit_plugin.wholes import MeanMatch, Whole, WholeMatch, devices_of
from rotation_merge.model.forms import translated
from rotation_merge.model.heads import compared
from rotation_merge.model.hub import local_file
from rotation_merge.model.labels import in_class_order, label_rows, rows_note
from rotation_merge.model.rows import vocabulary_subset
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, matched_on, row_pair, shared_rows

LOG = logging.getLogger(__name__)


def model_readers(config: MergeConfiguration) -> dict[ModelReference, ConfigReader]:
    """The lookup of each model's parameters, in the first slice that it is in.

    Args:
        config: normalised (modules with slices).
    """
    readers: dict[ModelReference, ConfigReader] = {}
    for module in (config.modules or {}).values():
        for piece in module.slices or []:
            for source in piece.sources:
                if source.model not in readers:
                    readers[source.model] = ConfigReader(config=config, t=0, module=module, slice_out=piece)
    return readers


@dataclass(frozen=True)
class Donor:
    """One donor's part.

    Attributes:
        origin: the model it was fine-tuned from, if its task vector is to be carried over.
        whole: gives its alignment across the whole model; None: each block is matched by itself.
        rows: where its vocabulary is not the anchor's, the anchor's and the donor's rows of the tokens they share.
        checked: the checked pair of it (or its origin) and the anchor.
        carried: plan of carrying its task vector.
    """

    origin: ModelReference | None = None
    whole: Whole | None = None
    rows: tuple[Tensor, Tensor] | None = None
    checked: Pair | None = None
    carried: CarryPlan = field(default_factory=CarryPlan)


@dataclass
class Donors:
    """The donors of one merge.

    Attributes:
        found: by model; the base is not among them.
        folded: streams that are folded in every model of the merge, because some donor's rotation needs it.
        layers: of each donor, by module, which of the anchor's layers meets which of its own.
    """

    recipe: Recipe
    models: Models
    options: MergeOptions
    run: Run
    found: dict[ModelReference, Donor] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    layers: dict[ModelReference, dict[str, list[tuple[int, int]]]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, config: MergeConfiguration, recipe: Recipe, models: Models, options: MergeOptions, run: Run
    ) -> Donors:
        """Settle every donor of a normalised configuration (modules with slices).

        Raises:
            RotationMergeError: a model or an alignment file does not fit, a group is not admitted.
        """
        self = cls(recipe, models, options, run)
        readers = self._readers(config)
        settle_presets(recipe, models, readers, run)
        check_adapter(self._base)
        if recipe.mean:
            self._settle_mean(readers)
        else:
            for model, reader in readers.items():
                donor = self._settle(model, reader)
                match = AlignConfig() if donor.checked is None else donor.checked.options
                carrying = carried(recipe, reader, options, run, model, donor.origin, match, donor.rows is None)
                self.found[model] = replace(donor, carried=carrying)
        for model, donor in self.found.items():
            how = "block by block" if donor.whole is None else "as a whole"
            shown = "with all others" if donor.checked is None else donor.checked.options
            LOG.info("%s is aligned %s: %s", title(model, donor.origin), how, shown)
        return self

    def _readers(self, config: MergeConfiguration) -> dict[ModelReference, ConfigReader]:
        """The lookup of each donor's parameters; also notes which layers meet."""
        for name, module in (config.modules or {}).items():
            for piece in module.slices or []:
                anchor = next((s for s in piece.sources if s.model == self.recipe.base), piece.sources[0])
                for source in piece.sources:
                    if source.model != self.recipe.base:
                        meeting = zip(range(*anchor.layer_range), range(*source.layer_range), strict=False)
                        self.layers.setdefault(source.model, {}).setdefault(name, []).extend(meeting)
        return {model: reader for model, reader in model_readers(config).items() if model != self.recipe.base}

    def match_wholes(self) -> None:
        """Find all alignments of whole models, and carry what needs samples."""
        for donor in self.found.values():
            if donor.whole is not None:
                donor.whole()
            if donor.carried.view is not None:
                donor.carried.view()

    @property
    def device(self) -> Callable[[], torch.device | None]:
        """Gives the accelerator on which a thread of the merge computes; None: the CPU."""
        if self.options.multi_gpu:
            return lambda: torch.empty(0).device
        device = torch.device(self.options.device or "cpu")
        return lambda: None if device.type == "cpu" else device

    @property
    def dtype(self) -> torch.dtype | None:
        """The least precise dtype that the recipe rounds to; None: all tensors keep theirs."""
        named = (self.recipe.config.dtype, self.recipe.config.out_dtype)
        dtypes = [dtype for name in named if (dtype := dtype_from_name(name)) is not None]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    @property
    def tied_head(self) -> str | None:
        """Name of a head of the base that stays its embedding's tensor."""
        return None if self.recipe.untie else self._base.tied_head

    @property
    def _base(self) -> View:
        return self.models[self.recipe.base]

    @property
    def _architecture(self) -> Architecture:
        return self._base.architecture

    def _compared(self, *models: ModelReference) -> Architecture:
        return compared(self._base, map(self.models.__getitem__, models), self.recipe.own_heads, self.recipe.excluded)

    def _settle(self, model: ModelReference, reader: ConfigReader) -> Donor:
        origin = self._origin(model, reader)
        path = self.recipe.of_model("alignment", reader, model)
        unmoved, words = False, ""
        check_adapter(self.models[model], self.models[origin] if origin is not None else None)
        if origin is not None:
            unmoved, words = added_as_it_is(reader, model, self._base, self.models[origin])
        if unmoved and path is None:
            self.recipe.relations[model] = UNMOVED
        varying = self.recipe.varying(reader, model) if path is None else NOTHING
        checked = self._check(origin or model, model, varying, averaged=origin is None)
        if words and path is None:
            self.run.note(words)
            checked = replace(checked, warnings=(*checked.warnings, words))
        options = checked.options
        rows = self._rows(origin or model, carried=origin is not None) if origin or options.residual != "none" else None
        if path is not None:
            known = self._known_alignment(path, origin or model, title(model, origin), str(model))
            return Donor(origin, known, rows, checked)
        match = self._match(model, origin, reader)
        if options.residual == "none" and match is match_model and not self._whole_models:
            return Donor(origin, None, rows, checked)
        self._fold(checked.folded)
        sources: list[TensorSource] = [self._base.tensors, self.source(origin or model)]
        if rows is not None:
            sources = [vocabulary_subset(self._architecture, s, r) for s, r in zip(sources, rows, strict=True)]
        whole = WholeMatch(
            architecture=self._compared(origin or model),
            anchor=sources[0],
            donor=sources[1],
            anchor_name=str(self.recipe.base),
            donor_name=title(model, origin),
            options=options,
            run=self.run,
            devices=devices_of(self.options),
            quiet=self.options.quiet,
            match=match,
        )
        return Donor(origin, lambda: whole.alignment, rows, checked)

    @property
    def _whole_models(self) -> bool:
        """Whether the delegate works on whole models."""
        method = self.recipe.own_method
        return method is not None and method.whole_models

    def _match(self, model: ModelReference, origin: ModelReference | None, reader: ConfigReader) -> Match:
        """The function that matches a donor: on weights, or on activations ('match_on')."""
        how, data, count = (self.recipe.of_model(name, reader, model) for name in ("match_on", "data", "samples"))
        if how in (None, WEIGHTS):
            return match_model
        from rotation_merge.matching.match_on import SampleMatcher

        names, seed = (str(self.recipe.base), str(origin or model)), self.options.random_seed or 0
        return SampleMatcher(how, *names, data or "self", count, seed, devices_of(self.options)[0])

    def _rows(self, donor: ModelReference, carried: bool) -> tuple[Tensor, Tensor] | None:
        """Rows of shared tokens if the donor has another vocabulary than the anchor, or its base other ids.

        Raises:
            RecipeError: a task vector would be carried to the anchor's token ids, and these changed afterwards.
        """
        rows = row_pair(self._base, self.models[donor])
        if rows is None:
            return None
        config = self.recipe.config
        if carried and (config.tokenizer or config.tokenizer_source):
            raise RecipeError(
                f"the task vector is carried to the token ids of {self.recipe.base}, which differ from its own",
                where=str(donor),
                remedy="leave out 'tokenizer' and 'tokenizer_source'",
            )
        self.run.note(matched_on(self._base, self.models[donor], len(rows[0])))
        return rows

    def _settle_mean(self, readers: dict[ModelReference, ConfigReader]) -> None:
        options: AlignConfig | None = None
        settled: dict[ModelReference, Pair] = {}
        for model, reader in readers.items():
            check_adapter(self.models[model])
            checked = self._check(model, model, self.recipe.varying(reader, model), whole=True, averaged=True)
            settled[model], model_options = checked, checked.options
            if options is not None and self._by_block(model_options) != self._by_block(options):
                raise RecipeError(
                    "'anchor: mean' needs the same options for all donors",
                    where=str(model),
                    remedy="set them once, under the recipe's parameters",
                )
            options = model_options
            self._fold(checked.folded)
        if options is None:
            return
        sources: dict[str, TensorSource] = {str(self.recipe.base): self._base.tensors}
        sources.update({str(model): self.source(model) for model in readers})
        rows = (
            shared_rows([self._base, *(self.models[model] for model in readers)])
            if options.residual != "none"
            else None
        )
        if rows is not None:
            names = zip(sources, rows, strict=True)
            sources = {name: vocabulary_subset(self._architecture, sources[name], row) for name, row in names}
        everything = MeanMatch(
            architecture=self._compared(*readers),
            sources=sources,
            base=str(self.recipe.base),
            options=options,
            run=self.run,
            devices=devices_of(self.options),
            quiet=self.options.quiet,
        )
        self.found = {
            model: Donor(None, partial(everything.alignment, str(model)), None, checked)
            for model, checked in settled.items()
        }

    def _by_block(self, options: AlignConfig) -> list[AlignConfig]:
        return [options.at(self._architecture, block) for block in self._architecture.blocks]

    def _origin(self, model: ModelReference, reader: ConfigReader) -> ModelReference | None:
        path = self.recipe.of_model("finetuned_from", reader, model)
        if path is None:
            return None
        origin = ModelReference.model_validate(path)
        self.models.together(self.recipe.base, [origin])
        check_same_set(self._base, self.models[origin])
        check_no_added_tokens(self.models[origin], self.models[model])
        check_token_ids(self.models[origin], self.models[model], tuned=True)
        check_adapter(self.models[origin])
        return origin

    def _known_alignment(self, path: str, donor: ModelReference, name: str, model: str) -> Whole:
        file = load_file(local_file(path, self.options.transformers_cache), self._architecture)
        marks = self._base.fingerprint, self.models[donor].fingerprint
        check_fingerprints(file, path, *marks, (str(self.recipe.base), str(donor)))
        residual = residual_of(file.transforms, file.folded)
        self._check(donor, donor, NOTHING.with_residual(residual), whole=residual != "none")
        self._fold(file.folded)
        self.run.moved_by(name, AppliedAlignment(path, str(donor), file.metadata))
        figures_in(file.metadata, path)
        if isinstance(file.metadata.get("data"), str):
            self.run.used(
                f"learning how {donor} is aligned", file.metadata["data"], int(file.metadata.get("samples") or 0)
            )
        learned = file.metadata.get("learned")
        words = f" It was learned: {learned['verdict']}." if isinstance(learned, dict) and "verdict" in learned else ""
        self.run.note(f"`{donor}` was aligned by the file {path}; nothing was matched.{words}")
        alignment = Alignment.of(file)
        self.run.transforms[model] = alignment.transforms
        self.run.keep(name, alignment.transforms)
        return lambda: alignment

    def _check(
        self,
        matched: ModelReference,
        model: ModelReference,
        options: AlignConfig,
        whole: bool = False,
        averaged: bool = False,
    ) -> Pair:
        """Check that the model can be moved under these options; doubts become notes."""
        checked = check_pair(
            self._base,
            self.models[matched].as_filed,
            options,
            untie=self.recipe.untie,
            layers=None if whole else self.layers.get(model, {}),
            excluded=self.recipe.excluded,
            averaged=averaged,
        )
        rows = label_rows(self._base, self.models[model].as_filed, self.recipe.excluded)
        self.models[matched] = in_class_order(self.models[matched].as_filed, checked.rows)
        self.models[model] = in_class_order(self.models[model].as_filed, rows)
        for note in (*checked.warnings, *checked.notes, *rows_note(str(self.recipe.base), str(model), rows)):
            self.run.note(note)
        return checked

    def _fold(self, streams: tuple[str, ...]) -> None:
        self.folded = tuple(dict.fromkeys((*self.folded, *streams)))

    def source(self, model: ModelReference, read: TensorSource | None = None) -> TensorSource:
        """A model under the anchor's tensor names.

        Args:
            read: where its tensors are taken from; None: the model itself.
        """
        donor = self.models[model]
        remedy = "whole models can only be aligned layer by layer; use 'residual: none' with slices"
        check_depth(self._base, donor, remedy)
        return translated(read or donor.tensors, donor.architecture, self._architecture)
