"""Adapters carried to another base: the law over all families and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from carry_support import make_adapter, merged, other_coordinates
from tiny_models import ALL, Case, difference, outputs, planted

import rotation_merge as rm
from rotation_merge import AlignConfig

FAMILIES = list({case.family: case for case in sorted(ALL, key=lambda case: "untied" in case.name)}.values())
"""A case of each family, one with a head of its own if there is one."""
GROUPS = {
    "local": AlignConfig(heads="permutation"),
    "permutation": AlignConfig(scaling=False, residual="permutation"),
    "signed": AlignConfig(heads="permutation", residual="signed_permutation"),
    "rotation": AlignConfig(heads="permutation", residual="rotation"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_carried_adapter_computes_what_it_computed_at_home(case: Case, tmp_path: Path) -> None:
    """New base = old base in other coordinates, so far as each group is admitted; adapters on everything."""
    model = planted(case)
    if rm.Alignment.random((model.state, model.config), residual="largest", untie=True).folded:
        model = model.untied
    architecture, config, state, given = model.architecture, model.config, model.state, model.given
    home = outputs(model.holding(state), given)
    admitted = {group for groups in architecture.stream_groups.values() for group in groups}
    shifts = "rotation" in admitted and any(norm.layer for block in architecture.blocks for norm in block.norms)
    adapter = make_adapter(architecture, state, embeddings=not shifts)  # peft has no lora_bias for embeddings
    adapter.save_pretrained(str(tmp_path / "adapter"))
    expected = outputs(model.holding(merged(adapter, architecture, state)), given)
    assert difference(home, expected) > 1e-3
    for what, options in GROUPS.items():
        if options.residual not in admitted:
            continue
        if options.residual != "none":
            groups = architecture.stream_groups
            streams = {name: options.residual if options.residual in groups[name] else "none" for name in groups}
            options = replace(options, residual=",".join(f"{name}={group}" for name, group in streams.items()))
        new, alignment = other_coordinates((state, config), options)
        bases, chosen = ((state, config), (new, config)), rm.TransferConfig(alignment=alignment)
        carried = rm.transfer(tmp_path / "adapter", *bases, chosen)
        assert difference(outputs(model.holding(new), given), home) <= 1e-8, what
        there = outputs(model.holding(merged(carried, architecture, new)), given)
        size = max(float(x.abs().max()) for x in expected.values())
        assert difference(there, expected) <= 1e-8 * max(size, 1), what
    change = rm.Delta.between((state, config), (merged(adapter, architecture, state), config))
    whole = change.moved(alignment, (new, config)).applied().state_dict()
    assert set(whole) == set(new)
    there = outputs(model.holding(whole), given)
    assert difference(there, expected) <= 1e-8 * max(size, 1)


def test_experts_with_biases_beside_their_factors(tmp_path: Path) -> None:
    """`lora_bias` on experts that are stored apart: where nothing is moved, nothing changes."""
    model = planted(next(case for case in FAMILIES if case.family == "mixtral"))
    adapter = make_adapter(model.architecture, model.state, lora_bias=True)
    experts = {name: factor for name, factor in adapter.tensors.items() if "experts" in name and "lora_B" in name}
    adapter.tensors.update({name.replace("weight", "bias"): factor[:, 0] for name, factor in experts.items()})
    adapter.save_pretrained(tmp_path / "adapter")
    base = model.state, model.config
    carried = rm.transfer(tmp_path / "adapter", base, base, alignment=rm.Alignment({}))
    assert len(experts) > 2
    assert carried.tensors.keys() == adapter.tensors.keys()
    for name, factor in carried.tensors.items():
        torch.testing.assert_close(factor, adapter.tensors[name])
