"""Donors whose change is carried with samples, or at a scale: `carry` and `scale` beside `finetuned_from`."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from mergekit.options import MergeOptions

from rotation_merge.carrying.unlike import Unlike
from rotation_merge.errors import RecipeError
from rotation_merge.matching.match import Match
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.recipe.names import OPTIONS
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.adapter_base import OWN_BASE, check_own_base
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.nearness import nearness
from rotation_merge.model.sources import Renamed

ASKS = (*OPTIONS, "preset", "match_on", "carry", "scale", "data")
"""Parameters with which a recipe asks for matching, or lets samples judge."""


@dataclass(frozen=True)
class Carried:
    """How a donor's change is carried.

    Attributes:
        carrying: task that carries it with samples: the anchor's tensors as it changes them, by name.
        scale: what its task vector is multiplied by; a task gives the scale of each block.
    """

    carrying: Task | None = None
    scale: float | Task = 1.0


def carried(
    recipe: Recipe,
    reader: ConfigReader,
    options: MergeOptions,
    run: Run,
    model: ModelReference,
    origin: ModelReference | None,
    match: AlignConfig,
    shares_vocabulary: bool,
    finding: Match,
) -> Carried:
    """What a recipe says of how a donor is carried.

    Args:
        origin: what it was tuned from, where it is a change that is merged.
        match: by which groups that is matched.
        shares_vocabulary: whether it has the anchor's.
        finding: finds the maps from its base to the anchor.

    Raises:
        RecipeError: there is no change to carry, or samples mean other things to its base than to the anchor.
    """
    asked = ("carry", "scale", "data", "samples", "steps")
    given = {name: recipe.of_model(name, reader, model) for name in asked}
    way, scale = given["carry"], given["scale"]
    if origin is None:
        if unlike_of(recipe, reader, model).asked:
            what = "'widths' and 'layers_map' are of what fine-tuning changed"
            raise RecipeError(what, where=str(model), remedy="name its base ('finetuned_from')")
        if way == "weights":
            return Carried()
        remedy = "name the model that it was tuned from ('finetuned_from')"
        raise RecipeError(f"'carry: {way}' carries what fine-tuning changed", where=str(model), remedy=remedy)
    unlike = unlike_of(recipe, reader, model)
    by_weights = way == "weights" and scale != "auto"
    if by_weights:
        scale = 1.0 if scale is None else float(scale)
        if not unlike.asked:
            what = "how much of its change arrives in function is not measured; 'scale: auto' measures it on samples"
            run.note(f"`{model}`: {what}.")
            return Carried(scale=scale)
    if not shares_vocabulary and not by_weights:
        raise RecipeError(
            f"the vocabulary of {origin} is not the anchor's: samples mean other things to the two",
            where=str(model),
            remedy="leave 'carry' and 'scale: auto' out: weights alone are carried by the tokens that both have",
        )
    from rotation_merge.carrying.by_samples import Samples
    from rotation_merge.carrying.by_weights import Settings
    from rotation_merge.mergekit_plugin.planning.carry_task import Carry
    from rotation_merge.model.writing import Storage
    from rotation_merge.run.written import SELF

    samples = Samples(
        data=given["data"] or SELF,
        count=given["samples"],
        seed=options.random_seed or 0,
        scale=None if scale in (None, "auto") else float(scale),
        steps=given["steps"],
        way=way,
    )
    file, device = recipe.of_model("alignment", reader, model), str(options.device or "cpu")
    task = Carry(
        key=f"carry:{model}",
        label="",
        donor=str(model),
        origin=str(origin),
        anchor=str(recipe.base),
        settings=Settings(match, file, 1.0, device, 0, Storage(untie=recipe.untie), unlike, finding),
        samples=samples,
        run=run,
        quiet=options.quiet,
    )
    return Carried(carrying=task) if samples.way != "weights" or unlike.asked else Carried(scale=task)


def unlike_of(recipe: Recipe, reader: ConfigReader, model: ModelReference) -> Unlike:
    """What a recipe says of a donor's base: which of its shapes may differ from the anchor's."""
    widths, layers = (recipe.of_model(name, reader, model) for name in ("widths", "layers_map"))
    return Unlike(bool(widths), str(layers or ""))


def check_adapter(model: Model, origin: Model | None = None) -> None:
    """Refuse a model whose adapter was trained neither on the model that it stands beside nor on that one's base.

    Raises:
        CheckpointError: names the bases.
    """
    remedy = f"{OWN_BASE}; or run mergekit with --allow-crimes"
    if origin is None:
        check_own_base(model, remedy=remedy)
    else:
        check_own_base(model, [origin], "name its own base ('finetuned_from'), or run mergekit with --allow-crimes")


def added_as_it_is(
    recipe: Recipe, reader: ConfigReader, model: ModelReference, base: Model, origin: Model
) -> tuple[bool, str]:
    """Whether a donor's change is added as it is, because its base and the anchor share their coordinates and the
    recipe asks for no matching; and what there is to say of it."""
    near = nearness(base.architecture, base, Renamed(origin, origin.architecture, base.architecture))
    if not near.shared:
        return False, ""
    words = f"`{model}`: {origin.reference} and {base.reference} share their coordinates ({near.words})"
    asked = [name for scope in reader.parameter_sources(model) for name in scope or () if name in ASKS]
    if asked:
        return False, f"{words}: what it changed could be added as it is, but '{asked[0]}' asks for more."
    return True, f"{words}: what it changed is added as it is."
