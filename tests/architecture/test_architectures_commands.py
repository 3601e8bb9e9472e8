"""`rotation-merge inspect --draft` and `--prove`: a file for a model that is not there, and the proof of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import output_of, run
from plugin_support import make
from safetensors.torch import load_file
from tiny_models import ALL
from tiny_models import make as tiny

from rotation_merge import RotationMergeError
from rotation_merge.architecture import registry
from rotation_merge.architecture.registry import DATA, shipped
from rotation_merge.diagnose.draft import draft_content, matching_families
from rotation_merge.diagnose.proof import Finding, hints, prove


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_extra", {})


@pytest.mark.slow
def test_a_draft_of_a_llama_is_proven_as_it_stands(tmp_path: Path) -> None:
    """Names and shapes alone give the file of a plain decoder; what is left to check goes to stderr."""
    made = run("inspect", str(make("llama", tmp_path / "model")), "--draft")
    assert made.exit_code == 0
    assert "check: rotary embedding" in made.stderr
    content = json.loads(made.stdout)
    layer = content["modules"]["default"]["layer"]
    known = shipped()["llama"].modules["default"].layer
    assert layer["linear"] == {name: specs[0].axes for name, specs in known.linear.items() if len(specs) == 1}
    assert {n: set(norm["reads"]) for n, norm in layer["norms"].items()} == {
        n: set(specs[0].reads) for n, specs in known.norms.items() if len(specs) == 1
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    proven = run("inspect", "--prove", str(path), "--json")
    findings = {entry["what"]: entry for entry in json.loads(proven.stdout)}
    assert proven.exit_code == 0
    assert all(entry["holds"] for entry in findings.values())
    assert findings["residual: rotation"]["difference"] <= 1e-9
    assert findings["wrong rotary layout"]["difference"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo2", "gpt2", "bert"])
def test_a_draft_of_one_more_model_extends_its_family(family: str, tmp_path: Path) -> None:
    """Unlike one another and unlike the usual: names and shapes say whose file fits, and the draft is proven."""
    case = next(case for case in ALL if case.family == family)
    tiny(case).float().save_pretrained(tmp_path / "model")
    made = run("inspect", str(tmp_path / "model"), "--draft")
    assert json.loads(made.stdout)["extends"] == family
    assert f"those of {family};" in made.stderr
    (tmp_path / "mine.json").write_text(made.stdout)
    output_of("inspect", "--prove", str(tmp_path / "mine.json"))


@pytest.mark.parametrize("family", ["starcoder2", "olmoe"])
def test_a_draft_of_a_family_that_is_not_there_is_proven_as_it_stands(family: str, tmp_path: Path) -> None:
    """LayerNorm and maps of odd names, known by their shapes; experts one by one, a norm over all heads."""
    model = tiny(next(case for case in ALL if case.family == family))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    model.save_pretrained(tmp_path / "model")
    shapes = {name: tuple(x.shape) for name, x in load_file(tmp_path / "model" / "model.safetensors").items()}
    content, doubts = draft_content(config, shapes, "mine")
    (tmp_path / "mine.json").write_text(json.dumps(content))
    found = {finding.what: finding for finding in prove(tmp_path / "mine.json")}
    assert all(finding.holds for finding in found.values()), found
    assert {"residual: rotation", "wrong rotary layout"} <= set(found)
    said = str(content)
    assert ("experts.{e}." in said and "'attn.q_gain'" in said) == (family == "olmoe")
    assert any("out of neurons" in doubt for doubt in doubts) == (family == "starcoder2")


@pytest.mark.slow
def test_hints_lead_to_the_file(tmp_path: Path) -> None:
    """A draft takes RoPE pairs to be halves; where they are neighbours, the proof says what to change."""
    model = tiny(next(case for case in ALL if case.family == "ernie4_5"))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    content, _ = draft_content(config, {name: tuple(x.shape) for name, x in model.state_dict().items()}, "mine")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    wrong = run("inspect", "--prove", str(path))
    assert wrong.exit_code == 1
    assert wrong.stderr == "hint: with the other rotary layout outputs stay as they are: change 'layout'\n"
    path.write_text(json.dumps(content).replace('"half"', '"interleaved"'))
    right = run("inspect", "--prove", str(path))
    assert (right.exit_code, right.stderr) == (0, "")


def test_norms_whose_output_goes_back_and_layers_that_differ() -> None:
    """EXAONE 4 norms what its sublayers give, Hunyuan names head norms at length; not all layers are alike."""
    exaone, hunyuan = (tiny(next(case for case in ALL if case.family == f)) for f in ("exaone4", "hunyuan"))
    for model, heads in ((exaone, "q_norm"), (hunyuan, "query_layernorm")):
        shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        shapes = {name: s for name, s in shapes.items() if "layers.1.self_attn.k_" not in name}
        layer = draft_content(config, shapes, "mine")[0]["modules"]["default"]["layer"]
        assert layer["tensors"][f"self_attn.{heads}.weight"] == ["attn.q_norm"]
        assert layer["linear"]["self_attn.k_proj"] == {"axes": ["attn.k", "residual.read"], "optional": True}
        assert any(norm["reads"] for norm in layer["norms"].values()) == (model is hunyuan)


@pytest.mark.parametrize(
    ("failing", "word"),
    [
        (("attention alone",), "'dims' of rotary embedding"),
        (("order of heads alone",), "'kv_head'"),
        (("neurons and experts alone",), "'gated'"),
        (("residual: rotation",), "'reads'"),
        (("residual: permutation", "residual: rotation"), "'fixed'"),
    ],
)
def test_what_fails_is_hinted_at(failing: tuple[str, ...], word: str) -> None:
    trials = ("attention alone", "order of heads alone", "neurons and experts alone", "residual: permutation")
    found = [Finding(what, 0.0, what not in failing) for what in (*trials, "residual: rotation")]
    assert [word in hint for hint in hints(found)] == [True]


def test_families_that_fit_a_class_nobody_knows() -> None:
    """By names and shapes alone: of a Mixtral under another name, its family."""
    case = next(case for case in ALL if case.family == "mixtral")
    model = tiny(case)
    config = {**model.config.to_dict(), "architectures": ["MineForCausalLM"], "model_type": "mine"}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert matching_families(config, shapes) == ["mixtral"]
    assert matching_families(config, {**shapes, "odd.weight": (3,)}) == []


@pytest.mark.slow
def test_a_wrong_file_fails(tmp_path: Path) -> None:
    content = json.loads((DATA / "llama.json").read_text())
    content["modules"]["default"]["layer"]["spaces"]["attn"]["rotary"]["layout"] = "interleaved"
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(content))
    found = run("inspect", "--prove", str(path))
    assert found.exit_code == 1
    assert "WRONG" in found.stdout


@pytest.mark.slow
def test_latents_mixers_and_gates_are_proven_too() -> None:
    for family in ("deepseek",):
        assert all(finding.holds for finding in prove(DATA / f"{family}.json")), family


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["NoSuchForCausalLM"]}, "has no class 'NoSuchForCausalLM'"),
        ({"example": {"num_attention_heads": "four"}}, "no small LlamaForCausalLM can be made"),
    ],
)
def test_what_cannot_be_tried_is_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**json.loads((DATA / "llama.json").read_text()), **changes}))
    with pytest.raises(RotationMergeError, match=words):
        prove(path)


def test_a_draft_names_what_it_does_not_know() -> None:
    shapes = {
        "embed.weight": (9, 8),
        "h.0.attn.qkv.weight": (24, 8),
        "h.0.odd": (3,),
        "h.0.ln.weight": (8,),
        "out.weight": (5, 8),
    }
    content, doubts = draft_content({"hidden_size": 8, "vocab_size": 9}, shapes, "mine")
    layer = content["modules"]["default"]["layer"]
    assert layer["linear"]["attn.qkv"] == [{"split": ["attn.q", "attn.k", "attn.v"]}, "residual.read"]
    assert layer["tensors"] == {"odd": ["fixed"]}
    assert [doubt for doubt in doubts if "'odd' [3]" in doubt]
    assert [doubt for doubt in doubts if "'out.weight' [5, 8]" in doubt]
    with pytest.raises(RotationMergeError, match="no numbered layers"):
        draft_content({}, {"a.weight": (3, 3)}, "mine")
