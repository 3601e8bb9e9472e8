"""A recipe's donors: what each is matched to, by which options, its whole alignment, and how its change is carried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import tqdm
from mergekit.common import ModelReference
from mergekit.config import ConfigReader

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import RowPair
from rotation_merge.carrying.tokens import check_no_added_tokens, check_same_set
from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment, load_for
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Layers, Pair, check_depth, check_pair, options_of
from rotation_merge.matching.stream import Transforms
from rotation_merge.mergekit_plugin.keys import MATCHING, OF_MODEL, UNMOVED
from rotation_merge.mergekit_plugin.output import OutputBlock, layers_of, readers_of
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.mergekit_plugin.session import Session, settle_presets
from rotation_merge.model.adapter_base import OWN_BASE
from rotation_merge.model.folder import folder_of
from rotation_merge.model.forms import named_as
from rotation_merge.model.gguf import quantised
from rotation_merge.model.heads import compared
from rotation_merge.model.labels import in_class_order, label_rows, rows_note
from rotation_merge.model.nearness import nearness
from rotation_merge.model.open import check_own_base
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, matched_on, on_shared_rows, shared_rows
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices

LOG = logging.getLogger(__name__)

ASKS = (*MATCHING, "carry", "carry_scale", "data")
"""Parameters with which a recipe asks for matching, or lets samples judge."""

WHOLE_ONLY = "whole models can only be aligned layer by layer; use 'residual: none' with slices"


@dataclass(frozen=True, eq=False)
class Donor:
    """One donor of a recipe. Its base, pair and alignment are looked up and checked when they are first asked for.

    Attributes:
        reader: looks up its parameters.
        layers: which of the anchor's layers meets which of its own; None: each meets the one at its own place.
        means: gives the alignments of all donors to the mean of the models, where that is the anchor.
    """

    session: Session
    model: ModelReference
    reader: ConfigReader
    layers: Layers | None = None
    means: Callable[[], Mapping[str, Alignment]] | None = None

    def value(self, name: str) -> Any:
        """A parameter of it; its default where it is not given."""
        return self.session.recipe.value(name, self.reader, self.model)

    @cached_property
    def origin(self) -> ModelReference | None:
        """The base that it was fine-tuned from, if its task vector is to be carried over, checked with both models."""
        if (path := self.value("finetuned_from")) is None:
            return None
        origin, models = ModelReference.model_validate(path), self.session.models
        models.together(self.session.recipe.base, [origin])
        check_same_set(self.session.base, models[origin])
        check_no_added_tokens(models[origin], models[self.model])
        check_token_ids(models[origin], models[self.model], tuned=True)
        check_adapter(models[origin])
        return origin

    @property
    def matched(self) -> ModelReference:
        """The model that is matched to the anchor: itself, or its origin."""
        return self.origin or self.model

    @property
    def name(self) -> str:
        """Its name in the report."""
        return title(self.model, self.origin)

    @cached_property
    def pair(self) -> Pair:
        """The anchor and the matched model, checked to fit together under its options; doubts become notes."""
        session, origin, words = self.session, self.origin, ""
        check_adapter(session.models[self.model], None if origin is None else session.models[origin])
        if origin is not None and self.value("alignment") is None:
            unmoved, words = self._added_as_it_is(session.models[origin])
            if unmoved:
                session.recipe.relations[self.model] = UNMOVED
        options = session.recipe.varying(self.reader, self.model) if self.value("alignment") is None else NOTHING
        pair = self._checked(self.model, options, self.layers)
        if words:
            session.run.note(words)
            pair = replace(pair, warnings=(*pair.warnings, words))
        if self.means is None and (origin is not None or pair.options.residual != "none"):
            pair = replace(pair, shared=self._shared_rows())
        return pair

    def _added_as_it_is(self, origin: View) -> tuple[bool, str]:
        """Whether its change is added without alignment, and a note on it.

        This holds if its base and the anchor share their coordinates and the recipe asks for no matching.
        """
        base = self.session.base
        near = nearness(base.architecture, base.tensors, named_as(base.architecture, origin, origin.architecture))
        if not near.shared:
            return False, ""
        words = f"`{self.model}`: {origin.reference} and {base.reference} share their coordinates ({near.words})"
        options = [name for scope in self.reader.parameter_sources(self.model) for name in scope or () if name in ASKS]
        if options:
            return False, f"{words}: its change could be added as it is, but '{options[0]}' is set."
        return True, f"{words}: its change is added as it is."

    def _checked(self, model: ModelReference, options: AlignConfig, layers: Layers | None) -> Pair:
        """The pair under these options, with the classes of it, and of `model`, in the order of the anchor."""
        base, models, recipe = self.session.base, self.session.models, self.session.recipe
        donor, excluded = models[self.matched].as_filed, recipe.excluded
        facts = {"untie": recipe.value("untie"), "averaged": self.origin is None}
        pair = check_pair(base, donor, options, layers=layers, excluded=excluded, **facts)
        rows = label_rows(base, models[model].as_filed, excluded)
        models[self.matched] = in_class_order(donor, pair.rows)
        models[model] = in_class_order(models[model].as_filed, rows)
        for note in (*pair.warnings, *pair.notes, *rows_note(str(recipe.base), str(model), rows)):
            self.session.run.note(note)
        return replace(pair, donor=models[self.matched], watched=False)

    def _shared_rows(self) -> RowPair | None:
        """Rows of shared tokens if it has another vocabulary than the anchor, or its base other ids."""
        base, donor, config = self.session.base, self.session.models[self.matched], self.session.recipe.config
        rows = shared_rows([base, donor])
        if rows is None:
            return None
        if self.origin is not None and (config.tokenizer or config.tokenizer_source):
            problem = f"the task vector is carried to the token ids of {config.base_model}, which differ from its own"
            remedy = "leave out 'tokenizer' and 'tokenizer_source'"
            raise RecipeError(problem, where=str(self.matched), remedy=remedy)
        self.session.run.note(matched_on(base, donor, len(rows[0])))
        return rows

    @cached_property
    def from_file(self) -> Alignment | None:
        """The alignment of a file under 'alignment'."""
        if (path := self.value("alignment")) is None:
            return None
        session, matched, run = self.session, self.matched, self.session.run
        alignment = load_for(path, session.base, session.models[matched], cache=session.options.transformers_cache)
        options = options_of(alignment.transforms, alignment.folded)
        self._checked(matched, options, None if options.residual != "none" else {})
        run.aligned(self.name, alignment, path)
        data, learned = (alignment.metadata.get(key) for key in ("data", "learned"))
        if isinstance(data, str):
            run.used(f"learning how {matched} is aligned", data, int(alignment.metadata.get("samples") or 0))
        words = f" It was learned: {learned['verdict']}." if isinstance(learned, dict) and "verdict" in learned else ""
        run.note(f"`{matched}` was aligned by the file {path}; nothing was matched.{words}")
        return alignment

    @property
    def folded(self) -> tuple[str, ...]:
        """Streams that have to be folded in every model of the merge, because its rotation needs it."""
        return self.pair.folded if self.from_file is None else self.from_file.folded

    @cached_property
    def whole(self) -> Callable[[], Alignment] | None:
        """Gives its alignment across the whole model, found once; None: each block is matched by itself."""
        from rotation_merge.matching.match_on import matcher

        session, means, alignment = self.session, self.means, self.from_file
        if means is not None:
            return lambda: means()[str(self.model)]
        if alignment is not None:
            return lambda: alignment
        names, how = (str(session.recipe.base), str(self.matched)), self.value("match_on") or WEIGHTS
        samples = {"data": self.value("data") or "self", "count": self.value("samples"), "seed": session.seed}
        match = matcher(how, *names, **samples, device=session.devices[0])
        if self.pair.options.residual == "none" and match is match_model and not session.recipe.on_whole_models:
            return None
        check_depth(session.base, self.pair.donor, WHOLE_ONLY)
        return cache(partial(match_whole, session, self.pair, self.name, match))

    def whole_transforms(self) -> Transforms:
        """Those of its alignment across the whole model."""
        assert self.whole is not None
        return self.whole().transforms

    @cached_property
    def transfer(self) -> TransferConfig:
        """What the recipe says of carrying its change."""
        recipe = self.session.recipe
        keys = {name: option.name_in_recipes(name) for name, option in TransferConfig.options().items()}
        keys["alignment"] = "alignment"
        known = {name: key for name, key in keys.items() if key in OF_MODEL}
        values = {name: recipe.given(key, self.reader, self.model) for name, key in known.items()}
        values = {name: value for name, value in values.items() if value is not None}
        config = TransferConfig(**values, match=self.pair.options, seed=self.session.seed, untie=recipe.value("untie"))
        try:
            config.check_use()
        except RecipeError as error:
            raise RecipeError(error.what, where=str(self.model), remedy=error.remedy) from error
        if self.origin is None and config.method != "weights":
            remedy = "name the model that it was tuned from ('finetuned_from')"
            problem = f"'carry: {config.method}' applies to fine-tunes only"
            raise RecipeError(problem, where=str(self.model), remedy=remedy)
        return config

    @property
    def scale(self) -> float:
        """The factor of its task vector."""
        return 1.0 if self.transfer.factor is None else self.transfer.factor

    @cached_property
    def carried(self) -> Callable[[], View] | None:
        """Gives the anchor with its change, where samples choose that; None: the change is added by its factor."""
        run, config = self.session.run, None if self.means is not None else self.transfer
        if config is None or (origin := self.origin) is None:
            return None
        if types := quantised(folder_of(self.model.model, self.session.options.transformers_cache) or ""):
            run.note(f"`{self.model}` {types}.")
        if not config.needs_samples:
            note = "the effect of the carried change is not measured; 'carry_scale: auto' measures it on samples"
            run.note(f"`{self.model}`: {note}.")
            return None
        if self.pair.shared is not None:
            problem = f"{origin} has tokens at other ids than the anchor, so samples cannot be shared"
            remedy = "leave out 'carry' and 'carry_scale: auto': weights alone can be carried to other ids"
            raise RecipeError(problem, where=str(self.model), remedy=remedy)
        return cache(partial(carried_on_samples, self.session, str(self.model), origin, config))

    def preparations(self) -> list[Callable[[], object]]:
        """What is found before single tensors are merged: its alignment as a whole, a change that samples choose."""
        return [find for find in (self.whole, self.carried) if find is not None]


def settled_donors(session: Session, blocks: Sequence[OutputBlock]) -> dict[ModelReference, Donor]:
    """The donors of one merge, without the base, checked against the output's blocks; no weight is read."""
    recipe, readers, donors = session.recipe, readers_of(blocks), dict[ModelReference, Donor]()
    readers.pop(recipe.base, None)
    settle_presets(recipe, session.models, readers, session.run)
    check_adapter(session.base)
    means = cache(partial(match_to_means, session, donors)) if recipe.value("anchor") == "mean" else None
    for model, reader in readers.items():
        layers = layers_of(model, blocks) if means is None else None
        donors[model] = donor = Donor(session, model, reader, layers, means)
        options = donor.pair.options  # which judges headers, before a file of an alignment has all weights read
        how = "as a whole" if donor.preparations() else "block by block"
        LOG.info("%s is aligned %s: %s", donor.name, how, options)
    if means is not None:
        _check_same_options(donors)
        _sources_of_mean(session, donors)
    return donors


def check_adapter(model: View, origin: View | None = None) -> None:
    """Refuse a model with an adapter that was trained neither on this model nor on its base."""
    bases, remedy = ([], OWN_BASE) if origin is None else ([origin], "name its own base ('finetuned_from')")
    check_own_base(model, bases, f"{remedy}, or run mergekit with --allow-crimes")


def carried_on_samples(session: Session, donor: str, origin: ModelReference, config: TransferConfig) -> View:
    """Runs the models on samples: the anchor as a donor changes it."""
    from rotation_merge.carrying.bases import Transfer  # not for every merge: they import all ways of carrying
    from rotation_merge.carrying.transfer import carried as transferred

    run = session.run
    models = donor, str(origin), str(session.recipe.base)
    settings: dict[str, Any] = {"device": str(session.options.device or "cpu"), "dtype": "float32", "untie": True}
    with tqdm.tqdm(desc=f"Carrying {donor}", disable=session.options.quiet) as bar:
        watch = lambda *_: bar.update(1)  # noqa: E731
        job = Transfer.of(*models, config, **settings, progress=watch)
        job = replace(job, chat="")  # the merge has the anchor's tokenizer
        view = transferred(job, progress=watch)
    assert isinstance(view, View)
    run.used(f"carrying {donor}", config.data, config.sample_count)
    run.aligned(title(donor, origin), job.alignment)
    if view.report is not None and view.report.lift is not None:
        run.lifts[donor] = view.report.lift
    for line in view.notes[len(job.report.notes) :]:
        run.note(f"`{donor}`: {line}")
    return view


CARRY_FIRST = "carry the donor first ('rotation-merge carry') and {} the output, or use delegate task_arithmetic"


def check_meaning(session: Session, blocks: Sequence[OutputBlock], donors: Mapping[ModelReference, Donor]) -> None:
    """Refuse donors of which the delegate knows no maps, no statistics of what is averaged, or nothing to transport."""
    recipe, method = session.recipe, session.recipe.own_method
    if method is None:
        return
    name = f"delegate {method.spec.name}"
    method.check_known(session.base)
    words = [t.name for t in session.base.architecture.tensors() if t.vocabulary_axis is not None]
    by_row = bool(method.statistics) and not method.maps_only and not all(map(recipe.excluded, words))
    config, options = recipe.config, session.options
    rearranged = config.tokenizer or config.tokenizer_source or options.unsafe_truncate_embeddings
    if method.whole_models:
        _check_layers(session, blocks)
    for model, donor in donors.items():
        if method.whole_models and donor.origin is None:
            _one_vocabulary(session, model, f"{name} runs all models on one set of token ids", "use another delegate")
        if method.statistics and donor.carried is not None:
            problem = f"{name} needs statistics of the carried model, but these are the donor's"
            raise RecipeError(problem, where=str(model), remedy=CARRY_FIRST.format("measure and merge"))
        if by_row and rearranged:
            _one_vocabulary(session, model, f"{name} weighs the row of every token", "use delegate regmean")
        if method.on_samples and donor.value("data") is not None:
            remedy = "leave 'data' out: plans then come from weights"
            _one_vocabulary(session, model, f"{name} compares activations on the same tokens", remedy)
        if method.no_changes and donor.origin is not None:
            raise RecipeError(f"{name} {method.no_changes}", where=str(model), remedy=CARRY_FIRST.format("merge"))


def _check_layers(session: Session, blocks: Sequence[OutputBlock]) -> None:
    """Check that every model gives all of its layers in their order."""
    for name in {out.block.module for out in blocks}:
        of_module = [out.sources for out in blocks if out.block.module == name and out.block.index is not None]
        for model in dict.fromkeys(model for sources in of_module for model in sources):
            layers = [sources[model].index for sources in of_module if model in sources]
            if layers != list(range(len(session.base.architecture.layers(name)))):
                problem = f"delegate refit runs whole models, but the slices take layers {layers}"
                remedy = "take all layers in their order ('models:'), or another delegate"
                raise RecipeError(problem, where=str(model), remedy=remedy)


def _one_vocabulary(session: Session, model: ModelReference, why: str, remedy: str) -> None:
    if shared_rows([session.base, session.models[model]]) is not None:
        problem = f"{why}, but its tokens are not those of {session.base.reference}"
        raise RecipeError(problem, where=str(model), remedy=remedy)


# --- alignments of whole models: one block of each in memory at a time ---


def match_whole(session: Session, pair: Pair, name: str, match: Match) -> Alignment:
    """The alignment of one whole model to the anchor, on all devices where weights are matched."""
    devices, recipe, run = session.devices, session.recipe, session.run
    architecture = compared(session.base, [pair.donor], recipe.own_heads, recipe.excluded)
    together = len(devices) > 1 and match is match_model
    if together:
        match = partial(match_model, over=on_devices(devices))
    else:
        pair = replace(pair, device=devices[0])
    with progress_bar(f"Aligning {name}", session.options.quiet) as progress, named(str(recipe.base), name):
        alignment = match(architecture, *pair.matched, pair.options, progress, ledger=run.ledger.under(name))
    if together:  # where every device finds it
        cpu = {space: transform.to(torch.device("cpu")) for space, transform in alignment.transforms.items()}
        alignment = replace(alignment, transforms=cpu)
    run.aligned(name, alignment)
    return alignment


def _check_same_options(donors: Mapping[ModelReference, Donor]) -> None:
    """Refuse donors with different options, which the mean of all models cannot have."""
    by_block: list[AlignConfig] = []
    for model, donor in donors.items():
        of_last, architecture = by_block, donor.pair.architecture
        by_block = [donor.pair.options.at(architecture, block) for block in architecture.blocks]
        if of_last and by_block != of_last:
            problem, remedy = "'anchor: mean' needs the same options for all donors", "set them once, under the"
            raise RecipeError(problem, where=str(model), remedy=f"{remedy} recipe's parameters")


def _sources_of_mean(session: Session, donors: Mapping[ModelReference, Donor]) -> dict[str, Tensors]:
    """The tensors of all models to compare, by name, the base first.

    Raises:
        CheckpointError: their vocabularies have next to nothing in common.
    """
    base, pairs = session.base, {str(model): donor.pair for model, donor in donors.items()}
    sources = {str(session.recipe.base): base.tensors, **{name: pair.sources[1] for name, pair in pairs.items()}}
    turning = any(pair.options.residual != "none" for pair in pairs.values())
    if not turning or (rows := shared_rows([base, *(pair.donor for pair in pairs.values())])) is None:
        return sources
    return dict(zip(sources, on_shared_rows(base.architecture, list(sources.values()), rows), strict=True))


def match_to_means(session: Session, donors: Mapping[ModelReference, Donor]) -> dict[str, Alignment]:
    """The alignments of all models but the base to their running mean, by name."""
    devices, recipe, run = session.devices, session.recipe, session.run
    sources = {name: source.on(devices[0]) for name, source in _sources_of_mean(session, donors).items()}
    pairs, over = [donor.pair for donor in donors.values()], in_threads if len(devices) == 1 else on_devices(devices)
    architecture = compared(session.base, [pair.donor for pair in pairs], recipe.own_heads, recipe.excluded)
    with progress_bar("Aligning to the mean", session.options.quiet) as progress:
        matched = architecture, sources, str(recipe.base), pairs[0].options
        alignments = match_to_mean(*matched, progress, over, ledger=run.ledger)
    for name, alignment in alignments.items():
        run.aligned(name, alignment)
    rounds = max((int(str(alignment.summary["rounds"])) for alignment in alignments.values()), default=0)
    run.note(
        f"All {len(sources)} models were aligned to their running mean ('anchor: mean'), in {rounds} rounds, and are "
        f"expressed in the coordinates of `{recipe.base}`; distances are those to it."
    )
    return alignments


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Progress]:
    """A bar like mergekit's own, which starts anew with every pass over the model.

    Progress also goes to the thread's listener, and the bar shows progress within the block.
    """
    tell = listener()
    with tqdm.tqdm(desc=title, disable=quiet, leave=True) as bar:

        def show(step: str, done: float, total: float) -> None:
            tell(step, done, total)
            if getattr(bar, "desc", None) != f"{title} ({step})":
                bar.reset(total)
                bar.set_description(f"{title} ({step})", refresh=False)
            bar.update(done - bar.n)
            bar.n = done

        with listening(show):
            yield show
