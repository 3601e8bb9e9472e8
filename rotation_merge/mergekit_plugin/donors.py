"""A recipe's donors: what each is matched to, by which options, its whole alignment, and how its change is carried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import tqdm
from mergekit.common import ModelReference
from mergekit.config import ConfigReader

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import RowPair
from rotation_merge.carrying.tokens import check_same_set, check_tuned_tokens
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.matching.alignment import Alignment, load_for
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Layers, Pair, check_depth, check_pair, options_of
from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.keys import MATCHING, OF_MODEL, OPTIONS, PRESETS, UNMOVED
from rotation_merge.mergekit_plugin.output import OutputBlock, layers_of, readers_of, whole_slice
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.folder import folder_of
from rotation_merge.model.forms import named_as
from rotation_merge.model.gguf import quantised
from rotation_merge.model.heads import compared
from rotation_merge.model.labels import in_class_order, label_rows, rows_note
from rotation_merge.model.nearness import RELATED, cosine_text, likeness, nearness
from rotation_merge.model.open import OWN_BASE, check_own_base
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, matched_on, on_shared_rows, shared_rows
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices

LOG = logging.getLogger(__name__)

ASKS = (*MATCHING, "carry", "carry_scale", "data")
"""Parameters with which a recipe asks for matching, or lets samples judge."""


@dataclass(frozen=True, eq=False)
class Donor:
    """One donor of a recipe. Its base, pair and alignment are looked up and checked when they are first asked for.

    Attributes:
        reader: looks up its parameters.
        layers: which of the anchor's layers meets which of its own; None: each meets the one at its own place.
        means: gives the alignments of all donors to the mean of the models, where that is the anchor.
        readers: looks up its parameters in the anchor's blocks, by their names, once these are known.
    """

    session: Session
    model: ModelReference
    reader: ConfigReader
    layers: Layers | None = None
    means: Callable[[], Mapping[str, Alignment]] | None = None
    readers: Mapping[str, ConfigReader] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A parameter of it; its default where it is not given."""
        return self.session.recipe.value(name, self.reader, self.model)

    def given(self, reader: ConfigReader | None = None) -> dict[str, Any]:
        """The parameters that the recipe gives for it, as they are written; by default where it first counts."""
        scopes = (scope or {} for scope in (reader or self.reader).parameter_sources(self.model))
        return {name: value for scope in reversed(list(scopes)) for name, value in scope.items()}

    def check_slices(self) -> None:
        """Refuse parameters that hold for the whole model and are not the same in all slices."""
        for name in (*OF_MODEL, "residual"):
            values = (self.session.recipe.value(name, reader, self.model) for reader in self.readers.values())
            if len({str(value) for value in values}) > 1:
                problem = f"'{name}' is not the same for all layers, but holds for the whole model"
                raise self.fault(problem, "write the same under every slice")

    def fault(self, problem: str, remedy: str) -> RecipeError:
        """The error for a recipe that asks of it what cannot be done."""
        return RecipeError(problem, where=str(self.model), remedy=remedy)

    @cached_property
    def origin(self) -> ModelReference | None:
        """The base that it was fine-tuned from, if its task vector is to be carried over, checked with both models."""
        if (path := self.value("finetuned_from")) is None:
            return None
        origin, models = ModelReference.model_validate(path), self.session.models
        models.together(self.session.recipe.base, [origin])
        check_same_set(self.session.base, models[origin])
        check_tuned_tokens(models[origin], models[self.model])
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
        session = self.session
        check_adapter(session.models[self.model], None if self.origin is None else session.models[self.origin])
        as_it_is, notes = self._nearness
        matched = self.value("alignment") is None and not as_it_is
        pair = self._checked(self.model, self.options if matched else NOTHING, self.layers)
        shared = self.means is None and (self.origin is not None or pair.options.residual != "none")
        for note in notes:
            session.run.note(note)
        return replace(pair, warnings=(*pair.warnings, *notes), shared=self._shared_rows() if shared else None)

    @cached_property
    def options(self) -> AlignConfig:
        """The options that the recipe states for it, which know those of each block."""
        whole, readers = self._stated("", self.reader), self.readers
        stated = [{n: x for n, x in self.given(r).items() if n in OPTIONS} for r in (self.reader, *readers.values())]
        plain = all(isinstance(value, bool | int | float | str) for value in stated[0].values())
        if plain and all(of_block == stated[0] for of_block in stated):
            return whole
        return whole.varying(lambda block, t: self._stated(block, readers.get(block) or self.reader.with_t(t)))

    def options_in(self, block: str, reader: ConfigReader) -> AlignConfig:
        """The options by which one block is matched, with the lookup of the parameters that hold there."""
        return NOTHING if self._nearness[0] else self._stated(block, reader)

    def _stated(self, block: str, reader: ConfigReader) -> AlignConfig:
        return AlignConfig(**{**self._preset, **self.session.recipe.fields(AlignConfig, reader, self.model, block)})

    @cached_property
    def _nearness(self) -> tuple[bool, list[str]]:
        """Whether its change is added as it is, where its base has the anchor's coordinates; and a note on that."""
        if self.origin is None or self.value("alignment") is not None:
            return False, []
        base, origin = self.session.base, self.session.models[self.origin]
        near = nearness(base.architecture, base.tensors, named_as(base.architecture, origin, origin.architecture))
        if not near.shared:
            return False, []
        options = [name for name in self.given() if name in ASKS]
        added = f"could be added as it is, but '{options[0]}' is set" if options else "is added as it is"
        words = f"{origin.reference} and {base.reference} share their coordinates ({near.words})"
        return not options, [f"`{self.model}`: {words}: its change {added}."]

    @cached_property
    def _preset(self) -> Mapping[str, Any]:
        """The options of the preset that the recipe names, chosen where it says `auto`; the run notes them."""
        session, preset = self.session, self.session.recipe.value("preset")
        if session.recipe.config.merge_method in OWN:
            return PRESETS[UNMOVED]
        if preset is None:
            return {}
        words = f"Preset {preset}"
        if preset == "auto":
            cosine = likeness(session.base, session.models[self.model])
            preset = "far" if cosine < RELATED else "near"
            measured = f"mean cosine of its matrices to the base's: {cosine_text(cosine)}"
            words = f"Preset auto: {preset} for `{self.model}` ({measured})"
        options = ", ".join(f"{name}: {value}" for name, value in PRESETS[preset].items())
        session.run.note(f"{words}: {options}, unless the recipe says otherwise.")
        return PRESETS[preset]

    def _checked(self, model: ModelReference, options: AlignConfig, layers: Layers | None) -> Pair:
        """The pair under these options, with the classes of it, and of `model`, in the order of the anchor."""
        base, models, recipe = self.session.base, self.session.models, self.session.recipe
        donor, excluded = models[self.matched].as_filed, recipe.excluded
        pair = check_pair(base, donor, options, layers=layers, excluded=excluded, averaged=self.origin is None)
        rows = label_rows(base, models[model].as_filed, excluded)
        models[self.matched] = in_class_order(donor, pair.rows)
        models[model] = in_class_order(models[model].as_filed, rows)
        for note in (*pair.warnings, *pair.notes, *rows_note(str(recipe.base), str(model), rows)):
            self.session.run.note(note)
        return replace(pair, donor=models[self.matched], watched=False)

    def _shared_rows(self) -> RowPair | None:
        """Rows of shared tokens if it has another vocabulary than the anchor, or its base other ids."""
        base, donor = self.session.base, self.session.models[self.matched]
        if (rows := shared_rows([base, donor])) is None:
            return None
        if self.origin is not None and self.session.recipe.new_tokens:
            problem = f"the task vector is carried to the token ids of {base.reference}, which differ from its own"
            raise self.fault(problem, "leave out 'tokenizer' and 'tokenizer_source'")
        self.session.run.note(matched_on(base, donor, len(rows[0])))
        return rows

    @property
    def token_warnings(self) -> list[str]:
        """A line if rows of its tokens stand at other ids than the anchor's, and nothing brings them together."""
        try:
            check_token_ids(self.session.base, self.session.models[self.matched])
        except CheckpointError as error:
            return [] if self.session.recipe.new_tokens else [str(error)]
        return []

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

    @property
    def moves_streams(self) -> bool:
        """Whether a residual stream of it moves."""
        alignment = self.from_file
        return bool(self.pair.streams) if alignment is None else alignment.moves_streams(self.pair.architecture)

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
        samples = {"samples": self.value("data") or "self", "count": self.value("samples"), "seed": session.seed}
        match = matcher(how, *names, **samples, device=session.devices[0])
        if self.pair.options.residual == "none" and match is match_model and not session.recipe.on_whole_models:
            return None
        check_depth(session.base, self.pair.donor, "align them layer by layer: 'residual: none' with slices")
        return cache(partial(match_whole, session, self.pair, self.name, match))

    @cached_property
    def transfer(self) -> TransferConfig:
        """What the recipe says of carrying its change."""
        recipe = self.session.recipe
        values = recipe.fields(TransferConfig, self.reader, self.model) | {"alignment": self.value("alignment")}
        facts = {"match": self.pair.options, "seed": self.session.seed, "untie": recipe.value("untie")}
        config = TransferConfig(**values, **facts)
        try:
            config.check_use()
        except RecipeError as error:
            raise self.fault(error.what, error.remedy or "") from error
        if self.origin is None and config.method != "weights":
            problem = f"'carry: {config.method}' applies to fine-tunes only"
            raise self.fault(problem, "name the model that it was tuned from ('finetuned_from')")
        return config

    @cached_property
    def carried(self) -> Callable[[], View] | None:
        """Gives the anchor with its change, where samples choose that; None: the change is added by its factor."""
        run, origin = self.session.run, self.origin
        if self.means is not None or not (config := self.transfer) or origin is None:
            return None
        if types := quantised(folder_of(self.model.model, self.session.options.transformers_cache) or ""):
            run.note(f"`{self.model}` {types}.")
        if not config.needs_samples:
            note = "the effect of the carried change is not measured; 'carry_scale: auto' measures it on samples"
            run.note(f"`{self.model}`: {note}.")
            return None
        if self.pair.shared is not None:
            problem = f"{origin} has tokens at other ids than the anchor, so samples cannot be shared"
            raise self.fault(problem, "leave out 'carry' and 'carry_scale: auto': weights alone go to other ids")
        return cache(partial(carried_on_samples, self.session, str(self.model), origin, config))

    def preparations(self) -> list[Callable[[], object]]:
        """What is found before single tensors are merged: its alignment as a whole, a change that samples choose."""
        return [find for find in (self.whole, self.carried) if find is not None]


def settled_donors(session: Session, blocks: Sequence[OutputBlock]) -> dict[ModelReference, Donor]:
    """The donors of one merge, without the base, checked against the output's blocks; no weight is read."""
    recipe, readers, donors = session.recipe, readers_of(blocks), dict[ModelReference, Donor]()
    readers.pop(recipe.base, None)
    check_adapter(session.base)
    means = cache(partial(match_to_means, session, donors)) if recipe.value("anchor") == "mean" else None
    for model, reader in readers.items():
        layers = layers_of(model, blocks) if means is None else None
        in_blocks = {out.anchor.name: out.reader for out in reversed(blocks) if model in out.sources}
        donors[model] = donor = Donor(session, model, reader, layers, means, in_blocks)
        donor.check_slices()
        options = donor.pair.options  # which judges headers, before a file of an alignment has all weights read
        how = "as a whole" if donor.preparations() else "block by block"
        LOG.info("%s is aligned %s: %s", donor.name, how, options)
    if means is not None:
        _check_same_options(donors)
    return donors


def listed_donors(session: Session) -> list[Donor]:
    """The donors under a recipe's `models`, each opened and checked when something is asked of it."""
    recipe, entries = session.recipe, session.recipe.config.models or []
    recipe.settle_heads(session.models[entry.model] for entry in entries)
    reader = ConfigReader(config=recipe.config, t=0).for_out_slice(whole_slice(recipe, entries, 1))
    return [Donor(session, entry.model, reader) for entry in entries if entry.model != recipe.base]


def check_adapter(model: View, origin: View | None = None) -> None:
    """Refuse a model with an adapter that was trained neither on this model nor on its base."""
    bases, remedy = ([], OWN_BASE) if origin is None else ([origin], "name its own base ('finetuned_from')")
    check_own_base(model, bases, f"{remedy}, or run mergekit with --allow-crimes")


def carried_on_samples(session: Session, donor: str, origin: ModelReference, config: TransferConfig) -> View:
    """Runs the models on samples: the anchor as a donor changes it."""
    from rotation_merge.carrying.bases import Transfer  # not for every merge: they import all ways of carrying
    from rotation_merge.carrying.transfer import carried as transferred

    run, names = session.run, (donor, str(origin), str(session.recipe.base))
    settings: dict[str, Any] = {"device": str(session.options.device or "cpu"), "dtype": "float32", "untie": True}
    with progress_bar(f"Carrying {donor}", session.options.quiet) as progress:
        job = Transfer.of(*names, config, **settings, progress=progress)
        job = replace(job, chat="")  # the merge has the anchor's tokenizer
        view = transferred(job, progress=progress)
    assert isinstance(view, View)
    run.used(f"carrying {donor}", config.data, config.sample_count)
    run.aligned(title(donor, origin), job.alignment)
    if view.report is not None and view.report.lift is not None:
        run.lifts[donor] = view.report.lift
    for line in view.notes[len(job.report.notes) :]:
        run.note(f"`{donor}`: {line}")
    return view


# --- donors that an average of our own cannot take ---

CARRY_FIRST = "carry the donor first ('rotation-merge carry'), measure and merge the output, or use task_arithmetic"


def check_meaning(session: Session, blocks: Sequence[OutputBlock], donors: Mapping[ModelReference, Donor]) -> None:
    """Refuse donors of which the delegate knows no maps, no statistics of what is averaged, or nothing to transport."""
    recipe, method = session.recipe, session.recipe.own_method
    if method is None:
        return
    method.check_known(session.base)
    name = f"delegate {method.spec.name}"
    words = (t.name for t in session.base.architecture.tensors() if t.vocabulary_axis is not None)
    by_row = bool(method.statistics) and not method.maps_only and not all(map(recipe.excluded, words))
    for model in readers_of(blocks) if method.whole_models else ():
        _check_all_layers(session, model, layers_of(model, blocks))
    for model, donor in donors.items():
        if method.statistics and donor.carried is not None:
            raise donor.fault(f"{name} needs statistics of the carried model, but these are the donor's", CARRY_FIRST)
        if method.no_changes and donor.origin is not None:
            raise donor.fault(f"{name} {method.no_changes}", CARRY_FIRST)
        reasons = {
            "runs all models on one set of token ids": method.whole_models and donor.origin is None,
            "weighs the row of every token": by_row
            and (recipe.new_tokens or session.options.unsafe_truncate_embeddings),
            "compares activations on the same tokens": method.on_samples and donor.value("data") is not None,
        }
        why = next((words for words, applies in reasons.items() if applies), None)
        if why and shared_rows([session.base, session.models[model]]) is not None:
            problem = f"{name} {why}, but its tokens are not those of {session.base.reference}"
            raise donor.fault(problem, "use another delegate (regmean weighs no rows, ot_fusion without 'data')")


def _check_all_layers(session: Session, model: ModelReference, layers: Layers) -> None:
    """Check that a model gives all of its layers in their order."""
    for module, pairs in layers.items():
        numbers = [number for _, number in pairs]
        if numbers != list(range(len(session.base.architecture.layers(module)))):
            problem = f"delegate refit runs whole models, but the slices take layers {numbers}"
            remedy = "take all layers in their order ('models:'), or another delegate"
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
    """Refuse donors that cannot be aligned to their mean: with different options, or next to no tokens in common."""
    pairs = [donor.pair for donor in donors.values()]
    options = [[pair.options.at(pair.architecture, block) for block in pair.architecture.blocks] for pair in pairs]
    if any(of_donor != options[0] for of_donor in options):
        problem, remedy = "'anchor: mean' needs the same options for all donors", "set them once"
        raise RecipeError(problem, where="models", remedy=f"{remedy}, under the recipe's parameters")
    _rows_of_mean(donors)


def _rows_of_mean(donors: Mapping[ModelReference, Donor]) -> tuple[torch.Tensor, ...] | None:
    """Rows of the tokens that all models share, if streams move and vocabularies differ."""
    pairs = [donor.pair for donor in donors.values()]
    turning = any(pair.options.residual != "none" for pair in pairs)
    return shared_rows([pairs[0].anchor, *(pair.donor for pair in pairs)]) if turning else None


def match_to_means(session: Session, donors: Mapping[ModelReference, Donor]) -> dict[str, Alignment]:
    """The alignments of all models but the base to their running mean, by name."""
    devices, recipe, run, pairs = session.devices, session.recipe, session.run, [d.pair for d in donors.values()]
    names = [str(model) for model in (recipe.base, *donors)]
    tensors = [session.base.tensors, *(pair.sources[1] for pair in pairs)]
    if (rows := _rows_of_mean(donors)) is not None:
        tensors = on_shared_rows(session.base.architecture, tensors, rows)
    sources = {name: source.on(devices[0]) for name, source in zip(names, tensors, strict=True)}
    over = in_threads if len(devices) == 1 else on_devices(devices)
    architecture = compared(session.base, [pair.donor for pair in pairs], recipe.own_heads, recipe.excluded)
    with progress_bar("Aligning to the mean", session.options.quiet) as progress:
        matched = architecture, sources, names[0], pairs[0].options
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
    """A bar like mergekit's own; progress also goes to the thread's listener, and the bar shows it within the block."""
    tell = listener()
    with tqdm.tqdm(desc=title, disable=quiet, miniters=0) as bar:  # drawn by time alone, whatever a step counts

        def show(step: str, done: float, total: float) -> None:
            tell(step, done, total)
            bar.total = total
            bar.set_description(f"{title} ({step})", refresh=False)
            bar.update(done - bar.n)

        with listening(show):
            yield show
