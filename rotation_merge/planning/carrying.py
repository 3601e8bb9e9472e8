"""Donors whose change is carried with samples, or at a scale: `carry` and `scale` beside `finetuned_from`."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from mergekit.options import MergeOptions

from rotation_merge.checkpoints.unlike import Unlike
from rotation_merge.errors import RecipeError
from rotation_merge.matching.model import Match
from rotation_merge.matching.options import STREAM_MAPS, MatchOptions
from rotation_merge.recipe.reading import Recipe
from rotation_merge.report.run import Run


@dataclass(frozen=True)
class Carried:
    """How a donor's change is carried.

    Attributes:
        carrying: task that carries it with samples: the anchor's tensors as it changes them, by name.
        scale: what its task vector is multiplied by; a task gives the scale of each block.
        streams: which maps of the streams it goes by, where weights carry it (`layer_streams.STREAM_MAPS`).
    """

    carrying: Task | None = None
    scale: float | Task = 1.0
    streams: str = STREAM_MAPS[0]


def carried(
    recipe: Recipe,
    reader: ConfigReader,
    options: MergeOptions,
    run: Run,
    model: ModelReference,
    origin: ModelReference | None,
    match: MatchOptions,
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
    asked = ("carry", "scale", "data", "samples", "steps", "stream_maps")
    given = {name: recipe.of_model(name, reader, model) for name in asked}
    way, scale, streams = given["carry"], given["scale"], given["stream_maps"]
    if streams != STREAM_MAPS[0] and (origin is None or way != "weights"):
        what = f"'stream_maps: {streams}' is of a change that weights carry"
        raise RecipeError(what, where=str(model), remedy="leave it out, or add 'finetuned_from' and no other 'carry'")
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
            return Carried(scale=scale, streams=streams)
    if not shares_vocabulary and not by_weights:
        raise RecipeError(
            f"the vocabulary of {origin} is not the anchor's: samples mean other things to the two",
            where=str(model),
            remedy="leave 'carry' and 'scale: auto' out: weights alone are carried by the tokens that both have",
        )
    from rotation_merge.averaging.carrying import Samples
    from rotation_merge.checkpoints.aligned import Storage
    from rotation_merge.checkpoints.carried import Settings
    from rotation_merge.planning.carry_task import Carry
    from rotation_merge.samples.written import SELF

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
        settings=Settings(match, file, 1.0, device, 0, Storage(untie=recipe.untie), unlike, finding, streams),
        samples=samples,
        run=run,
        quiet=options.quiet,
    )
    return Carried(carrying=task) if samples.way != "weights" or unlike.asked else Carried(scale=task, streams=streams)


def unlike_of(recipe: Recipe, reader: ConfigReader, model: ModelReference) -> Unlike:
    """What a recipe says of a donor's base: which of its shapes may differ from the anchor's."""
    widths, layers = (recipe.of_model(name, reader, model) for name in ("widths", "layers_map"))
    return Unlike(bool(widths), str(layers or ""))
