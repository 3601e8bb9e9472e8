"""Changes moved at every map's inputs by itself: exact between bases that are one in other coordinates; of low rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from carry_support import other_coordinates
from cli_support import run
from plugin_support import make, state
from residual_support import case
from tiny_models import planted

import rotation_merge as rm


@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("gpt2", "untied")])
def test_bases_that_are_one_in_other_coordinates_need_no_maps_of_their_own(
    family: str, name: str, tmp_path: Path
) -> None:
    """With them the new base still computes what the fine-tune did at home."""
    model = planted(case(family, name))
    draw = torch.Generator().manual_seed(0)
    tuned = {n: x + 0.05 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    new, alignment = other_coordinates(
        (model.state, model.config), rm.AlignConfig(heads="permutation", residual="rotation")
    )
    ids = torch.randint(0, model.config["vocab_size"], (48, 12), generator=draw)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids.tolist()))
    data = {"data": str(tmp_path / "texts.jsonl"), "samples": 48}
    config = rm.TransferConfig("activations", 1.0, alignment=alignment, **data)
    carried = rm.transfer(*((tensors, model.config) for tensors in (tuned, model.state, new)), config)
    with torch.no_grad():
        wanted, plain, found = (
            model.holding(tensors)(input_ids=ids).logits for tensors in (tuned, new, carried.state_dict())
        )
    (maps,) = (note for note in carried.notes if "input maps of their own" in note)
    assert int(maps.split()[0]) > 2 * 2  # in each layer
    assert float((found - wanted).norm()) < 1e-4 * float((plain - wanted).norm())


def test_a_fine_tune_and_its_adapter_are_carried_so(tmp_path: Path) -> None:
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    old, new, tuned = (make("llama", tmp_path / name, seed) for seed, name in enumerate(("old", "new", "tuned")))
    asked = ("--from", old, "--to", new, "--carry", "activations", "--scale", 1, "--samples", 32)
    asked = (*asked, "--data", tmp_path / "texts.jsonl")
    done = run("carry", tuned, tmp_path / "whole", *asked)
    assert done.exit_code == 0, done.output
    assert "linear maps have input maps of their own" in done.output
    assert "matched on weights and activations" in done.output
    assert any(
        not torch.equal(x, y) for x, y in zip(state(new).values(), state(tmp_path / "whole").values(), strict=True)
    )
    done = run("carry", tuned, tmp_path / "lora", *asked, "--lora", 2, "--match-on", "weights")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["r"] == 2
    for option in (("--match-on", "both"), ("--heads", "permutation")):
        done = run("carry", tuned, tmp_path / "none", *asked, *option, "--alignment", tmp_path / "file")
        assert done.exit_code == 2
        assert f"leave out {option[0]}" in done.output
