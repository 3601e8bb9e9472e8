"""A recipe's donors: what each is matched to, by which options, and the alignments of whole models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader

from rotation_merge.architecture.model import Architecture
from rotation_merge.carrying.delta import RowPair
from rotation_merge.carrying.tokens import check_no_added_tokens, check_same_set
from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment, load_for
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Pair, check_depth, check_pair, residual_of
from rotation_merge.matching.run import AppliedAlignment, figures_in
from rotation_merge.mergekit_plugin.carried import added_as_it_is, carried, check_adapter
from rotation_merge.mergekit_plugin.keys import UNMOVED
from rotation_merge.mergekit_plugin.models import settle_presets
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.wholes import match_mean, match_whole
from rotation_merge.model.heads import compared
from rotation_merge.model.labels import in_class_order, label_rows, rows_note
from rotation_merge.model.rows import vocabulary_subset
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, matched_on, row_pair, shared_rows

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Donor:
    """One donor's part.

    Attributes:
        pair: the checked pair of the anchor and it, or its origin.
        origin: the model it was fine-tuned from, if its task vector is to be carried over.
        whole: gives its alignment across the whole model, found once; None: each block is matched by itself.
        carried: gives the anchor with its change, where samples choose that; else `scale` is the factor of its task
            vector.
    """

    pair: Pair
    origin: ModelReference | None = None
    whole: Callable[[], Alignment] | None = None
    carried: Callable[[], View] | None = None
    scale: float = 1.0


class Donors:
    """The donors of one merge.

    Args:
        blocks: of the output.

    Attributes:
        by_model: all of them; the base is not among them.
        folded: streams that are folded in every model of the merge, because some donor's rotation needs it.
        readers: the lookup of each model's parameters, the base's too, in the first block that it goes into.
        layers: of each model, by module, which of the anchor's layers meets which of its own.

    Raises:
        RotationMergeError: a model or an alignment file does not fit, a group is not admitted.
    """

    def __init__(self, session: Session, blocks: Sequence[OutputBlock]) -> None:
        self.session, self.blocks = session, blocks
        self.recipe, self.models = session.recipe, session.models
        self.options, self.run = session.options, session.run
        self.base = self.models[self.recipe.base]
        self.folded: tuple[str, ...] = ()
        self.readers: dict[ModelReference, ConfigReader] = {}
        self.layers: dict[ModelReference, dict[str, list[tuple[int, int]]]] = {}
        for out in blocks:
            for model, block in out.sources.items():
                self.readers.setdefault(model, out.reader.with_t(0))
                if out.anchor.index is not None and block.index is not None:
                    met = self.layers.setdefault(model, {}).setdefault(block.module, [])
                    met.append((out.anchor.index, block.index))
        readers = {model: reader for model, reader in self.readers.items() if model != self.recipe.base}
        settle_presets(self.recipe, self.models, readers, self.run)
        check_adapter(self.base)
        self.by_model = {model: self._settled(model, reader) for model, reader in readers.items()}
        if self.recipe.mean:
            self._align_to_mean()
        for model, donor in self.by_model.items():
            how = "block by block" if donor.whole is None else "as a whole"
            LOG.info("%s is aligned %s: %s", title(model, donor.origin), how, donor.pair.options)

    def match_wholes(self) -> None:
        """Find all alignments of whole models, and carry what needs samples."""
        for donor in self.by_model.values():
            if donor.whole is not None:
                donor.whole()
            if donor.carried is not None:
                donor.carried()

    @property
    def dtype(self) -> torch.dtype | None:
        """The least precise dtype that the recipe rounds to; None: all tensors keep theirs."""
        named = (self.recipe.config.dtype, self.recipe.config.out_dtype)
        dtypes = [dtype for name in named if (dtype := dtype_from_name(name)) is not None]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def _settled(self, model: ModelReference, reader: ConfigReader) -> Donor:
        origin, path = self._origin(model, reader), self.recipe.of_model("alignment", reader, model)
        matched, words, mean = origin or model, "", self.recipe.mean
        check_adapter(self.models[model], self.models[origin] if origin is not None else None)
        if origin is not None and path is None:
            unmoved, words = added_as_it_is(reader, model, self.base, self.models[origin])
            if unmoved:
                self.recipe.relations[model] = UNMOVED
        options = self.recipe.varying(reader, model) if path is None else NOTHING
        pair = self._checked(matched, model, options, whole=mean, averaged=origin is None)
        if words:
            self.run.note(words)
            pair = replace(pair, warnings=(*pair.warnings, words))
        if mean:
            return Donor(pair)
        if origin is not None or pair.options.residual != "none":
            pair = replace(pair, shared=self._rows(matched, carried=origin is not None))
        if path is None:
            whole = self._matched(pair, title(model, origin), self._match(model, origin, reader))
        else:
            whole = self._of_file(path, model, origin)
        shared = pair.shared is None
        plan = carried(self.recipe, reader, self.options, self.run, model, origin, pair.options, shared)
        return Donor(pair, origin, whole, *plan)

    def _matched(self, pair: Pair, name: str, match: Match) -> Callable[[], Alignment] | None:
        """Gives the alignment of the whole model; None where each block is matched by itself."""
        if pair.options.residual == "none" and match is match_model and not self.recipe.on_whole_models:
            return None
        remedy = "whole models can only be aligned layer by layer; use 'residual: none' with slices"
        check_depth(self.base, pair.donor, remedy)
        self._fold(pair.folded)
        return cache(partial(match_whole, self.session, pair, self._compared(pair.donor), name, match))

    def _compared(self, *models: View) -> Architecture:
        """The anchor's architecture without what is not compared with other models."""
        return compared(self.base, models, self.recipe.own_heads, self.recipe.excluded)

    def _match(self, model: ModelReference, origin: ModelReference | None, reader: ConfigReader) -> Match:
        """The function that matches a donor: on weights, or on activations ('match_on')."""
        how, data, count = (self.recipe.of_model(name, reader, model) for name in ("match_on", "data", "samples"))
        from rotation_merge.matching.match_on import matcher

        names, seed = (str(self.recipe.base), str(origin or model)), self.options.random_seed or 0
        device = self.session.devices[0]
        return matcher(how or WEIGHTS, *names, data=data or "self", count=count, seed=seed, device=device)

    def _rows(self, donor: ModelReference, carried: bool) -> RowPair | None:
        """Rows of shared tokens if the donor has another vocabulary than the anchor, or its base other ids.

        Raises:
            RecipeError: a task vector would be carried to the anchor's token ids, and these changed afterwards.
        """
        rows, config = row_pair(self.base, self.models[donor]), self.recipe.config
        if rows is None:
            return None
        if carried and (config.tokenizer or config.tokenizer_source):
            raise RecipeError(
                f"the task vector is carried to the token ids of {self.recipe.base}, which differ from its own",
                where=str(donor),
                remedy="leave out 'tokenizer' and 'tokenizer_source'",
            )
        self.run.note(matched_on(self.base, self.models[donor], len(rows[0])))
        return rows

    def _align_to_mean(self) -> None:
        """Align all donors with the base to their mean.

        Raises:
            RecipeError: their options differ.
        """
        architecture, options, sources = self.base.architecture, NOTHING, {str(self.recipe.base): self.base.tensors}
        by_block: list[AlignConfig] = []
        for model, donor in self.by_model.items():
            options, of_last = donor.pair.options, by_block
            by_block = [options.at(architecture, block) for block in architecture.blocks]
            if of_last and by_block != of_last:
                problem, remedy = "'anchor: mean' needs the same options for all donors", "set them once, under the"
                raise RecipeError(problem, where=str(model), remedy=f"{remedy} recipe's parameters")
            self._fold(donor.pair.folded)
            sources[str(model)] = donor.pair.sources[1]
        donors = [donor.pair.donor for donor in self.by_model.values()]
        if options.residual != "none" and (rows := shared_rows([self.base, *donors])) is not None:
            names = zip(sources, rows, strict=True)
            sources = {name: vocabulary_subset(architecture, sources[name], row) for name, row in names}
        aligned = cache(partial(match_mean, self.session, self._compared(*donors), sources, options))
        for model, donor in self.by_model.items():
            self.by_model[model] = replace(donor, whole=partial(_of_mean, aligned, str(model)))

    def _origin(self, model: ModelReference, reader: ConfigReader) -> ModelReference | None:
        """The base that a donor was fine-tuned from, checked with both models."""
        path = self.recipe.of_model("finetuned_from", reader, model)
        if path is None:
            return None
        origin = ModelReference.model_validate(path)
        self.models.together(self.recipe.base, [origin])
        check_same_set(self.base, self.models[origin])
        check_no_added_tokens(self.models[origin], self.models[model])
        check_token_ids(self.models[origin], self.models[model], tuned=True)
        check_adapter(self.models[origin])
        return origin

    def _of_file(self, path: str, model: ModelReference, origin: ModelReference | None) -> Callable[[], Alignment]:
        """Gives the alignment of a file under 'alignment'."""
        donor, name = origin or model, title(model, origin)
        alignment = load_for(path, self.base, self.models[donor], cache=self.options.transformers_cache)
        residual = residual_of(alignment.transforms, alignment.folded)
        self._checked(donor, donor, NOTHING.with_residual(residual), whole=residual != "none")
        self._fold(alignment.folded)
        self.run.alignment_files[name] = AppliedAlignment(path, alignment.metadata)
        figures_in(alignment.metadata, path)
        data, learned = (alignment.metadata.get(key) for key in ("data", "learned"))
        if isinstance(data, str):
            self.run.used(f"learning how {donor} is aligned", data, int(alignment.metadata.get("samples") or 0))
        words = f" It was learned: {learned['verdict']}." if isinstance(learned, dict) and "verdict" in learned else ""
        self.run.note(f"`{donor}` was aligned by the file {path}; nothing was matched.{words}")
        self.run.transforms[str(model)] = alignment.transforms
        self.run.keep(name, alignment.transforms)
        return lambda: alignment

    def _checked(
        self,
        matched: ModelReference,
        model: ModelReference,
        options: AlignConfig,
        whole: bool = False,
        averaged: bool = False,
    ) -> Pair:
        """Check that the model can be moved under these options; doubts become notes."""
        checked = check_pair(
            self.base,
            self.models[matched].as_filed,
            options,
            untie=self.recipe.untie,
            layers=None if whole else self.layers.get(model, {}),
            excluded=self.recipe.excluded,
            averaged=averaged,
        )
        rows = label_rows(self.base, self.models[model].as_filed, self.recipe.excluded)
        self.models[matched] = in_class_order(self.models[matched].as_filed, checked.rows)
        self.models[model] = in_class_order(self.models[model].as_filed, rows)
        for note in (*checked.warnings, *checked.notes, *rows_note(str(self.recipe.base), str(model), rows)):
            self.run.note(note)
        return replace(checked, donor=self.models[matched], watched=False)

    def _fold(self, streams: tuple[str, ...]) -> None:
        self.folded = tuple(dict.fromkeys((*self.folded, *streams)))


def _of_mean(aligned: Callable[[], Mapping[str, Alignment]], name: str) -> Alignment:
    return aligned()[name]
