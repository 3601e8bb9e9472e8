"""The memory and the spaces that inspect shows."""

from __future__ import annotations

from typing import Any

import pytest

from rotation_merge import AlignConfig
from rotation_merge.architecture import table
from rotation_merge.architecture.registry import shipped
from rotation_merge.report import memory as module
from rotation_merge.report.memory import peak_memory
from rotation_merge.report.spaces import matched_spaces
from rotation_merge.run.functions import configured_dtype

ARCHITECTURE = table.sample(shipped()["llama"])
"""Two layers of width 64: 4 heads of 16 in 2 KV groups, 64 neurons."""

SHAPES = {
    info.name: tuple(axis.size or 5 for axis in info.axes)
    for info in ARCHITECTURE.tensors()
    if info.name.endswith(("proj.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"))
    and all(axis.size or axis.label == "vocabulary" for axis in info.axes)
}
ATTENTION, FFN = 2 * (64 + 32) * 64, 3 * 64 * 64
BLOCK = ATTENTION + FFN + 2 * 64
ALL = 2 * BLOCK + (5 + 1 + 5) * 64
ROTATION = AlignConfig(residual="rotation")
WIDE = {name: (50_000, 64) if name.split(".")[-2] in ("embed_tokens", "lm_head") else x for name, x in SHAPES.items()}


def memory(options: AlignConfig | None = None, itemsize: int = 2, carried: bool = False, wide: bool = False) -> int:
    return peak_memory(ARCHITECTURE, WIDE if wide else SHAPES, options or AlignConfig(), itemsize, carried)


def spaces(options: AlignConfig | None = None) -> dict[str, Any]:
    return matched_spaces(ARCHITECTURE, SHAPES, options or AlignConfig())


def test_a_merge_holds_a_block_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every worker; and the file that is written, at most a shard; a task vector is a block of a third model."""
    monkeypatch.setattr(module, "workers_for", lambda _: 1)
    for options in (AlignConfig(), ROTATION):
        assert memory(options) > 2 * 2 * BLOCK
        assert memory(options, carried=True) - memory(options) == 2 * BLOCK
    single, whole = memory(ROTATION), memory()
    assert single > whole
    assert memory(itemsize=4) > whole
    monkeypatch.setattr(module, "SHARD", 1000)
    assert whole - memory() == 2 * ALL - 1000
    monkeypatch.setattr(module, "workers_for", lambda _: 3)
    assert single < memory(ROTATION) < 3 * single


def test_long_vocabularies_are_written_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory(ROTATION, wide=True)
    assert whole > 9 * 2 * 50_000 * 64
    monkeypatch.setattr(module, "LONG", 64)
    assert memory(ROTATION, wide=True) < whole


def test_weights_have_the_size_of_the_dtype_of_the_config() -> None:
    configs = ({"dtype": "bfloat16"}, {"torch_dtype": "torch.float16"}, {"dtype": "float64"}, {}, {"dtype": "auto"})
    assert [configured_dtype(config).itemsize for config in configs] == [2, 2, 8, 4, 4]


def test_spaces_that_are_matched_and_what_stays() -> None:
    """Layers that are left out are not matched; limits are told with the option that would lift them."""
    facts, lines = spaces(), {line["space"]: line for line in spaces(AlignConfig(heads="permutation"))["lines"]}
    assert (facts["parameters"], facts["matched"]) == (ALL, 2 * (ATTENTION + FFN))
    assert "head order: permutation; query/key: a rotation for each RoPE pair" in lines["attn"]["group"]
    assert [lines["attn"][key] for key in ("sizes", "count", "blocks")] == ["4 heads, 2 KV, of 16", 2, "layers 0-1"]
    assert (lines["ffn"]["group"], lines["ffn"]["sizes"]) == ("permutation, signed rescaling", "64")
    assert "permutation, signed_permutation, rotation" in lines["residual"]["group"]
    for words in ("'residual: rotation'", "7 tensors have no axis"):
        assert any(words in line for line in facts["unaligned"]), words
    moved = spaces(AlignConfig(residual="signed_permutation"))
    assert moved["matched"] == ALL
    assert not any("stream" in line for line in moved["unaligned"])
    half = spaces(AlignConfig(layers="1"))
    assert half["matched"] == ATTENTION + FFN
    unmatched = [(line["space"], line["blocks"]) for line in half["lines"] if line["group"] == "not matched"]
    assert unmatched == [("attn", "layers 0-0"), ("ffn", "layers 0-0")]
    varying = AlignConfig().varying(lambda name, place: AlignConfig(attention="none" if place else "rotation"))
    assert spaces(varying)["matched"] == ATTENTION + 2 * FFN
