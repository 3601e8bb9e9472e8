"""The delegate of one recipe as mergekit's plan runs it, and its parameters for every tensor of the output."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mergekit.common import ModelReference
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethod, TensorGroup
from mergekit.parameter_resolver import resolve_parameters
from torch import Tensor

from rotation_merge.errors import RecipeError, short
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.mergekit_plugin.recipe import Recipe

Parameters = Mapping[str, Mapping[str, Any]]
"""Parameters of a method by name of an output tensor."""


def tensor_parameters(
    recipe: Recipe, blocks: Iterable[OutputBlock], ids: Mapping[ModelReference, Hashable]
) -> dict[str, dict[str, Any]]:
    """The delegate's parameters for each tensor of the output that is merged, by its name, as mergekit resolves them.

    Filters see the name that a tensor has in each model.

    Args:
        ids: of the models, by which values of single models are given.

    Raises:
        RecipeError: a required parameter has no value for a tensor.
    """
    spec, base, parameters = recipe.delegate.spec, None if recipe.plain else recipe.base, dict[str, dict[str, Any]]()
    for out in blocks:
        own_names, reader = {model: out.names_in(model) for model in out.sources}, out.reader
        for name in (name for info in out.block.tensors for name in info.names if not recipe.excluded(name)):
            inputs, sources = {model: names[name] for model, names in own_names.items()}, reader.parameter_sources
            try:
                shared, each = resolve_parameters(
                    spec, tensor_name=name, inputs=inputs, sources=sources, base_model=base, t=reader.t
                )
            except RuntimeError as error:
                raise RecipeError(short(error), remedy="give it a value for every tensor") from error
            parameters[name] = shared | {
                of_model.name: {ids[m]: values[of_model.name] for m, values in each.items() if of_model.name in values}
                for of_model in spec.input_parameters
            }
    return parameters


class Delegated(MergeMethod):
    """The delegate of one recipe, with the parameters of each tensor that it merges; all others are passed on.

    Args:
        name: under which mergekit knows it while the recipe runs.
        inner: the delegate.
        plain: whether it is not told that the anchor is the base.
        parameters: of each tensor that is merged, by its name.
        finish: takes every tensor of the result by its name, and gives the one to write, if any.
    """

    def __init__(
        self,
        name: str,
        inner: MergeMethod,
        plain: bool,
        parameters: Parameters,
        finish: Callable[[str, Tensor], Tensor | None],
    ) -> None:
        self.inner, self.plain, self.parameters, self.finish = inner, plain, parameters, finish
        contract = InputContract(base=BasePolicy.OPTIONAL, min_inputs=0)
        self.spec = replace(inner.spec, name=name, parameters=(), contract=contract)

    def validate_inputs(self, *args: Any, **kwargs: Any) -> None:
        """The recipe's reader has judged numbers of models by the delegate itself."""

    def _execute_resolved(
        self, groups: Sequence[TensorGroup], parameters: list[dict[str, Any]], **options: Any
    ) -> tuple[Tensor | None, ...]:
        return tuple(self.finish(str(group.metadata.name), self._merged(group, options)) for group in groups)

    def _merged(self, group: TensorGroup, options: dict[str, Any]) -> Tensor:
        if (parameters := self.parameters.get(str(group.metadata.name))) is None:
            return group.entries[0].tensor  # the anchor's, which every model gives
        if self.plain:
            group = replace(group, entries=tuple(replace(entry, is_base=False) for entry in group.entries))
        return self.inner((group,), parameters=parameters, **options)[0]

    def _execute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("groups are executed once they are resolved")
