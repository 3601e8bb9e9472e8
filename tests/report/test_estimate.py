"""What inspect says of cost, by numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rotation_merge import AlignConfig
from rotation_merge.architecture import table
from rotation_merge.architecture.registry import shipped
from rotation_merge.matching.options import VaryingOptions
from rotation_merge.report import estimate as module
from rotation_merge.report.estimate import Estimate, carried, estimate
from rotation_merge.symmetry import neurons

ARCHITECTURE = table.sample(shipped()["llama"])
"""Two layers of width 64: 4 heads of 16 in 2 KV groups, 64 neurons."""

SHAPES = {
    info.name: tuple(axis.size or 5 for axis in info.axes)
    for info in ARCHITECTURE.tensors()
    if info.name.endswith(("proj.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"))
    and all(axis.size or axis.label == "vocabulary" for axis in info.axes)
}

ATTENTION = 64 * 64 + 32 * 64 + 32 * 64 + 64 * 64
"""Weights of queries, keys, values and outputs of one layer."""
FFN = 3 * 64 * 64
ENDS = 5 * 64 + 64 + 5 * 64
"""Embedding, last norm, head."""
ALL = 2 * (ATTENTION + FFN + 2 * 64) + ENDS
FLOPS = 1e9


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flops_per_second", lambda: FLOPS)
    monkeypatch.setattr(module, "workers_for", lambda _: 1)
    monkeypatch.setattr(module, "STEP_SECONDS", 0.0)


def found(options: AlignConfig | None = None, itemsize: int = 2, out: int = 2) -> Estimate:
    return estimate(ARCHITECTURE, SHAPES, options or AlignConfig(), itemsize, out)


def with_freed(held: int) -> int:
    """Memory with what is kept of two models that are read again, widened, and a quarter that is freed and stays."""
    return held + 2 * 4 * ALL + (held + 2 * 4 * ALL) // 4


def seconds(flops: float, assigned: int, read: float) -> float:
    return flops / FLOPS + assigned * 4.8e-8 + read / 4.2e8


def test_local_spaces() -> None:
    """Products of 16 coordinates a head and of 64 neurons; one assignment a layer; both models read, one written."""
    result = found()
    flops = 2 * (2 * 16 * ATTENTION + 2 * 64 * FFN)
    assert result.seconds == pytest.approx(seconds(flops, 2 * 64**2, (2 + 2 + 2) * ALL))
    assert (result.parameters, result.matched) == (ALL, 2 * (ATTENTION + FFN))
    assert result.disk == 2 * ALL
    block = ATTENTION + FFN + 2 * 64
    assert result.memory == 2 * 2 * block + 8 * 64 * 64 + 12 * 64**2 + 2 * ALL


def test_the_order_of_heads_costs_products_of_all_pairs() -> None:
    result = found(AlignConfig(heads="permutation"))
    flops = 2 * (4 * 2 * 16 * ATTENTION + 480 * 4**2 * 16**3 + 2 * 64 * FFN)
    assert result.seconds == pytest.approx(seconds(flops, 2 * 64**2, 6 * ALL))


def test_between_near_models_a_proof_replaces_tables_and_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neurons, "_PROOF_FLOPS", 100.0)
    result = found(AlignConfig(heads="permutation"))
    flops = 2 * (4 * 2 * 16 * ATTENTION + 100 * FFN)
    assert result.near_seconds == pytest.approx(seconds(flops, 0, 6 * ALL))
    assert result.near_seconds < result.seconds


def test_every_pass_over_a_block_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = AlignConfig(residual="rotation")
    before = found(rotation)
    monkeypatch.setattr(module, "STEP_SECONDS", 0.5)
    after, blocks = found(rotation), len(ARCHITECTURE.blocks)
    assert after.seconds - before.seconds == pytest.approx(0.5 * blocks * 7)
    assert after.near_seconds - before.near_seconds == pytest.approx(0.5 * blocks * 2)


def test_workers_share_the_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = found().seconds
    monkeypatch.setattr(module, "workers_for", lambda _: 4)
    assert alone - found().seconds == pytest.approx(0.75 * 2 * 64**2 * 4.8e-8)


def test_the_residual_stream_costs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts, four passes, and a last look: products of 64 coordinates of what touches the stream in layers, which
    are moved by its map in each, and once into the result. Embedding and head are looked at once, and moved twice."""
    options = AlignConfig(residual="signed_permutation", attention="none", ffn="none", scaling=False)
    result = found(options, itemsize=4, out=2)
    flops = 2 * 64 * ((6 + 7) * (ALL - ENDS) + 3 * ENDS)
    assert result.seconds == pytest.approx(seconds(flops, 0, (4 + 4 + 2 + 7 * 8) * ALL))
    near = 2 * 64 * ALL
    assert result.near_seconds == pytest.approx(seconds(near, 0, (4 + 4 + 2 + 2 * 8) * ALL))
    assert result.matched == ALL
    block = ATTENTION + FFN + 2 * 64  # stored and widened; products of a worker's two layers, two parts and four more
    assert result.memory == with_freed((2 * 4 + 8) * block + (2 + 2 + 4) * 8 * 64**2)
    turned = found(AlignConfig(residual="rotation"))
    held = (2 * 2 + 8) * block + 4 * FFN + 5 * 64**2 + (2 + 2 + 4) * 8 * 64**2
    assert turned.memory == with_freed(held)
    monkeypatch.setattr(module, "KEPT", 1000)
    assert found(AlignConfig(residual="rotation")).memory == held + 2000 + (held + 2000) // 4


def test_every_worker_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, products = AlignConfig(residual="rotation"), 8 * 64**2
    monkeypatch.setattr(module, "KEPT", 0)
    monkeypatch.setattr(module, "KEPT_FREED", 0)
    alone = found(rotation).memory
    monkeypatch.setattr(module, "workers_for", lambda _: 3)
    assert found(rotation).memory == 3 * (alone - 6 * products) + 6 * products


def test_where_writing_takes_most_it_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide vocabulary: the file so far, nine copies of the head, and slices of it in float32."""
    wide = {n: (50_000, 64) if n in ("model.embed_tokens.weight", "lm_head.weight") else s for n, s in SHAPES.items()}
    result = estimate(ARCHITECTURE, wide, AlignConfig(residual="rotation"), 2, 2)
    before = result.parameters - 50_000 * 64 - 64  # the head comes before the last norm
    assert result.memory == 2 * before + (2 * 2 + 7 * 2) * 50_000 * 64 + 16 * 50_000 * 64
    monkeypatch.setattr(module, "SHARD", 2 * before)
    assert estimate(ARCHITECTURE, wide, AlignConfig(residual="rotation"), 2, 2).memory == result.memory
    monkeypatch.setattr(module, "LONG", 64)
    assert estimate(ARCHITECTURE, wide, AlignConfig(residual="rotation"), 2, 2).memory < result.memory


def test_a_rotation_is_solved_for_once_a_pass_and_deep_models_try_starts_on_some_layers() -> None:
    still = {"attention": "none", "ffn": "none", "scaling": False}
    turned, signed = (found(AlignConfig(residual=group, **still)) for group in ("rotation", "signed_permutation"))
    assert turned.seconds - signed.seconds == pytest.approx((2 + 2 * 4) * 50 * 64**3 / FLOPS)
    deep = replace(ARCHITECTURE, blocks=(*ARCHITECTURE.blocks, *ARCHITECTURE.layers("default") * 9))
    options = AlignConfig(residual="rotation")
    assert module.Rounds.of(deep, options, near=False).local == pytest.approx(4 + 1 + 2 * 4 / 20)
    assert module.Rounds.of(deep, options, near=False).solved == 2 + 4 * 4
    assert module.Rounds.of(deep, options, near=True).local == pytest.approx(1 + 4 / 20)
    assert module.Rounds.of(ARCHITECTURE, options, near=False).local == 7


def test_experts_are_matched_in_pairs() -> None:
    architecture = table.sample(shipped()["mixtral"])
    shapes = {
        name: tuple(axis.size or 5 for axis in info.axes)[info.stacked :]
        for info in architecture.tensors()
        for name in info.names
    }
    layers = sum(any(space.kind == "experts" for space in block.spaces.values()) for block in architecture.blocks)
    sizes = next(s.sizes for block in architecture.blocks for s in block.spaces.values() if s.kind == "experts")
    shapes = {name: shape for name, shape in shapes.items() if ".experts." in name}
    weights = sum(math.prod(shape) for shape in shapes.values())
    flops = 2 * sizes["size"] * weights
    for ffn, pairs in (("permutation", sizes["count"] ** 2), ("none", sizes["count"])):
        result = estimate(architecture, shapes, AlignConfig(attention="none", ffn=ffn), 2, 2)
        assert result.seconds == pytest.approx(seconds(flops, layers * pairs * sizes["size"] ** 2, 6 * weights))


def test_the_output_file_held_is_no_larger_than_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found().memory
    monkeypatch.setattr(module, "SHARD", 1000)
    assert found().memory == whole - 2 * ALL + 1000


def test_a_task_vector_is_a_third_model() -> None:
    plain, block = found(), ATTENTION + FFN + 2 * 64
    more = carried(plain, SHAPES, itemsize=2)
    assert more.seconds - plain.seconds == pytest.approx(2 * ALL / 4.2e8)
    assert more.memory - plain.memory == 2 * block
    assert (more.disk, more.lines) == (plain.disk, plain.lines)


def test_layers_that_are_left_out_cost_nothing() -> None:
    half = AlignConfig(layers="1")
    result = found(half)
    flops = 2 * 16 * ATTENTION + 2 * 64 * FFN
    assert result.seconds == pytest.approx(seconds(flops, 64**2, 6 * ALL))
    assert result.matched == ATTENTION + FFN
    assert [(line.space, line.blocks) for line in result.lines if line.group == "not matched"] == [
        ("attn", "layers 0-0"),
        ("ffn", "layers 0-0"),
    ]
    varying = VaryingOptions(AlignConfig(), lambda name, place: AlignConfig(attention="none" if place else "rotation"))
    assert found(varying).matched == ATTENTION + 2 * FFN


def test_lines_say_what_is_matched() -> None:
    lines = {line.space: line for line in found(AlignConfig(heads="permutation")).lines}
    assert lines["attn"].group == (
        "head order: permutation; query/key: a rotation for each RoPE pair; value/output: orthogonal maps"
    )
    assert (lines["attn"].sizes, lines["attn"].count, lines["attn"].blocks) == ("4 heads, 2 KV, of 16", 2, "layers 0-1")
    assert (lines["ffn"].group, lines["ffn"].sizes) == ("permutation, signed rescaling", "64")
    assert lines["residual"].group == "not matched (possible: permutation, signed_permutation, rotation)"


def test_what_stays_and_why() -> None:
    said = found().unaligned
    assert any("'residual: rotation' would match it" in line for line in said)
    assert any("'attn' uses rotary positions" in line for line in said)
    assert any(line.startswith("7 tensors have no axis in a matched space") for line in said)
    assert not any("stream" in line for line in found(AlignConfig(residual="permutation")).unaligned)
