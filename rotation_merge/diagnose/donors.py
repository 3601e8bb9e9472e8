"""The donors of a recipe, one by one, for commands that compare anchor and donor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mergekit.config import ConfigReader, InputModelDefinition, MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.mergekit_plugin.document import documents, is_ours
from rotation_merge.mergekit_plugin.keys import MATCHING, OF_MODEL, OPTIONS
from rotation_merge.mergekit_plugin.recipe import Recipe, title
from rotation_merge.mergekit_plugin.session import Models, settle_presets
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.open import parse_reference

OTHER_INPUT = "give two models instead"
OF_EACH = (*OPTIONS, "exclude", "preset", "unsupported", "untie")
"""Options of the whole merge that say something about each donor."""


@dataclass(frozen=True)
class RecipeDonor:
    """One donor of a recipe.

    Attributes:
        options: of matching; they may differ from block to block.
        origin: the model it was fine-tuned from, if its task vector is carried over; that one is matched then.
        file: of an alignment, which is applied instead of matching.
        excluded: says of a tensor that it is copied from the anchor, or kept by each model.
        words: whether tokens at other ids stay where they are.
        unsupported: `error` refuses unknown tensors, `merge` keeps them.
        own_heads: names of tensors that every model keeps of its own (`heads_of: each`).
        match_on: weights, activations or both; with samples from `data` (empty: not named), so many.
    """

    anchor: str
    name: str
    options: AlignConfig
    untie: bool = False
    origin: str | None = None
    file: str | None = None
    excluded: Callable[[str], bool] = lambda _: False
    words: bool = True
    unsupported: str = "error"
    match_on: str = WEIGHTS
    data: str = ""
    samples: int = 64
    own_heads: tuple[str, ...] = ()

    @property
    def matched(self) -> str:
        """The model that is matched to the anchor."""
        return self.origin or self.name

    @property
    def title(self) -> str:
        return title(self.name, self.origin)


def donors_of(path: str) -> list[RecipeDonor]:
    """The donors of a recipe for one merge.

    Raises:
        RecipeError: the recipe is at fault, or names none.
    """
    recipe = recipe_at(path)
    models, listed = Models(MergeOptions(), recipe.value("unsupported")), recipe.config.models or []
    settle_presets(recipe, models, [entry.model for entry in listed])
    recipe.settle_heads(models[entry.model] for entry in listed)
    donors = [_donor(recipe, entry) for entry in listed if entry.model != recipe.base]
    if not donors:
        raise RecipeError("names no donor under 'models'", where=path, remedy=OTHER_INPUT)
    return donors


def _donor(recipe: Recipe, entry: InputModelDefinition) -> RecipeDonor:
    config, model = recipe.config, entry.model
    shared = config.model_copy(update={"parameters": _parameters(config, entry)})
    reader = ConfigReader(config=shared, t=0)
    names = ("finetuned_from", "alignment", "match_on", "data", "samples")
    origin, file, match_on, data, samples = (recipe.value(name, reader, model) for name in names)
    return RecipeDonor(
        str(recipe.base),
        str(model),
        recipe.varying(reader, model),
        recipe.value("untie"),
        origin,
        file,
        recipe.excluded,
        words=not (config.tokenizer or config.tokenizer_source),
        unsupported=recipe.value("unsupported"),
        match_on=match_on or WEIGHTS,
        data=data or "",
        samples=samples,
        own_heads=tuple(sorted(recipe.own_heads)),
    )


def _parameters(config: MergeConfiguration, entry: InputModelDefinition) -> dict[str, Any]:
    """The parameters that hold for one model."""
    return {**(config.parameters or {}), **(entry.parameters or {})}


def carried_recipe(path: str, donor: RecipeDonor, aligned: bool) -> Recipe:
    """A recipe of the anchor and one donor, whose task vector is carried, after the recipe at `path`.

    Args:
        aligned: with the recipe's matching or alignment file; otherwise nothing is moved.
    """
    config = recipe_at(path).config
    values = _parameters(config, next(entry for entry in config.models or [] if str(entry.model) == donor.name))
    if not aligned:
        values = {name: value for name, value in values.items() if name not in (*MATCHING, "alignment")}
        values |= asdict(NOTHING)
    of_model, shared = ({name: values[name] for name in names if name in values} for names in (OF_MODEL, OF_EACH))
    listed: list[dict[str, Any]] = [{"model": donor.anchor, "parameters": {"weight": 0.5}}]
    listed.append({"model": donor.name, "parameters": {"weight": 0.5, **of_model}})
    whole: dict[str, Any] = {"merge_method": METHOD, "base_model": donor.anchor, "models": listed, "dtype": "float32"}
    return Recipe.read(MergeConfiguration.model_validate({**whole, "parameters": {"delegate": "linear", **shared}}))


def recipe_at(path: str) -> Recipe:
    """The last recipe in a file.

    Raises:
        RecipeError: it is at fault, or none of ours.
    """
    with open(path, encoding="utf-8") as file:
        document = documents(file.read())[-1]
    if not is_ours(document.value, misspelt=False):
        raise RecipeError(f"its merge_method is not {METHOD}", where=path, remedy=OTHER_INPUT)
    return Recipe.of(document)


def measurement_key(
    models: Sequence[str], donors: Sequence[RecipeDonor], sources: Sequence[str], **options: Any
) -> str:
    """A key of the barriers of some donors: model files, files read beside them, and options.

    Args:
        models: as they are given: a recipe, or an anchor and its donors.
        sources: of data.
    """
    opened = Models(MergeOptions())
    names = {name: None for donor in donors for name in (donor.anchor, donor.name, donor.origin) if name is not None}
    files = [*models, *sources, *(file for donor in donors for file in (donor.file, donor.data) if file)]
    of_donors = donors if len(models) > 1 else ()
    facts = [(d.name, d.options, d.untie, d.file, d.match_on, d.own_heads) for d in of_donors]
    return mark_of(
        [opened[parse_reference(name)] for name in names], files, donors=facts, sources=[*sources], **options
    )
