"""A recipe's donors: what each is matched to, by which options, its whole alignment, and how its change is carried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import tqdm
from mergekit.common import ModelReference
from mergekit.config import ConfigReader

from rotation_merge.architecture.model import Architecture
from rotation_merge.carrying.bases import Transfer
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import RowPair
from rotation_merge.carrying.tokens import check_no_added_tokens, check_same_set
from rotation_merge.carrying.transfer import carried as transferred
from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment, load_for
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Layers, Pair, check_depth, check_pair, residual_of
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


@dataclass(frozen=True)
class Donor:
    """One donor's part.

    Attributes:
        name: in the report.
        pair: the checked pair of the anchor and it, or its origin.
        origin: the model it was fine-tuned from, if its task vector is to be carried over.
        folded: streams that have to be folded in every model of the merge, because its rotation needs it.
        whole: gives its alignment across the whole model, found once; None: each block is matched by itself.
        carried: gives the anchor with its change, where samples choose that; else `scale` is the factor of its task
            vector.
    """

    name: str
    pair: Pair
    origin: ModelReference | None = None
    folded: tuple[str, ...] = ()
    whole: Callable[[], Alignment] | None = None
    carried: Callable[[], View] | None = None
    scale: float = 1.0

    def whole_transforms(self) -> Transforms:
        """Those of its alignment across the whole model."""
        assert self.whole is not None
        return self.whole().transforms

    def prepare(self) -> None:
        """Find the alignment of the whole model, and carry what needs samples."""
        for find in (self.whole, self.carried):
            if find is not None:
                find()


def settled_donors(session: Session, blocks: Sequence[OutputBlock]) -> dict[ModelReference, Donor]:
    """The donors of one merge, without the base, checked against the output's blocks; no weight is read."""
    recipe, readers = session.recipe, readers_of(blocks)
    readers.pop(recipe.base, None)
    settle_presets(recipe, session.models, readers, session.run)
    check_adapter(session.base)
    donors = {model: _settled(session, model, reader, blocks) for model, reader in readers.items()}
    if recipe.mean:
        donors = _to_mean(session, donors)
    for donor in donors.values():
        how = "block by block" if donor.whole is None else "as a whole"
        LOG.info("%s is aligned %s: %s", donor.name, how, donor.pair.options)
    return donors


def _settled(session: Session, model: ModelReference, reader: ConfigReader, blocks: Sequence[OutputBlock]) -> Donor:
    recipe, models, run = session.recipe, session.models, session.run
    origin, file = _origin(session, model, reader), recipe.of_model("alignment", reader, model)
    matched, name, words = origin or model, title(model, origin), ""
    check_adapter(models[model], models[origin] if origin is not None else None)
    if origin is not None and file is None:
        unmoved, words = added_as_it_is(reader, model, session.base, models[origin])
        if unmoved:
            recipe.relations[model] = UNMOVED
    options = NOTHING if file is not None else recipe.varying(reader, model)
    layers = None if recipe.mean else layers_of(model, blocks)
    pair = _checked(session, matched, model, options, layers, averaged=origin is None)
    if words:
        run.note(words)
        pair = replace(pair, warnings=(*pair.warnings, words))
    donor = Donor(name, pair, origin, pair.folded)
    if recipe.mean:
        return donor
    if origin is not None or pair.options.residual != "none":
        donor = replace(donor, pair=replace(pair, shared=_rows(session, matched, carried=origin is not None)))
    donor = _matching(session, donor, model, reader) if file is None else _moved_by(session, donor, model, file)
    return _carried(session, donor, model, reader)


def _origin(session: Session, model: ModelReference, reader: ConfigReader) -> ModelReference | None:
    """The base that a donor was fine-tuned from, checked with both models."""
    path, models = session.recipe.of_model("finetuned_from", reader, model), session.models
    if path is None:
        return None
    origin = ModelReference.model_validate(path)
    models.together(session.recipe.base, [origin])
    check_same_set(session.base, models[origin])
    check_no_added_tokens(models[origin], models[model])
    check_token_ids(models[origin], models[model], tuned=True)
    check_adapter(models[origin])
    return origin


def _checked(
    session: Session,
    matched: ModelReference,
    model: ModelReference,
    options: AlignConfig,
    layers: Layers | None,
    averaged: bool = False,
) -> Pair:
    """Check that the model can be moved under these options; doubts become notes."""
    base, models, excluded = session.base, session.models, session.recipe.excluded
    untie, donor = session.recipe.untie, models[matched].as_filed
    pair = check_pair(base, donor, options, untie=untie, layers=layers, excluded=excluded, averaged=averaged)
    rows = label_rows(base, models[model].as_filed, excluded)
    models[matched] = in_class_order(donor, pair.rows)
    models[model] = in_class_order(models[model].as_filed, rows)
    for note in (*pair.warnings, *pair.notes, *rows_note(str(session.recipe.base), str(model), rows)):
        session.run.note(note)
    return replace(pair, donor=models[matched], watched=False)


def _rows(session: Session, donor: ModelReference, carried: bool) -> RowPair | None:
    """Rows of shared tokens if the donor has another vocabulary than the anchor, or its base other ids."""
    base, config = session.base, session.recipe.config
    rows = shared_rows([base, session.models[donor]])
    if rows is None:
        return None
    if carried and (config.tokenizer or config.tokenizer_source):
        problem = f"the task vector is carried to the token ids of {session.recipe.base}, which differ from its own"
        raise RecipeError(problem, where=str(donor), remedy="leave out 'tokenizer' and 'tokenizer_source'")
    session.run.note(matched_on(base, session.models[donor], len(rows[0])))
    return rows


def _matching(session: Session, donor: Donor, model: ModelReference, reader: ConfigReader) -> Donor:
    """The donor with what matches the whole model; unchanged where each block is matched by itself."""
    from rotation_merge.matching.match_on import matcher

    recipe, pair = session.recipe, donor.pair
    how, data, count = (recipe.of_model(name, reader, model) for name in ("match_on", "data", "samples"))
    names, device = (str(recipe.base), str(donor.origin or model)), session.devices[0]
    match = matcher(how or WEIGHTS, *names, data=data or "self", count=count, seed=session.seed, device=device)
    if pair.options.residual == "none" and match is match_model and not recipe.on_whole_models:
        return replace(donor, folded=())
    remedy = "whole models can only be aligned layer by layer; use 'residual: none' with slices"
    check_depth(session.base, pair.donor, remedy)
    return replace(donor, whole=cache(partial(match_whole, session, pair, donor.name, match)))


def _moved_by(session: Session, donor: Donor, model: ModelReference, path: str) -> Donor:
    """The donor with the alignment of a file under 'alignment'."""
    matched, run = donor.origin or model, session.run
    alignment = load_for(path, session.base, session.models[matched], cache=session.options.transformers_cache)
    residual = residual_of(alignment.transforms, alignment.folded)
    _checked(session, matched, matched, NOTHING.with_residual(residual), None if residual != "none" else {})
    run.aligned(donor.name, alignment, path)
    data, learned = (alignment.metadata.get(key) for key in ("data", "learned"))
    if isinstance(data, str):
        run.used(f"learning how {matched} is aligned", data, int(alignment.metadata.get("samples") or 0))
    words = f" It was learned: {learned['verdict']}." if isinstance(learned, dict) and "verdict" in learned else ""
    run.note(f"`{matched}` was aligned by the file {path}; nothing was matched.{words}")
    return replace(donor, folded=alignment.folded, whole=lambda: alignment)


def _to_mean(session: Session, donors: dict[ModelReference, Donor]) -> dict[ModelReference, Donor]:
    """All donors, which need the same options, aligned with the base to their mean."""
    architecture, by_block = session.base.architecture, list[AlignConfig]()
    for model, donor in donors.items():
        of_last, options = by_block, donor.pair.options
        by_block = [options.at(architecture, block) for block in architecture.blocks]
        if of_last and by_block != of_last:
            problem, remedy = "'anchor: mean' needs the same options for all donors", "set them once, under the"
            raise RecipeError(problem, where=str(model), remedy=f"{remedy} recipe's parameters")
    aligned = mean_matcher(session, {str(model): donor.pair for model, donor in donors.items()})
    return {model: replace(donor, whole=partial(_of_mean, aligned, str(model))) for model, donor in donors.items()}


def _of_mean(aligned: Callable[[], dict[str, Alignment]], name: str) -> Alignment:
    return aligned()[name]


ASKS = (*MATCHING, "carry", "carry_scale", "data")
"""Parameters with which a recipe asks for matching, or lets samples judge."""


def _carried(session: Session, donor: Donor, model: ModelReference, reader: ConfigReader) -> Donor:
    """The donor with the way that its change is carried: by the factor of its task vector, or chosen on samples."""
    config, origin, run = _transfer(session, reader, model, donor.pair.options), donor.origin, session.run
    if origin is None:
        if config.method == "weights":
            return donor
        remedy = "name the model that it was tuned from ('finetuned_from')"
        raise RecipeError(f"'carry: {config.method}' applies to fine-tunes only", where=str(model), remedy=remedy)
    if types := quantised(folder_of(model.model, session.options.transformers_cache) or ""):
        run.note(f"`{model}` {types}.")
    if not config.needs_samples:
        note = "the effect of the carried change is not measured; 'carry_scale: auto' measures it on samples"
        run.note(f"`{model}`: {note}.")
        return donor if config.factor is None else replace(donor, scale=config.factor)
    if donor.pair.shared is not None:
        problem = f"{origin} has tokens at other ids than the anchor, so samples cannot be shared"
        remedy = "leave out 'carry' and 'carry_scale: auto': weights alone can be carried to other ids"
        raise RecipeError(problem, where=str(model), remedy=remedy)
    return replace(donor, carried=cache(partial(_with_samples, session, model, origin, config)))


def _transfer(session: Session, reader: ConfigReader, model: ModelReference, match: AlignConfig) -> TransferConfig:
    """What the recipe says of carrying a donor's change."""
    keys = {name: option.name_in_recipes(name) for name, option in TransferConfig.options().items()}
    keys["alignment"] = "alignment"
    values = {name: session.recipe.given(key, reader, model) for name, key in keys.items() if key in OF_MODEL}
    values = {name: value for name, value in values.items() if value is not None}
    config = TransferConfig(**values, match=match, seed=session.seed, untie=session.recipe.untie)
    try:
        config.check_use()
    except RecipeError as error:
        raise RecipeError(error.what, where=str(model), remedy=error.remedy) from error
    return config


def check_adapter(model: View, origin: View | None = None) -> None:
    """Refuse a model with an adapter that was trained neither on this model nor on its base."""
    bases, remedy = ([], OWN_BASE) if origin is None else ([origin], "name its own base ('finetuned_from')")
    check_own_base(model, bases, f"{remedy}, or run mergekit with --allow-crimes")


def added_as_it_is(reader: ConfigReader, model: ModelReference, base: View, origin: View) -> tuple[bool, str]:
    """Whether a donor's change is added without alignment, and a note on it.

    This holds if its base and the anchor share their coordinates and the recipe asks for no matching.
    """
    near = nearness(base.architecture, base.tensors, named_as(base.architecture, origin, origin.architecture))
    if not near.shared:
        return False, ""
    words = f"`{model}`: {origin.reference} and {base.reference} share their coordinates ({near.words})"
    options = [name for scope in reader.parameter_sources(model) for name in scope or () if name in ASKS]
    if options:
        return False, f"{words}: its change could be added as it is, but '{options[0]}' is set."
    return True, f"{words}: its change is added as it is."


def _with_samples(session: Session, model: ModelReference, origin: ModelReference, config: TransferConfig) -> View:
    """Runs the models on samples: the anchor as a donor changes it."""
    run, donor = session.run, str(model)
    models = donor, str(origin), str(session.recipe.base)
    settings: dict[str, Any] = {"device": str(session.options.device or "cpu"), "dtype": "float32", "untie": True}
    with tqdm.tqdm(desc=f"Carrying {donor}", disable=session.options.quiet) as bar:
        watch = lambda *_: bar.update(1)  # noqa: E731
        job = replace(
            Transfer.of(*models, config, **settings, progress=watch), chat=""
        )  # the tokenizer is the anchor's
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
    recipe, method, readers = session.recipe, session.recipe.own_method, readers_of(blocks)
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
        if method.on_samples and recipe.of_model("data", readers[model], model) is not None:
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


def mean_matcher(session: Session, pairs: Mapping[str, Pair]) -> Callable[[], dict[str, Alignment]]:
    """Gives the alignments of all models but the base to their running mean, by name, found once.

    Args:
        pairs: of the base and each donor, with the same options.

    Raises:
        CheckpointError: their vocabularies have next to nothing in common.
    """
    recipe, base, donors = session.recipe, session.base, [pair.donor for pair in pairs.values()]
    sources = {str(recipe.base): base.tensors, **{name: pair.sources[1] for name, pair in pairs.items()}}
    options = next((pair.options for pair in pairs.values()), NOTHING)
    if options.residual != "none" and (rows := shared_rows([base, *donors])) is not None:
        shared = on_shared_rows(base.architecture, list(sources.values()), rows)
        sources = dict(zip(sources, shared, strict=True))
    architecture = compared(base, donors, recipe.own_heads, recipe.excluded)
    return cache(partial(_match_mean, session, architecture, sources, options))


def _match_mean(
    session: Session, architecture: Architecture, sources: Mapping[str, Tensors], options: AlignConfig
) -> dict[str, Alignment]:
    devices, base, run = session.devices, str(session.recipe.base), session.run
    sources = {name: source.on(devices[0]) for name, source in sources.items()}
    over = in_threads if len(devices) == 1 else on_devices(devices)
    with progress_bar("Aligning to the mean", session.options.quiet) as progress:
        alignments = match_to_mean(architecture, sources, base, options, progress, over, ledger=run.ledger)
    for name, alignment in alignments.items():
        run.aligned(name, alignment)
    rounds = max((int(str(alignment.summary["rounds"])) for alignment in alignments.values()), default=0)
    run.note(
        f"All {len(sources)} models were aligned to their running mean ('anchor: mean'), in {rounds} rounds, and are "
        f"expressed in the coordinates of `{base}`; distances are those to it."
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
