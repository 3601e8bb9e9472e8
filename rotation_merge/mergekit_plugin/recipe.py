"""A recipe as the merge uses it, and all that it reads and writes. Faults are collected in its document; in mergekit's
own commands the first one stops it, with its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration, evaluate_setting
from mergekit.merge_methods.base import MergeMethod

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.svc import Calibrated
from rotation_merge.config import FILE, MODEL, Config
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import FOLDER, MATCHING_UNFINISHED, WORK, Output
from rotation_merge.matching.alignment import opened_file
from rotation_merge.mergekit_plugin.document import (
    Document,
    Path,
    documents,
    is_ours,
    raise_first,
    recipes_in,
    walk,
)
from rotation_merge.mergekit_plugin.keys import BY_NAME, checked
from rotation_merge.mergekit_plugin.rules import MODELS, check, check_structure, is_plain, unknown_names
from rotation_merge.model.heads import head_names
from rotation_merge.model.view import View

ALIGNMENT = "alignment.safetensors"
"""File that `save_alignment: true` writes beside a merged model."""
KEPT_BY = {"kept_by": "save_alignment"}
"""Stands in the head of an alignment file that `save_alignment` wrote."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a merge configuration that concern the alignment.

    Attributes:
        document: its source.
        config: mergekit's view of it.
        delegate: the method that averages.
        own_heads: names of tensors that every model keeps of its own (`heads_of: each`), known once models are opened.
    """

    document: Document = field(repr=False)
    config: MergeConfiguration
    delegate: MergeMethod
    own_heads: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def read(cls, config: MergeConfiguration) -> Recipe:
        """Read a configuration made in Python; errors as of `of`."""
        return cls.of(Document({}, config=config))

    @classmethod
    def of(cls, document: Document) -> Recipe:
        """Read a document; the first fault is raised, with its place and the remedy."""
        recipe = read(document)
        document.raise_first()
        assert recipe is not None
        return recipe

    @property
    def base(self) -> ModelReference:
        """The anchor; of an average alone that needs none, the first model."""
        base: ModelReference = self.config.base_model or entries(self.config)[0].model
        return base

    @cached_property
    def stock(self) -> bool:
        """Whether the method is mergekit's own, which aligns nothing."""
        return not is_ours(dict(self.config), misspelt=False)

    @cached_property
    def plain(self) -> bool:
        """Whether the delegate is not told that the anchor is the base (see `is_plain`)."""
        return is_plain(self.config, self.delegate)

    @cached_property
    def exclude(self) -> tuple[str, ...]:
        """Parts of names of tensors that are copied from the anchor."""
        words = map(str.strip, str(self.value("exclude") or "").split(","))
        return tuple(filter(None, words))

    @property
    def own_method(self) -> OwnMethod | None:
        """The delegate, where it is one of our own."""
        return self.delegate if isinstance(self.delegate, OwnMethod) else None

    @property
    def on_whole_models(self) -> bool:
        """Whether the delegate works on whole models, not tensor by tensor."""
        return self.own_method is not None and self.own_method.whole_models

    @property
    def new_tokens(self) -> bool:
        """Whether mergekit brings vocabularies together."""
        return bool(self.config.tokenizer or self.config.tokenizer_source)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that tensors are stored in; None: each in that of its file."""
        return dtype_from_name(self.config.dtype)

    @property
    def least_dtype(self) -> torch.dtype | None:
        """The least precise dtype that the recipe rounds to; None: all tensors keep theirs."""
        dtypes = filter(None, map(dtype_from_name, (self.config.dtype, self.config.out_dtype)))
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def value(self, name: str, reader: ConfigReader | None = None, model: ModelReference | None = None) -> Any:
        """A parameter of the whole merge, or of one model; its default where it is not given, or of another method."""
        value = None if self.stock else self.setting(name, reader or ConfigReader(config=self.config, t=0), model)
        return BY_NAME[name].default if value is None else value

    def setting(self, name: str, reader: ConfigReader, model: ModelReference | None, block: str = "") -> Any:
        """A parameter of one model in one block; None where it is not given."""
        for scope in reader.parameter_sources(model):
            if scope is not None and name in scope:
                value = evaluate_setting(block, scope[name], reader.t, validate=lambda v: v)
                if value is not None:
                    return checked(name, value)
        return None

    def fields(
        self, kind: type[Config], reader: ConfigReader, model: ModelReference | None = None, block: str = ""
    ) -> dict[str, Any]:
        """The fields of a config that the recipe gives for a model; filters see the block's module path."""
        keys = {field: option.recipe_key for field, option in kind.options().items()}
        read = {field: self.setting(key, reader, model, block) for field, key in keys.items() if key in BY_NAME}
        return {field: value for field, value in read.items() if value is not None}

    def settle_heads(self, models: Iterable[View]) -> None:
        """Settle which tensors every model keeps of its own."""
        if self.value("heads_of") == "each":
            self.own_heads.update(name for model in models for name in head_names(model.architecture))

    def settle(self, models: Sequence[View]) -> None:
        """Settle heads; refuse names of layers and tensors in the recipe that the models (the anchor first) lack."""
        self.settle_heads(models)
        tensors = (name for model in models for name in model)
        self.document.collect(unknown_names(self.config, models[0].architecture, tensors))
        self.document.raise_first()

    def excluded(self, tensor: str) -> bool:
        """Whether a tensor is copied from the anchor, or kept by each model."""
        return tensor in self.own_heads or any(part in tensor for part in self.exclude)


def read(document: Document) -> Recipe | None:
    """Read a document, collecting its faults there; None where it has any."""
    delegate = check(document)
    if document.first or delegate is None:
        return None
    recipe = Recipe(document, document.config, delegate)
    if recipe.value("calibrate") is None:
        return recipe
    return replace(recipe, delegate=Calibrated(delegate, recipe.value("alpha")))


def check_file(path: str, text: str) -> None:
    """Check a recipe file; raises its first fault, with line and column, and the number of others."""
    recipes = recipes_in(path, text, is_ours)
    for document in recipes:
        check(document)
    raise_first(path, recipes)


def title(model: object, origin: object | None) -> str:
    """The donor's name in reports."""
    return str(model) if origin is None else f"{model} (carried over from {origin})"


def entries(config: MergeConfiguration) -> list[Any]:
    """Every part of a recipe that names a model to merge, and its parameters."""
    return [part for _, part in walk(config) if isinstance(part, MODELS)]


def tuned_from(config: MergeConfiguration) -> dict[ModelReference, ModelReference]:
    """The donors whose change is carried over, and the base that each was fine-tuned from."""
    values = ((part.model, (part.parameters or {}).get("finetuned_from")) for part in entries(config))
    bases = {model: checked("finetuned_from", value) for model, value in values}
    return {model: ModelReference.model_validate(base) for model, base in bases.items() if base is not None}


# --- inputs and outputs ----------------------------------------------------------------------------------------------


MODEL_INPUT = "model"
"""The kind of a recipe's inputs that is no file."""


def named_inputs(value: Any) -> Iterator[tuple[Path, str, str]]:
    """What a document, or mergekit's form of one, names to be read: its path, the name, and a model or a key of files.

    Of sources of tokenizers only mergekit's form tells which are models.
    """
    for path, part in walk(value):
        option = BY_NAME.get(str(path[-1])) if path[-2:-1] == ("parameters",) else None
        of_model = option is None and path[-1:] in (("base_model",), ("model",)) and isinstance(part, str)
        if of_model or isinstance(part, ModelReference):
            yield path, str(part), MODEL_INPUT
        elif option and option.kind in (FILE, MODEL) and isinstance(part, str) and part not in (*option.words, "none"):
            yield path, part, MODEL_INPUT if option.kind is MODEL else str(path[-1])


def recipe_inputs(config: MergeConfiguration) -> dict[str, str]:
    """Everything that a recipe reads, and what it is, as of `named_inputs`."""
    return {name: kind for _, name, kind in sorted(named_inputs(config), key=lambda read: read[2] == MODEL_INPUT)}


def inputs_in(text: str) -> dict[str, str]:
    """`recipe_inputs` of all recipes in a text, as far as they can be read.

    Raises:
        RecipeError: the text is not YAML.
    """
    recipes = [document for document in documents(text) if isinstance(document.value, dict)]
    for recipe in recipes:
        check_structure(recipe)
    return {name: kind for recipe in recipes if recipe.config for name, kind in recipe_inputs(recipe.config).items()}


def recipe_outputs(config: MergeConfiguration, out: str) -> list[Output]:
    """All outputs of a recipe: the folder, and files in it that parameters name."""
    outputs = [Output(out, FOLDER), Output(f"{out}{MATCHING_UNFINISHED}", WORK)]
    if (name := (config.parameters or {}).get("save_alignment")) not in (None, False, "none"):
        donors = len({entry.model for entry in entries(config)} - {config.base_model})
        for file in numbered(os.path.join(out, ALIGNMENT if name is True else name), donors):
            outputs.append(Output(file, wrote=_is_kept, remedy="name another file, or move it away"))
    return outputs


def _is_kept(path: str) -> bool:
    """Whether `save_alignment` wrote a file."""
    with suppress(RotationMergeError), opened_file(path) as (head, _):
        return KEPT_BY.items() <= head.made.items()
    return False


def numbered(path: str, count: int) -> list[str]:
    """A file for each donor, or path: NAME, NAME-2, NAME-3."""
    stem, ending = os.path.splitext(path)
    return [f"{stem}{'' if number == 1 else f'-{number}'}{ending}" for number in range(1, max(count, 1) + 1)]
