"""Adapters carried between bases whose files have the same weights in other forms: experts apart, or in one tensor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cli_support import run
from peft import PeftModel
from plugin_support import load, state, write_adapter
from safetensors.torch import load_file, save_file
from test_carry_peft import Home
from tiny_models import ALL, make
from torch import Tensor

import rotation_merge as rm

STACKED = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
FORMS = ("apart", "stacked")


@pytest.fixture(scope="module", params=FORMS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A mixture of experts whose file has them in one form, and the new base with the other one."""
    found = Home("mixtral", "untied", tmp_path_factory.mktemp(request.param))
    found.new(rm.AlignConfig(heads="permutation", residual="rotation"))
    other = "new" if request.param == "apart" else "old"
    found.base(other).save_pretrained(found.where / other, save_original_format=False)
    names = {name: set(load_file(found.where / name / "model.safetensors")) for name in ("old", "new")}
    stacked = [name for name in names if any("experts.gate_up_proj" in key for key in names[name])]
    assert stacked == [other]
    return found


def apart(home: Home) -> Tensor:
    """An adapter as it was trained when experts were modules; what the old base computes with it."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name in sorted(home.state):
        module = name.removesuffix(".weight")
        if module.endswith((".q_proj", ".w1", ".w2", ".w3")):
            gives, reads = home.state[name].shape
            for factor, shape in (("A", (2, reads)), ("B", (gives, 2))):
                values = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
                tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "w1", "w2", "w3"]}
    write_adapter({**config, "base_model_name_or_path": "old"}, tensors, home.where / "adapter")
    return with_adapter(home, "old", home.where / "adapter")


def adapted(folder: Path) -> set[str]:
    """Names of the modules that an adapter changes."""
    return {name.partition(".lora_")[0] for name in load_file(folder / "adapter_model.safetensors")}


def as_read(home: Home) -> Tensor:
    """What the old base computes with the adapter that is read with it."""
    model = load(f"{home.where / 'old'}+{home.where / 'adapter'}", torch.float64)
    model.config._experts_implementation = "eager"
    return home.logits(model)


def with_adapter(home: Home, base: str, adapter: Path) -> Tensor:
    model = PeftModel.from_pretrained(home.base(base), adapter, autocast_adapter_dtype=False)
    return home.logits(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_peft_runs_the_carried_adapter(home: Home, form: str, tmp_path: Path) -> None:
    """Whichever form the bases and the adapter have: the carried one computes what it computed at home, and so does the
    adapter that is read with its base."""
    expected = home.adapter(**STACKED) if form == "stacked" else apart(home)
    assert float((home.logits(home.base("old")) - expected).abs().max()) > 1e-2
    torch.testing.assert_close(as_read(home), expected, atol=1e-9, rtol=1e-9)
    bases = ("--from", home.where / "old", "--to", home.where / "new")
    groups = ("--heads", "permutation", "--residual", "rotation")
    done = run("carry", home.where / "adapter", *bases, tmp_path / "out", *groups)
    assert done.exit_code == 0, done.output
    assert adapted(tmp_path / "out") == adapted(home.where / "adapter")
    torch.testing.assert_close(with_adapter(home, "new", tmp_path / "out"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_one_piece_at_home_three_at_the_new_base(tmp_path: Path) -> None:
    """An adapter of NomicBERT's first code (Wqkv) for a base saved by transformers: every piece gets a copy of A."""
    home = Home("nomic_bert", "words", tmp_path)
    home.new(rm.AlignConfig(heads="permutation", residual="permutation"))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    changed = dict(home.state)
    for name in sorted(n for n in home.state if n.endswith(("Wqkv.weight", "fc11.weight", "out_proj.weight"))):
        gives, reads = home.state[name].shape
        rank = 3 if name.endswith("Wqkv.weight") else 2
        a, b = (0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for s in ((rank, reads), (gives, rank)))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        changed[name] = home.state[name] + 4 / rank * b @ a
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["Wqkv", "fc11", "out_proj"]}
    write_adapter({**config, "rank_pattern": {"Wqkv": 3}}, tensors, tmp_path / "adapter")
    save_file(changed, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    expected = home.logits(home.base("old"))
    save_file(home.state, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    assert float((home.logits(home.base("old")) - expected).abs().max()) > 1e-2
    home.base("new").save_pretrained(tmp_path / "new", save_original_format=False)
    bases = ("--from", tmp_path / "old", "--to", tmp_path / "new")
    done = run("carry", tmp_path / "adapter", *bases, tmp_path / "out", "--heads", "permutation")
    assert done.exit_code == 0, done.output
    assert not any("Wqkv" in name for name in adapted(tmp_path / "out"))
    torch.testing.assert_close(with_adapter(home, "new", tmp_path / "out"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_experts_that_peft_takes_the_wrong_way_round(tmp_path: Path) -> None:
    """Llama 4 stores them as (in, out) and does not say so: read as peft reads them, and not carried as such."""
    home = Home("llama4", "plain", tmp_path)
    home.new(rm.AlignConfig())
    expected = home.adapter(target_modules=[], target_parameters=["experts.down_proj"])
    torch.testing.assert_close(as_read(home), expected, atol=1e-9, rtol=1e-9)
    done = run("carry", tmp_path / "adapter", "--from", tmp_path / "old", "--to", tmp_path / "new", tmp_path / "out")
    assert done.exit_code == 2
    assert "', as peft does with this base's experts; merge the adapter into" in done.output


def test_bases_of_two_families_are_refused(tmp_path: Path) -> None:
    """Phi-3 holds in one piece what Llama holds apart."""
    for family, name in (("phi3", None), ("llama", "llama")):
        case = next(c for c in ALL if c.family == family and name in (None, c.name))
        make(case).save_pretrained(tmp_path / family)
    done = run("carry", tmp_path / "phi3", "--from", tmp_path / "phi3", "--to", tmp_path / "llama", tmp_path / "out")
    assert done.exit_code == 2
    assert re.search(r"architecture is phi3, that of .* is llama", done.output)


def test_other_names_alone(tmp_path: Path) -> None:
    """DINOv2's attention is called otherwise in files of before and of today; what a fine-tune changed is the same."""
    case = next(c for c in ALL if (c.family, c.name) == ("dinov2", "registers"))
    model = make(case)
    model.save_pretrained(tmp_path / "old")
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "tuned")
    model.save_pretrained(tmp_path / "wanted", save_original_format=False)
    bases = ("--from", tmp_path / "old", "--to", tmp_path / "new", "--force")
    done = run("carry", tmp_path / "tuned", *bases, tmp_path / "out")
    assert done.exit_code == 0, done.output
    found, wanted = state(tmp_path / "out"), state(tmp_path / "wanted")
    assert found.keys() == wanted.keys() != state(tmp_path / "tuned").keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)
