"""Donors whose change is carried on samples or at a scale: `carry` and `carry_scale` beside `finetuned_from`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import tqdm
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.options import MergeOptions

from rotation_merge.carrying.bases import Execution, Transfer, Work, open_bases
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import carried as transferred
from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.keys import MATCHING, OF_MODEL
from rotation_merge.mergekit_plugin.recipe import Recipe, title
from rotation_merge.model.adapter_base import OWN_BASE
from rotation_merge.model.folder import folder_of
from rotation_merge.model.forms import named_as
from rotation_merge.model.gguf import quantised
from rotation_merge.model.nearness import nearness
from rotation_merge.model.open import check_own_base
from rotation_merge.model.view import View

ASKS = (*MATCHING, "carry", "carry_scale", "data")
"""Parameters with which a recipe asks for matching, or lets samples judge."""


def carried(
    recipe: Recipe,
    reader: ConfigReader,
    options: MergeOptions,
    run: Run,
    model: ModelReference,
    origin: ModelReference | None,
    match: AlignConfig,
    shares_vocabulary: bool,
) -> tuple[Callable[[], View] | None, float]:
    """The way a donor's change is carried.

    Args:
        origin: the base that it was tuned from, if its change is merged.
        match: by which groups that is matched.
        shares_vocabulary: whether it has the anchor's tokens at the anchor's ids.

    Returns:
        With samples a function that gives the anchor as the donor changes it, unrounded; else None, and the factor of
        its task vector.

    Raises:
        RecipeError: there is no change to carry, or samples are asked for and its base has tokens at other ids.
    """
    keys = {name: option.name_in_recipes(name) for name, option in TransferConfig.options().items()}
    keys["alignment"] = "alignment"
    values = {name: recipe.given(key, reader, model) for name, key in keys.items() if key in OF_MODEL}
    values = {name: value for name, value in values.items() if value is not None}
    config = TransferConfig(**values, match=match, seed=options.random_seed or 0, untie=recipe.untie)
    try:
        config.check_use()
    except RecipeError as error:
        raise RecipeError(error.what, where=str(model), remedy=error.remedy) from error
    if origin is None:
        if config.method == "weights":
            return None, 1.0
        remedy = "name the model that it was tuned from ('finetuned_from')"
        raise RecipeError(f"'carry: {config.method}' applies to fine-tunes only", where=str(model), remedy=remedy)
    if types := quantised(folder_of(model.model, options.transformers_cache) or ""):
        run.note(f"`{model}` {types}.")
    if not config.needs_samples:
        note = "the effect of the carried change is not measured; 'carry_scale: auto' measures it on samples"
        run.note(f"`{model}`: {note}.")
        return None, 1.0 if config.factor is None else config.factor
    if not shares_vocabulary:
        problem = f"{origin} has tokens at other ids than the anchor, so samples cannot be shared"
        remedy = "leave out 'carry' and 'carry_scale: auto': weights alone can be carried to other ids"
        raise RecipeError(problem, where=str(model), remedy=remedy)
    execution = Execution(str(options.device or "cpu"), "float32")
    names = str(model), str(origin), str(recipe.base)
    return cache(partial(_with_samples, *names, config, execution, run, options.quiet)), 1.0


def check_adapter(model: View, origin: View | None = None) -> None:
    """Refuse a model with an adapter that was trained neither on this model nor on its base.

    Raises:
        CheckpointError: names the bases.
    """
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


def _with_samples(
    donor: str, origin: str, anchor: str, config: TransferConfig, execution: Execution, run: Run, quiet: bool
) -> View:
    """Runs the models on samples: the anchor as a donor changes it."""
    bases = open_bases(anchor, origin, execution.device)
    with tqdm.tqdm(desc=f"Carrying {donor}", disable=quiet) as bar:
        watch = lambda *_: bar.update(1)  # noqa: E731
        work = replace(Work.of(donor, bases, config), chat="")  # the merge has the anchor's tokenizer
        job = Transfer.of(work, bases, config, execution, watch)
        view = transferred(job, progress=watch)
    assert isinstance(view, View)
    run.used(f"carrying {donor}", config.data, config.sample_count)
    run.aligned(title(donor, origin), job.alignment)
    if view.report is not None and view.report.lift is not None:
        run.lifts[donor] = view.report.lift
    for line in view.notes[len(job.report.notes) :]:
        run.note(f"`{donor}`: {line}")
    return view
