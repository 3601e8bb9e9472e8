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
from rotation_merge.architecture import families
from rotation_merge.architecture.registry import DATA, shipped
from rotation_merge.diagnose.draft import draft_content, matching_families
from rotation_merge.diagnose.proof import Finding, hints, prove


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.json"


Shapes = dict[str, tuple[int, ...]]


def described(family: str, folder: Path | None = None) -> tuple[dict[str, Any], Shapes]:
    """The config of a family's tiny model, and the shapes of its tensors, as a checkpoint names them."""
    model = tiny(next(case for case in ALL if case.family == family))
    state = model.state_dict()
    if folder is not None:
        model.float().save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return config, {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.slow
def test_a_draft_of_a_llama_is_proven_as_it_stands(file: Path, tmp_path: Path) -> None:
    """Names and shapes alone give the file of a plain decoder; what is left to check goes to stderr."""
    drafted = run("inspect", str(make("llama", tmp_path / "model")), "--draft")
    assert drafted.exit_code == 0
    assert "check: rotary embedding" in drafted.stderr
    layer, known = (
        json.loads(drafted.stdout)["modules"]["default"]["layer"],
        shipped()["llama"].modules["default"].layer,
    )
    assert layer["linear"] == {name: specs[0].axes for name, specs in known.linear.items() if len(specs) == 1}
    assert {n: set(norm["reads"]) for n, norm in layer["norms"].items()} == {
        n: set(specs[0].reads) for n, specs in known.norms.items() if len(specs) == 1
    }
    file.write_text(drafted.stdout)
    findings = {entry["what"]: entry for entry in json.loads(output_of("inspect", "--prove", str(file), "--json"))}
    assert all(entry["holds"] for entry in findings.values())
    assert findings["residual: rotation"]["difference"] <= 1e-9
    assert findings["wrong rotary layout"]["difference"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo2", "gpt2", "bert"])
def test_a_draft_of_one_more_model_extends_its_family(family: str, file: Path, tmp_path: Path) -> None:
    """Unlike one another and unlike the usual: names and shapes say whose file fits, and the draft is proven."""
    described(family, tmp_path / "model")
    drafted = run("inspect", str(tmp_path / "model"), "--draft")
    assert json.loads(drafted.stdout)["extends"] == family
    assert f"those of {family};" in drafted.stderr
    file.write_text(drafted.stdout)
    output_of("inspect", "--prove", str(file))


@pytest.mark.parametrize("family", ["starcoder2", "olmoe"])
def test_a_draft_of_a_family_that_is_not_there_is_proven_as_it_stands(family: str, file: Path, tmp_path: Path) -> None:
    """LayerNorm and maps of odd names, known by their shapes; experts one by one, a norm over all heads."""
    content, doubts = draft_content(*described(family, tmp_path / "model"), "mine")
    file.write_text(json.dumps(content))
    before = families()
    findings = {finding.what: finding for finding in prove(file)}
    assert all(finding.holds for finding in findings.values()), findings
    assert families() == before
    assert {"residual: rotation", "wrong rotary layout"} <= set(findings)
    text = str(content)
    assert ("experts.{e}." in text and "'attn.q_gain'" in text) == (family == "olmoe")
    assert any("out of neurons" in doubt for doubt in doubts) == (family == "starcoder2")


@pytest.mark.slow
def test_hints_lead_to_the_file(file: Path) -> None:
    """A draft takes RoPE pairs to be halves; where they are neighbours, the proof says what to change."""
    content, _ = draft_content(*described("ernie4_5"), "mine")
    file.write_text(json.dumps(content))
    wrong = run("inspect", "--prove", str(file))
    assert (wrong.exit_code, "WRONG" in wrong.stdout) == (1, True)
    assert wrong.stderr == "hint: with the other rotary layout outputs stay as they are: change 'layout'\n"
    file.write_text(json.dumps(content).replace('"half"', '"interleaved"'))
    right = run("inspect", "--prove", str(file))
    assert (right.exit_code, right.stderr) == (0, "")


def test_norms_whose_output_goes_back_and_layers_that_differ() -> None:
    """EXAONE 4 norms what its sublayers give, Hunyuan names head norms at length; not all layers are alike."""
    for family, heads in (("exaone4", "q_norm"), ("hunyuan", "query_layernorm")):
        config, shapes = described(family)
        shapes = {name: shape for name, shape in shapes.items() if "layers.1.self_attn.k_" not in name}
        layer = draft_content(config, shapes, "mine")[0]["modules"]["default"]["layer"]
        assert layer["tensors"][f"self_attn.{heads}.weight"] == ["attn.q_norm"]
        assert layer["linear"]["self_attn.k_proj"] == {"axes": ["attn.k", "residual.read"], "optional": True}
        assert any(norm["reads"] for norm in layer["norms"].values()) == (family == "hunyuan")


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
    findings = [Finding(trial, 0.0, trial not in failing) for trial in (*trials, "residual: rotation")]
    assert [word in hint for hint in hints(findings)] == [True]


def test_families_that_fit_a_class_nobody_knows() -> None:
    """By names and shapes alone: of a Mixtral under another name, its family."""
    config, shapes = described("mixtral")
    config = {**config, "architectures": ["MineForCausalLM"], "model_type": "mine"}
    assert matching_families(config, shapes) == ["mixtral"]
    assert matching_families(config, {**shapes, "odd.weight": (3,)}) == []


@pytest.mark.slow
def test_latents_mixers_and_gates_are_proven_too() -> None:
    assert all(finding.holds for finding in prove(DATA / "deepseek.json"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["NoSuchForCausalLM"]}, "has no class 'NoSuchForCausalLM'"),
        ({"example": {"num_attention_heads": "four"}}, "no small LlamaForCausalLM can be made"),
        ({"streams": {"residual": {"size": "2 * hidden_size"}}}, "has shape .*, its config says"),
    ],
)
def test_what_cannot_be_tried_is_one_line(changes: dict[str, Any], words: str, file: Path) -> None:
    file.write_text(json.dumps({**json.loads((DATA / "llama.json").read_text()), **changes}))
    with pytest.raises(RotationMergeError, match=words):
        prove(file)


def test_a_draft_names_what_it_does_not_know() -> None:
    shapes: Shapes = {"embed.weight": (9, 8), "h.0.attn.qkv.weight": (24, 8), "h.0.odd": (3,), "h.0.ln.weight": (8,)}
    content, doubts = draft_content({"hidden_size": 8, "vocab_size": 9}, {**shapes, "out.weight": (5, 8)}, "mine")
    layer = content["modules"]["default"]["layer"]
    assert layer["linear"]["attn.qkv"] == [{"split": ["attn.q", "attn.k", "attn.v"]}, "residual.read"]
    assert layer["tensors"] == {"odd": ["fixed"]}
    assert [doubt for doubt in doubts if "'odd' [3]" in doubt]
    assert [doubt for doubt in doubts if "'out.weight' [5, 8]" in doubt]
    with pytest.raises(RotationMergeError, match="no numbered layers"):
        draft_content({}, {"a.weight": (3, 3)}, "mine")
