"""`rotation-merge align --learn` on models as people have them: with an adapter, in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import tqdm
from cli_support import hasten, run
from click.testing import Result
from plugin_support import mergekit_yaml
from safetensors.torch import load_file, save_file
from test_fit import tiny_llama, token_batches
from torch import Tensor

from rotation_merge.matching.between import Mixture


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an adapter of the second and what it makes of that, and samples."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("anchor", "donor")):
        tiny_llama(seed).save_pretrained(folder / name)
        tiny_llama(seed).bfloat16().save_pretrained(folder / f"{name}-half")
        tiny_llama(seed).bfloat16().float().save_pretrained(folder / f"{name}-rounded")
    tuned = peft.get_peft_model(tiny_llama(1), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    tuned.save_pretrained(folder / "lora")
    tuned.merge_and_unload().save_pretrained(folder / "tuned")
    save_file({"input_ids": torch.cat([batch["input_ids"] for batch in token_batches(2)])}, folder / "data.safetensors")
    return folder


RECIPE = """
merge_method: rotation_merge
base_model: {anchor}
models:
  - model: {anchor}
    parameters: {{weight: 0.0}}
  - model: {donor}
    parameters: {{weight: 1.0{more}}}
parameters: {{delegate: linear{groups}}}
dtype: float32
"""


def fit(models: Path, out: Path, *names: str, options: str = "") -> Result:
    data = ["--data", str(models / "data.safetensors"), "--batch-size", "4", "--steps", "2"]
    return run("align", *names, "--learn", *data, "--alignment", out, *options.split())


def learned(models: Path, out: Path, *names: str, options: str = "") -> dict[str, Tensor]:
    result = fit(models, out, *names, options=options)
    assert result.exit_code == 0, result.output
    return load_file(out)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], within: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=within)


@pytest.mark.slow
def test_a_donor_with_an_adapter_is_the_donor_that_it_makes(models: Path, tmp_path: Path) -> None:
    donor, anchor = f"{models / 'donor'}+{models / 'lora'}", str(models / "anchor")
    found = learned(models, tmp_path / "lora", anchor, donor, options="--residual rotation")
    wanted = learned(models, tmp_path / "tuned", anchor, str(models / "tuned"), options="--residual rotation")
    same(found, wanted, 1e-5)
    recipe = RECIPE.format(anchor=anchor, donor=donor, more=f", alignment: {tmp_path / 'lora'}", groups="")
    moved = mergekit_yaml(recipe, tmp_path / "out")
    assert moved.exit_code == 0, moved.output
    verified = run("verify", tmp_path / "out", models / "tuned")
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_models_stay_in_the_type_that_they_are_stored_in(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless numbers would change: what is learned is what models of the same numbers in float32 learn."""
    options, held = "--start matched --match-on both", list[list[set[torch.dtype]]]()
    stock = Mixture.__init__

    def watched(self: Mixture, architecture: Any, parents: Any, *arguments: Any) -> None:
        held.append([{tensor.dtype for tensor in parent.values()} for parent in parents])
        stock(self, architecture, parents, *arguments)

    monkeypatch.setattr(Mixture, "__init__", watched)
    found, wanted = (
        learned(models, tmp_path / kind, str(models / f"anchor-{kind}"), str(models / f"donor-{kind}"), options=options)
        for kind in ("half", "rounded")
    )
    same(found, wanted, 1e-5)
    assert held == [[{torch.bfloat16}] * 2, [{torch.float32}] * 2]


@pytest.mark.slow
def test_an_interrupted_fit_continues(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, options = ("anchor", "donor"), "--steps 8 --residual rotation"
    names = tuple(str(models / name) for name in names)
    whole = learned(models, tmp_path / "whole.safetensors", *names, options=options)
    hasten(monkeypatch)
    stock, out, updates = tqdm.tqdm.update, tmp_path / "out.safetensors", list[float]()

    def interrupted(bar: Any, steps: float = 1) -> Any:
        updates.append(steps)
        if len(updates) == 6:
            raise KeyboardInterrupt
        return stock(bar, steps)

    monkeypatch.setattr(tqdm.tqdm, "update", interrupted)
    assert fit(models, out, *names, options=options).exit_code == 130
    assert (tmp_path / "out.safetensors.unfinished" / "state").exists()
    updates.clear()
    again = learned(models, out, *names, options=options)
    assert len(updates) < 6
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert not list(tmp_path.glob("*.unfinished"))
