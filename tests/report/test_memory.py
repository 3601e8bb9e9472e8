"""The memory and the spaces that inspect shows, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from rotation_merge import AlignConfig
from rotation_merge.architecture import table
from rotation_merge.architecture.registry import shipped
from rotation_merge.averaging.tsv import Tsv
from rotation_merge.averaging.wudi import Wudi
from rotation_merge.matching.options import VaryingOptions
from rotation_merge.report import memory as module
from rotation_merge.report.memory import averaging_memory, itemsize_of, peak_memory
from rotation_merge.report.spaces import MatchedSpaces, matched_spaces

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
BLOCK = ATTENTION + FFN + 2 * 64
HEADS = AlignConfig(heads="permutation")
ROTATION = AlignConfig(residual="rotation")
WIDE = {
    name: (50_000, 64) if name in ("model.embed_tokens.weight", "lm_head.weight") else shape
    for name, shape in SHAPES.items()
}
PRODUCTS = 8 * 64**2
"""Bytes of one product of a stream."""


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "workers_for", lambda _: 1)


def memory(options: AlignConfig | None = None, itemsize: int = 2, carried: bool = False) -> int:
    return peak_memory(ARCHITECTURE, SHAPES, options or AlignConfig(), itemsize, carried)


def spaces(options: AlignConfig | None = None) -> MatchedSpaces:
    return matched_spaces(ARCHITECTURE, SHAPES, options or AlignConfig())


def with_freed(held: int) -> int:
    """Memory with what is kept of two models that are read again, widened, and a quarter that is freed and stays."""
    return held + 2 * 4 * ALL + (held + 2 * 4 * ALL) // 4


def test_local_spaces_take_a_block_of_both_models_and_the_output_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """With float32 copies of the largest tensor, and the similarities of 64 neurons; a file is a shard at most."""
    block = 2 * 2 * BLOCK + 8 * 64 * 64 + 12 * 64**2
    assert memory() == block + 2 * ALL
    monkeypatch.setattr(module, "SHARD", 1000)
    assert memory() == block + 1000


def test_a_residual_stream_takes_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker's two layers, of two parts, and four more; a layer is stored and widened."""
    signed = AlignConfig(residual="signed_permutation", attention="none", ffn="none", scaling=False)
    assert memory(signed, itemsize=4) == with_freed((2 * 4 + 8) * BLOCK + (2 + 2 + 4) * PRODUCTS)
    held = (2 * 2 + 8) * BLOCK + 4 * FFN + 5 * 64**2 + (2 + 2 + 4) * PRODUCTS
    assert memory(ROTATION) == with_freed(held)
    monkeypatch.setattr(module, "KEPT", 1000)
    assert memory(ROTATION) == held + 2000 + (held + 2000) // 4


def test_every_worker_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 0)
    monkeypatch.setattr(module, "KEPT_FREED", 0)
    alone = memory(ROTATION)
    monkeypatch.setattr(module, "workers_for", lambda _: 3)
    assert memory(ROTATION) == 3 * (alone - 6 * PRODUCTS) + 6 * PRODUCTS


def test_where_writing_takes_most_it_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide vocabulary: the file so far, nine copies of the head, and slices of it in float32."""
    before = sum(a * b for a, b in (shape for shape in WIDE.values() if len(shape) == 2)) + 4 * 64 - 50_000 * 64
    writing = peak_memory(ARCHITECTURE, WIDE, ROTATION, 2)
    assert writing == 2 * before + 9 * 2 * 50_000 * 64 + 16 * 50_000 * 64
    monkeypatch.setattr(module, "SHARD", 2 * before)
    assert peak_memory(ARCHITECTURE, WIDE, ROTATION, 2) == writing
    monkeypatch.setattr(module, "LONG", 64)
    assert peak_memory(ARCHITECTURE, WIDE, ROTATION, 2) < writing


def test_a_task_vector_is_a_block_of_a_third_model() -> None:
    assert memory(carried=True) - memory() == 2 * BLOCK
    assert memory(ROTATION, carried=True) - memory(ROTATION) == 2 * BLOCK


def test_the_largest_map_of_changes_is_held_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two changes eight copies of it and two squares; of a long vocabulary one, and copies of a slice."""
    assert averaging_memory(Wudi(), ARCHITECTURE, SHAPES, 2) == 8 * (8 * 64 * 64 + 2 * 64**2)
    whole = averaging_memory(Tsv(), ARCHITECTURE, WIDE, 2, tied=True)
    assert whole == 8 * (8 * 50_000 * 64 + 2 * 64**2)
    monkeypatch.setattr(module, "SLICE", 1000)
    slices = 50_000 * 64 + 8 * 1000 + 4 * 64**2
    assert averaging_memory(Wudi(), ARCHITECTURE, WIDE, 2, tied=True) == 8 * slices


def test_weights_have_the_size_of_the_dtype_of_the_config() -> None:
    configs = ({"dtype": "bfloat16"}, {"torch_dtype": "torch.float16"}, {"dtype": "float64"}, {}, {"dtype": "auto"})
    assert [itemsize_of(config) for config in configs] == [2, 2, 8, 4, 4]


def test_layers_that_are_left_out_are_not_matched() -> None:
    assert (spaces().parameters, spaces().matched) == (ALL, 2 * (ATTENTION + FFN))
    assert spaces(AlignConfig(residual="signed_permutation")).matched == ALL
    half = spaces(AlignConfig(layers="1"))
    assert half.matched == ATTENTION + FFN
    assert [(line.space, line.blocks) for line in half.lines if line.group == "not matched"] == [
        ("attn", "layers 0-0"),
        ("ffn", "layers 0-0"),
    ]
    varying = VaryingOptions(AlignConfig(), lambda name, place: AlignConfig(attention="none" if place else "rotation"))
    assert spaces(varying).matched == ATTENTION + 2 * FFN


def test_lines_say_what_is_matched() -> None:
    lines = {line.space: line for line in spaces(HEADS).lines}
    assert lines["attn"].group == (
        "head order: permutation; query/key: a rotation for each RoPE pair; value/output: orthogonal maps"
    )
    assert (lines["attn"].sizes, lines["attn"].count, lines["attn"].blocks) == ("4 heads, 2 KV, of 16", 2, "layers 0-1")
    assert (lines["ffn"].group, lines["ffn"].sizes) == ("permutation, signed rescaling", "64")
    assert lines["residual"].group == "not matched (possible: permutation, signed_permutation, rotation)"


def test_what_stays_and_why() -> None:
    said = spaces().unaligned
    assert any("'residual: rotation' would match it" in line for line in said)
    assert any("'attn' uses rotary positions" in line for line in said)
    assert any(line.startswith("7 tensors have no axis in a matched space") for line in said)
    assert not any("stream" in line for line in spaces(AlignConfig(residual="permutation")).unaligned)
