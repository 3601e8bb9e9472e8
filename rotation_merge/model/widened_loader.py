"""Reads a smaller model in another's sizes, with the same outputs (see `model/widen.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rotation_merge.architecture import resolve
from rotation_merge.architecture.registry import find
from rotation_merge.architecture.sizes import config_of_sizes
from rotation_merge.errors import CheckpointError
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.paired_model import PairedModel
from rotation_merge.model.widen import WidenedSource, Widening, wide_shapes

NOTE = "`{model}` was widened to the sizes of `{anchor}` ({sizes}), with zeros around its weights and the same outputs."


def widening(model: PairedModel, anchor: PairedModel, untie: bool) -> tuple[dict[str, Any], Widening] | None:
    """The config of a model in the anchor's sizes, and the widening; None if the sizes are equal.

    Args:
        untie: its heads that share an embedding's tensor have one of their own.

    Raises:
        RotationMergeError: it is of another family or larger in some way, or has no room for zeros.
    """
    spec = find(model.config)
    if spec is None or model.architecture.family != anchor.architecture.family:
        problem = f"is of another architecture than {anchor.name}"
        raise CheckpointError(problem, where=model.name, remedy="widen models of one family")
    if any(module.config for module in spec.modules.values()):
        remedy = "only models of one part can be widened"
        raise CheckpointError("has nested configs", where=model.name, remedy=remedy)
    config = {**model.config, **config_of_sizes(spec, model.config, anchor.config)}
    if config == model.config:
        return None
    tied = None if untie or model.tied is None else model.tied[0]
    wide = resolve(config, list(model.shapes), model.name, untie=untie)
    return config, Widening(model.architecture, wide, tied, model.name, anchor.name)


def words(model: PairedModel, anchor: PairedModel, config: Mapping[str, Any]) -> str:
    """A note for the report on the sizes that grew."""
    sizes = (
        f"{key} {model.config.get(key)} to {config[key]}" for key in config if config[key] != model.config.get(key)
    )
    return NOTE.format(model=model.name, anchor=anchor.name, sizes=", ".join(sizes))


def widened(model: Model, anchor: Model) -> Model:
    """The model in the anchor's sizes; unchanged if they are equal. Raises as `widening` does."""
    for member in (model, anchor):
        member.check_files()
    if (grown := widening(model.member, anchor.member, model.untie)) is None:
        return model
    config, wide = grown
    wide_model = Model(model.reference, model.options, model.unsupported, model.untie)
    wide_model.sizes = {key: value for key, value in config.items() if value != model.config.get(key)}
    wide_model.note = words(model.member, anchor.member, config)
    tied = _tied(model) if model.untie else {}
    shapes = {**model.shapes, **{name: model.shapes[tied_name] for name, tied_name in tied.items()}}
    vars(wide_model).update(
        loader=WideLoader(model.loader, wide, tied),
        config=config,
        shapes=wide_shapes(shapes, wide),
        dtypes=model.dtypes,
    )
    return wide_model


def _tied(model: Model) -> dict[str, str]:
    """Tied heads, each with its embedding."""
    absent = [info for info in model.architecture.tensors() if info.tied and info.name not in model.shapes]
    return {info.name: next(name for name in info.tied if name in model.shapes) for info in absent}


class WideLoader:
    """Reads like mergekit's `LazyTensorLoader`, tensors with zeros around them.

    Args:
        tied: by names of tensors that are to be had beside those that are stored, whose tensors they are.
    """

    def __init__(self, loader: Any, widening: Widening, tied: Mapping[str, str]) -> None:
        paths = loader.index.tensor_paths
        self.loader = loader
        self.index = replace(loader.index, tensor_paths={**paths, **{name: paths[tied[name]] for name in tied}})
        self.wide = WidenedSource(_Named(loader, tied), widening)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        if key not in self.index.tensor_paths and not raise_on_missing:
            return None
        return self.wide[key].to(device)

    def flush(self) -> None:
        self.loader.flush()


class _Named:
    """A loader's tensors by name."""

    def __init__(self, loader: Any, tied: Mapping[str, str]) -> None:
        self.loader, self.tied = loader, tied

    def __contains__(self, name: object) -> bool:
        return name in self.tied or name in self.loader.index.tensor_paths

    def __getitem__(self, name: str, /) -> Tensor:
        tensor: Tensor = self.loader.get_tensor(self.tied.get(name, name))
        return tensor
