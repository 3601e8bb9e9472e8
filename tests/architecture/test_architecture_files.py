"""Architecture files as their authors meet them: faults, folders of one's own, unknown models, other names."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rotation_merge.architecture import families, find, resolve, table
from rotation_merge.architecture.build import lay_out, with_checkpoint_names
from rotation_merge.architecture.expression import evaluate
from rotation_merge.architecture.registry import DATA, FOLDERS, load_file, shipped, unaligned
from rotation_merge.errors import ArchitectureError, CheckpointError
from rotation_merge.model.apply import read_block

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def names(config: dict[str, Any], family: str) -> list[str]:
    """Every tensor that a model of this config may have, in the spelling of the file."""
    spec = families()[family]
    return list(with_checkpoint_names(lay_out(spec, config), spec.bases[0], []).named())


def layer(content: dict[str, Any]) -> dict[str, Any]:
    return content["modules"]["default"]["layer"]


def linear(**maps: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: layer(content)["linear"].update(maps)


def space(name: str, **entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: layer(content)["spaces"][name].update(entries)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "misspelt entry": (lambda c: c.update(clases=[]), r"'clases': there is no such entry; did you mean 'classes'"),
    "missing entry": (lambda c: c.pop("streams"), r"entry 'streams': Field required"),
    "unknown word": (
        linear(q=["attn.q", "residul"]),
        r"layer\.linear\.q.*'residul' is neither space.role nor one of fixed, vocabulary",
    ),
    "misspelt option": (
        linear(up={"axes": ["ffn.in", "residual.read"], "optinal": True}),
        r"layer\.linear\.up\.optinal': there is no such entry; did you mean 'optional'",
    ),
    "misspelt size": (space("attn", haeds=3), r"haeds.*did you mean 'heads'"),
    "unknown kind": (space("attn", kind="atention"), r"spaces\.attn.*'atention'"),
    "two ways of fusing": (
        linear(x=[{"split": ["attn.q"], "interleave": ["attn.q"]}, "residual.read"]),
        r"layer\.linear\.x.*either 'split' or 'interleave'",
    ),
    "no such parent": (lambda c: c.update(extends="lama"), r"there is no family 'lama'; did you mean 'llama'"),
    "no such module": (
        lambda c: c["modules"].update(text={"extends": "llama.text"}),
        r"modules\.text\.extends.*llama has no module 'text'",
    ),
}
LATE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no such space": (linear(x=["attention.q", "residual.read"]), "no space is called"),
    "no such role": (linear(x=["attn.query", "residual.read"]), "has no role 'query'"),
    "a map of one axis": (
        linear(**{"experts.{e}.x": ["residual.read"]}),
        r"map 'experts\.\{e\}\.x' has too few axes; name its outputs",
    ),
    "no axes": (linear(x=[]), "map 'x' has too few axes"),
    "no such size": (space("ffn", size="ffn_dim"), "space 'ffn' of .*layers.0 has no size"),
    "heads do not divide": (space("attn", kv_heads=3), "do not divide into 3 KV groups"),
    "expression": (space("ffn", size="open('x')"), r"Call is not allowed"),
}
"""Faults that only a config shows."""


@pytest.mark.parametrize("fault", [*FAULTS, *LATE])
def test_a_fault_names_file_entry_and_remedy(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((DATA / "llama.json").read_text())
    change, words = {**FAULTS, **LATE}[fault]
    change(content)
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    with pytest.raises(ArchitectureError, match=words) as caught:
        resolve(LLAMA, [], "model")
    assert str(caught.value).startswith(str(path)) == (fault in FAULTS)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ArchitectureError, match=r"mine\.json: .*one JSON object"):
        load_file(path)


def test_a_file_that_extends_another_changes_only_what_it_says(tmp_path: Path) -> None:
    change = {"layer": {"linear": {"mlp.gate_proj": None}, "spaces": {"ffn": {"gated": False}}}}
    mine = {"family": "mine", "title": "Mine", "extends": "llama", "classes": ["MineForCausalLM"]}
    (tmp_path / "mine.json").write_text(json.dumps({**mine, "modules": {"default": change}}))
    spec, parent = load_file(tmp_path / "mine.json"), families()["llama"]
    assert (spec.classes, spec.bare, spec.model_types, spec.limits) == (["MineForCausalLM"], [], [], [])
    assert set(parent.modules["default"].layer.linear) - set(spec.modules["default"].layer.linear) == {"mlp.gate_proj"}
    assert spec.modules["default"].after == parent.modules["default"].after


def test_no_class_belongs_to_two_families() -> None:
    classes = [name for spec in families().values() for name in spec.classes]
    assert len(classes) == len(set(classes))
    assert all(set(spec.bare) <= set(spec.classes) for spec in families().values())


def test_a_config_without_classes_is_found_by_its_type_and_keeps_its_streams() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert getattr(find(config), "family", None) == "llama"
    assert resolve(config, names(config, "llama"), "model").stream_groups == {"residual": ("none",)}


def test_keys_that_a_layer_does_not_read_are_left_out() -> None:
    """Gemma 4's layers that take keys and values of others hold some of their own in published files."""
    config = table.config_of(shipped()["gemma4"])
    config |= {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "per_layer_config": {}}
    config |= {"architectures": ["Gemma4ForCausalLM"]}
    present = names(config, "gemma4")
    first, further = (
        [f"model.layers.{n}.self_attn.{x}.weight" for x in ("k_proj", "v_proj", "k_norm")] for n in (0, 1)
    )
    assert not set(further) & set(present)
    assert set(resolve(config, [*present, *further], "gemma").named()) == set(present)
    with pytest.raises(CheckpointError, match="missing"):
        resolve(config, [name for name in [*present, *further] if name not in first], "gemma")


def test_old_norm_names_of_bert() -> None:
    config = {**LLAMA, "architectures": ["BertForMaskedLM"], "model_type": "bert"}
    new = names(config, "bert")
    old = [n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for n in new]
    first, second = (resolve(config, present, "model") for present in (new, old))
    assert set(second.named()) == set(old)
    assert {info.key for info in first.tensors()} == {info.key for info in second.tensors()}


def test_an_unknown_model_is_cut_into_layers_by_its_names_alone() -> None:
    """Stacks apart, every tensor in one block; the number of layers is found in the config."""
    stored = ["embed.weight", "net.layers.0.a.weight", "net.layers.10.a.weight", "net.layers.10.moe.3.w", "h.0.w"]
    architecture = unaligned(stored, {"n_heads": 2, "n_layer": 1})
    assert [(b.name, b.module, b.index, len(b.tensors)) for b in architecture.blocks] == [
        ("h.0", "h", 0, 1),
        ("embed.weight", "net.layers", None, 1),
        ("net.layers.0", "net.layers", 0, 1),
        ("net.layers.10", "net.layers", 10, 2),
    ]
    assert set(architecture.named()) == set(stored)
    tensors = {name: torch.ones(2, 3) for name in stored}
    assert all(read_block(block, tensors) for block in architecture.blocks)
    short = ["x", "h.0.w", "h.1.w"]
    assert unaligned(short, {"n_heads": 2, "n_layer": 2}).layers_key == {"default": "n_layer"}
    assert unaligned(short).layers_key == {"default": "num_hidden_layers"}


def test_expressions() -> None:
    """What no shipped file has: a sign, comparisons in a row, an entry of what is not there."""
    values = [evaluate(text, {"i": 1}) for text in ("-1 < i <= 1", "-1 < i <= 0", "missing.size", "missing[2]")]
    assert values == [True, False, None, None]


@pytest.mark.parametrize("expression", ["1 +", "a + 1", "f(1)", "[x for x in y]", "1 // 0", "__import__('os')"])
def test_expressions_without_a_value_say_so(expression: str) -> None:
    with pytest.raises(ArchitectureError, match=r"has no value for this config"):
        evaluate(expression, {})


class Name(str):
    """Whose comparisons are calls that a profiler sees."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def test_work_on_a_very_large_model_grows_with_its_tensors_alone() -> None:
    """Qwen3-235B: 94 layers of 128 experts. Calls are counted, so that every machine says the same."""
    config = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu"}
    config |= {"num_hidden_layers": 94, "num_experts": 128, "head_dim": 4, "moe_intermediate_size": 4}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    possible = names(config, "qwen_moe")
    stored = [Name(name) for name in possible if not name.endswith("bias") and "shared_expert" not in name]
    assert len(stored) > 36_000
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    resolve(config, stored, "large")
    sys.setprofile(None)
    assert next(calls) < 50 * len(stored)
