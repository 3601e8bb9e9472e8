"""Changes moved at every map's inputs by itself: exact between bases that are one in other coordinates; of low rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from carry_support import other_coordinates
from cli_support import run
from plugin_support import make, state
from tiny_models import ALL, inputs, keep_float64, reload, save
from tiny_models import make as tiny

from rotation_merge import AlignConfig
from rotation_merge.architecture import resolve
from rotation_merge.carrying.carrier import Carrier, site_maps
from rotation_merge.matching.activations import Activations
from rotation_merge.model.factors import LowRank, dense
from rotation_merge.run.functions import architecture_of


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bases_that_are_one_in_other_coordinates_need_no_maps_of_their_own(family: str, tmp_path: Path) -> None:
    case = next(c for c in ALL if (c.family, c.name) in (("llama", "llama"), ("gpt2", "untied")) and c.family == family)
    config, stored = save(tiny(case), tmp_path)
    architecture = resolve(config, list(stored), case.name, untie=True)
    new, alignment = other_coordinates(architecture, stored, AlignConfig(heads="permutation", residual="rotation"))
    seen = []
    for tensors in (new, stored):
        model = reload(case, tmp_path, tensors)
        with keep_float64():
            batches = [inputs(case, model, seed) for seed in range(8)]
            seen.append(Activations.of(model, architecture_of(model), batches))
    carrier = Carrier(architecture, stored, new, alignment)
    found = site_maps(carrier, *seen)
    assert len(found) > 2 * len(architecture.layers(next(iter(architecture.layers_key))))
    for name, site in found.items():
        torch.testing.assert_close(site, torch.eye(len(site), dtype=site.dtype), rtol=0, atol=1e-4, msg=name)
    assert all(not torch.equal(stored[name], new[name]) for name in found)


def test_a_change_of_low_rank_moves_as_the_whole() -> None:
    """``D M^T``, on the inputs' side alone."""
    case = next(c for c in ALL if (c.family, c.name) == ("llama", "llama"))
    model = tiny(case)
    architecture, tensors = architecture_of(model), model.state_dict()
    new, alignment = other_coordinates(architecture, tensors, AlignConfig(residual="rotation"))
    draw = torch.Generator().manual_seed(0)
    block = architecture.layers("default")[0]
    info = next(i for i in block.tensors if i.name.endswith("down_proj.weight"))
    out, width = tensors[info.name].shape
    turn = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))[0]
    low = LowRank(torch.randn(2, width, generator=draw).double(), torch.randn(out, 2, generator=draw).double())
    plain, moved = (Carrier(architecture, tensors, new, alignment, sites=s) for s in ({}, {info.name: turn}))
    factors = moved.block(block, {info.key: low})[info.key]
    assert isinstance(factors, LowRank)
    whole = moved.block(block, {info.key: dense(low, info)})[info.key]
    torch.testing.assert_close(dense(factors, info), whole)
    before = plain.block(block, {info.key: dense(low, info)})[info.key]
    torch.testing.assert_close(whole, before @ turn.mT)


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
    done = run("carry", tuned, tmp_path / "none", *asked, "--match-on", "both", "--alignment", tmp_path / "file")
    assert done.exit_code == 2
    assert "leave out --match-on" in done.output
