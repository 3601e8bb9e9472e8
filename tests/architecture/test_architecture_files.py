"""Architecture files as their authors meet them: faults, folders of one's own, unknown models, other names."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rotation_merge.architecture import families, find, resolve, table
from rotation_merge.architecture.build import lay_out
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
    from rotation_merge.architecture.build import build

    spec = families()[family]
    return list(build(spec, config, spec.bases[0], []).named())


def layer(content: dict[str, Any]) -> dict[str, Any]:
    return content["modules"]["default"]["layer"]


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "misspelt entry": (
        lambda c: c.update(clases=[]),
        r"entry 'clases': there is no such entry; did you mean 'classes'",
    ),
    "missing entry": (lambda c: c.pop("streams"), r"entry 'streams': Field required"),
    "unknown word": (
        lambda c: layer(c)["linear"].update({"self_attn.q_proj": ["attn.q", "residul"]}),
        r"layer\.linear\.self_attn\.q_proj.*'residul' is neither space.role nor one of fixed, vocabulary",
    ),
    "misspelt option": (
        lambda c: layer(c)["linear"].update({"mlp.up_proj": {"axes": ["ffn.in", "residual.read"], "optinal": True}}),
        r"layer\.linear\.mlp\.up_proj\.optinal': there is no such entry; did you mean 'optional'",
    ),
    "misspelt size": (lambda c: layer(c)["spaces"]["attn"].update(haeds=3), r"haeds.*did you mean 'heads'"),
    "unknown kind": (lambda c: layer(c)["spaces"]["attn"].update(kind="atention"), r"spaces\.attn.*'atention'"),
    "two ways of fusing": (
        lambda c: layer(c)["linear"].update({"x": [{"split": ["attn.q"], "interleave": ["attn.q"]}, "residual.read"]}),
        r"layer\.linear\.x.*either 'split' or 'interleave'",
    ),
    "no such parent": (lambda c: c.update(extends="lama"), r"there is no family 'lama'; did you mean 'llama'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_entry_and_remedy(fault: str, tmp_path: Path) -> None:
    content = json.loads((DATA / "llama.json").read_text())
    change, wanted = FAULTS[fault]
    change(content)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ArchitectureError, match=wanted) as caught:
        load_file(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ArchitectureError, match=r"mine\.json: .*one JSON object"):
        load_file(path)


LATE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no such space": (lambda c: layer(c)["linear"].update(x=["attention.q", "residual.read"]), "no space is called"),
    "no such role": (lambda c: layer(c)["linear"].update(x=["attn.query", "residual.read"]), "has no role 'query'"),
    "no such size": (
        lambda c: layer(c)["spaces"]["ffn"].update(size="ffn_dim"),
        "space 'ffn' of .*layers.0 has no size",
    ),
    "heads do not divide": (lambda c: layer(c)["spaces"]["attn"].update(kv_heads=3), "do not divide into 3 KV groups"),
    "expression": (lambda c: layer(c)["spaces"]["ffn"].update(size="open('x')"), r"Call is not allowed"),
}


@pytest.mark.parametrize("fault", LATE)
def test_a_fault_that_only_a_config_shows(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((DATA / "llama.json").read_text())
    change, wanted = LATE[fault]
    change(content)
    (tmp_path / "llama.json").write_text(json.dumps(content))
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    with pytest.raises(ArchitectureError, match=wanted):
        resolve(LLAMA, [], "model")


def test_a_file_that_extends_another_changes_only_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = {
        "family": "mine",
        "title": "Mine",
        "extends": "llama",
        "classes": ["MineForCausalLM"],
        "modules": {"default": {"layer": {"linear": {"mlp.gate_proj": None}, "spaces": {"ffn": {"gated": False}}}}},
    }
    path.write_text(json.dumps(mine))
    spec, parent = load_file(path), families()["llama"]
    assert spec.classes == ["MineForCausalLM"]
    assert spec.bare == spec.model_types == spec.limits == []
    assert set(parent.modules["default"].layer.linear) - set(spec.modules["default"].layer.linear) == {"mlp.gate_proj"}
    assert spec.modules["default"].after == parent.modules["default"].after


def test_no_class_belongs_to_two_families() -> None:
    owners: dict[str, str] = {}
    for spec in families().values():
        assert set(spec.bare) <= set(spec.classes), spec.family
        for name in spec.classes:
            assert name not in owners, f"{name}: {owners.get(name)} and {spec.family}"
            owners[name] = spec.family


def test_a_config_without_classes_is_found_by_its_type_and_keeps_its_streams() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert getattr(find(config), "family", None) == "llama"
    architecture = resolve(config, names(config, "llama"), "model")
    assert architecture.stream_groups == {"residual": ("none",)}


def test_an_unknown_architecture_is_one_line_with_a_remedy() -> None:
    with pytest.raises(
        ArchitectureError, match=r"^model: architecture Nonsense is not supported; .*unsupported: merge"
    ):
        resolve({"architectures": ["Nonsense"]}, [], "model")


def test_missing_and_unknown_tensors_are_named() -> None:
    present = names(LLAMA, "llama")
    with pytest.raises(CheckpointError, match=r"1 tensors .* missing, the first is 'model\.layers\.1\.mlp\.up_proj"):
        resolve(LLAMA, [name for name in present if name != "model.layers.1.mlp.up_proj.weight"], "model")
    with pytest.raises(CheckpointError, match=r"1 tensors are not part .* 'extra\.weight'; .*unsupported: merge"):
        resolve(LLAMA, [*present, "extra.weight"], "model")
    architecture = resolve(LLAMA, [*present, "extra.weight"], "model", keep_unknown=True)
    assert architecture.named()["extra.weight"].axes == ()


def test_packed_weights_are_refused_with_the_remedy() -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj_blocks"]
    with pytest.raises(CheckpointError, match=r"quantised \(mxfp4\).*dequantize"):
        resolve(config, names, "gpt-oss")


def test_layers_that_a_model_does_not_read_are_left_out() -> None:
    """Layers for further tokens: ignored by transformers, not unknown, not written."""
    spec = shipped()["glm4_moe"]
    config = {**table.config_of(spec), "first_k_dense_replace": 2, "architectures": ["Glm4MoeForCausalLM"]}
    names = list(lay_out(spec, config).named())
    names = [name.replace("{base}", "model.") for name in names]
    further = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    found = resolve(config, [*names, *further], "glm")
    assert not set(further) & set(found.named())
    with pytest.raises(CheckpointError, match="not part of"):
        resolve(
            {**config, "num_hidden_layers": 1}, [n for n in names if "layers.1." not in n] + ["model.layers.3.x"], "glm"
        )


def test_keys_that_a_layer_does_not_read_are_left_out() -> None:
    """Gemma 4's layers that take keys and values of others hold some of their own in published files."""
    spec = shipped()["gemma4"]
    sizes = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "per_layer_config": {}}
    config = {**table.config_of(spec), **sizes, "architectures": ["Gemma4ForCausalLM"]}
    names = [name.replace("{base}", "model.") for name in lay_out(spec, config).named()]
    further = [f"model.layers.1.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    assert not set(further) & set(names)
    assert set(resolve(config, [*names, *further], "gemma").named()) == set(names)
    own = [name.replace("layers.1", "layers.0") for name in further]
    assert set(own) <= set(names)
    with pytest.raises(CheckpointError, match="missing"):
        resolve(config, sorted({*names, *further} - set(own)), "gemma")


def test_a_module_is_taken_from_another_family(tmp_path: Path) -> None:
    content = {
        "family": "mine",
        "title": "Mine",
        "classes": ["Mine"],
        "streams": {"residual": {"size": "text_config.hidden_size"}},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**content, "modules": {"text": {"extends": "llama.default", "config": "text_config"}}}))
    module = load_file(path).modules["text"]
    assert module.variables == shipped()["llama"].variables
    assert "self_attn.q_proj" in module.layer.linear
    path.write_text(json.dumps({**content, "modules": {"text": {"extends": "llama.text"}}}))
    with pytest.raises(ArchitectureError, match=r"modules\.text\.extends.*llama has no module 'text'"):
        load_file(path)


def test_old_norm_names_of_bert() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", **sizes}
    new = names(config, "bert")
    old = [n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for n in new]
    architecture = resolve(config, old, "model")
    assert set(architecture.named()) == set(old)
    assert {info.key for info in architecture.tensors()} == {i.key for i in resolve(config, new, "model").tensors()}


def test_unaligned_groups_tensors_by_layer() -> None:
    stored = ["embed.weight", "net.layers.0.a.weight", "net.layers.10.a.weight", "net.layers.10.moe.3.w", "head.bias"]
    architecture = unaligned(stored)
    assert [(b.name, b.index, len(b.tensors)) for b in architecture.blocks] == [
        ("embed.weight", None, 1),
        ("head.bias", None, 1),
        ("net.layers.0", 0, 1),
        ("net.layers.10", 10, 2),
    ]
    assert set(architecture.named()) == set(stored)
    tensors = {name: torch.ones(2, 3) for name in stored}
    assert all(read_block(block, tensors) for block in architecture.blocks)


def test_unaligned_keeps_stacks_apart() -> None:
    architecture = unaligned(["encoder.layer.0.w", "decoder.layer.0.w", "x"])
    assert {block.module for block in architecture.blocks} == {"encoder.layer", "decoder.layer", "default"}


def test_unaligned_finds_the_number_of_layers_in_the_config() -> None:
    stored = ["x", "h.0.w", "h.1.w"]
    assert unaligned(stored, {"n_heads": 2, "n_layer": 2}).layers_key == {"default": "n_layer"}
    assert unaligned(stored).layers_key == {"default": "num_hidden_layers"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a or b // 2", 4),
        ("kinds[i] == 'x' if kinds else True", True),
        ("nested.size + 1", 4),
        ("missing.size", None),
        ("'x' in word and not (i > 1)", True),
        ("-1 < i < 2", True),
        (True, True),
        (7, 7),
        (None, None),
    ],
)
def test_expressions(expression: Any, value: Any) -> None:
    config = {"b": 8, "i": 1, "kinds": ["y", "x"], "nested": {"size": 3}, "word": "axe"}
    before = copy.deepcopy(config)
    assert evaluate(expression, config) == value
    assert config == before


@pytest.mark.parametrize("expression", ["1 +", "a + 1", "f(1)", "[x for x in y]", "1 // 0", "__import__('os')"])
def test_expressions_without_a_value_say_so(expression: str) -> None:
    with pytest.raises(ArchitectureError, match=r"has no value for this config"):
        evaluate(expression, {})


class Name(str):
    """Whose comparisons are calls that a profiler sees."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def test_work_on_a_very_large_model_grows_with_its_tensors_alone():
    """Qwen3-235B: 94 layers of 128 experts. Calls are counted, so that every machine says the same."""
    config = LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_experts": 128,
        "head_dim": 4,
        "moe_intermediate_size": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
    }
    known = [
        Name(name) for name in names(config, "qwen_moe") if not name.endswith("bias") and "shared_expert" not in name
    ]
    assert len(known) > 36_000
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    resolve(config, known, "large")
    sys.setprofile(None)
    assert next(calls) < 50 * len(known)
