"""Random elements of every group a model admits: twins that compute the same, for tests and demonstrations."""

from __future__ import annotations

import torch

from rotation_merge.architectures.model import Architecture, Space
from rotation_merge.groups import (
    DirectSum,
    ExpertTransform,
    GroupElement,
    HeadTransform,
    Invertible,
    Monomial,
    NeuronTransform,
    Orthogonal,
    Permutation,
    Planar,
    Scaled,
    Scaling,
    SpaceTransform,
    StreamTransform,
)
from rotation_merge.groups.planar import pair_dims
from rotation_merge.linalg.polar import complement_of_ones
from rotation_merge.matching.inhead import InHead, group_for_queries
from rotation_merge.matching.options import MatchOptions


def random_gauge(
    architecture: Architecture, options: MatchOptions, generator: torch.Generator
) -> dict[str, SpaceTransform]:
    """A random transform for every space that `options` would match, by space name.

    Applied to a model (`transform_state`) it gives other weights with the same outputs. A `residual: rotation` is
    only function-preserving on a folded model.
    """
    result: dict[str, SpaceTransform] = {}
    for block in architecture.blocks:
        if options.matches_layer(block.index):
            for space in block.spaces.values():
                result[space.name] = _random_transform(space, options, generator)
    if options.residual != "none":
        for name, stream in architecture.streams.items():
            if options.residual in architecture.stream_groups[name]:
                layer = "signed_permutation" not in architecture.stream_groups[name]
                element = random_stream(options.residual, stream.sizes["size"], layer, generator)
                result[name] = StreamTransform(element)
    return result


def random_stream(group: str, size: int, layer_norm: bool, generator: torch.Generator) -> GroupElement:
    """A random element for a residual stream; with LayerNorm, rotations fix the all-ones vector."""
    if group == "rotation":
        if not layer_norm:
            return Orthogonal.random(1, size, generator)
        basis = complement_of_ones(size)
        inner = Orthogonal.random(1, size - 1, generator).matrix[0]
        return Orthogonal((basis @ inner @ basis.T + 1 / size)[None])
    order = Permutation.random(1, size, generator)
    signs = Scaling.random_signs(1, size, generator) if group == "signed_permutation" else Scaling.identity(1, size)
    return Monomial(order, signs)


def _random_transform(space: Space, options: MatchOptions, generator: torch.Generator) -> SpaceTransform:
    if space.kind == "attention":
        return _random_heads(space, options, generator)
    batch = space.sizes.get("count", 1)
    size = space.sizes["size"]
    permute, scale = options.ffn != "none", bool(options.rescale)
    order = Permutation.random(batch, size, generator) if permute else Permutation.identity(batch, size)
    factor = Scaling.identity(batch, size)
    if scale and (space.degree):
        factor = Scaling.random(batch, size, generator)
        if space.gated:
            factor = factor.compose(Scaling.random_signs(batch, size, generator))
    element = Monomial(order, factor)
    if space.kind == "ffn":
        return NeuronTransform(element, space.degree or 1)
    experts = torch.randperm(batch, generator=generator) if permute else torch.arange(batch)
    return ExpertTransform(experts, element, space.degree or 1)


def _random_heads(space: Space, options: MatchOptions, generator: torch.Generator) -> HeadTransform:
    groups, per_group = space.sizes["groups"], space.sizes["per_group"]
    order, queries = torch.arange(groups), torch.arange(per_group).repeat(groups, 1)
    if options.heads != "none" and space.free_order:
        order = torch.randperm(groups, generator=generator)
        queries = torch.stack([torch.randperm(per_group, generator=generator) for _ in range(groups)])
    qk = group_for_queries(
        options.attention, space.rotary, space.sizes["head_dim"], space.interleaved, space.norm, options.rescale
    )
    turns = options.attention != "none" and space.free_values
    vo = InHead("orthogonal", options.rescale) if turns else InHead("fixed")
    widest = options.attention == "invertible"
    return HeadTransform(
        order,
        queries,
        _random_inhead(qk, groups, space.sizes["head_dim"], widest, generator),
        _random_inhead(vo, groups, space.sizes["value_dim"], widest, generator),
    )


def _random_inhead(group: InHead, batch: int, d: int, widest: bool, generator: torch.Generator) -> GroupElement:
    match group.kind:
        case "orthogonal":
            kind = Invertible if widest else Scaled if group.rescale else Orthogonal
            return kind.random(batch, d, generator)
        case "planar":
            turn = Planar.random(batch, d, generator)
            scale = turn.scale if group.rescale else torch.ones_like(turn.scale)
            return Planar(turn.angle, scale, group.interleaved)
        case "pair_signs":
            factor = torch.ones(batch, d, dtype=torch.float64)
            signs = Scaling.random_signs(batch, d // 2, generator).factor
            for where in pair_dims(d, group.interleaved):
                factor[:, where] = signs
            return Scaling(factor)
        case "coordinate_signs":
            return Scaling.random_signs(batch, d, generator)
        case "head_sign":
            return Scaling(Scaling.random_signs(batch, 1, generator).factor.repeat(1, d))
        case "split" | "split_signs":
            parts = [
                _random_inhead(part, batch, where.stop - where.start, widest=False, generator=generator)
                for part, where in group.parts(d)
            ]
            return DirectSum(tuple(parts))
    return Scaling.identity(batch, d)
