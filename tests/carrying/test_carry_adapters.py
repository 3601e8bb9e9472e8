"""Adapters carried to another base: the law over all families and groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from carry_support import make_adapter, merged, other_coordinates
from tiny_models import ALL, Case, difference, outputs, planted

from rotation_merge import AlignConfig, Delta
from rotation_merge.architecture import resolve
from rotation_merge.carrying.adapter import carry_adapter
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.delta import of_low_rank
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.factors import dense
from rotation_merge.model.source import read_tensor

FAMILIES = list({case.family: case for case in sorted(ALL, key=lambda case: "untied" in case.name)}.values())
"""A case of each family, one with a head of its own if there is one."""
GROUPS = {
    "local": AlignConfig(heads="permutation"),
    "invertible": AlignConfig(attention="invertible", scaling=False, residual="permutation"),
    "signed": AlignConfig(heads="permutation", residual="signed_permutation"),
    "rotation": AlignConfig(heads="permutation", residual="rotation"),
}


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_carried_adapter_computes_what_it_computed_at_home(case: Case, tmp_path: Path) -> None:
    """New base = old base in other coordinates, so far as each group is admitted; adapters on everything."""
    model = planted(case)
    untied = resolve(model.config, list(model.state), case.name, untie=True)
    if any("rotation" in groups for groups in untied.stream_groups.values()):
        model = model.untied
    architecture, config, state, given = model.architecture, model.config, model.state, model.given
    home = outputs(model.holding(state), given)
    admitted = {group for groups in architecture.stream_groups.values() for group in groups}
    shifts = "rotation" in admitted and any(norm.layer for block in architecture.blocks for norm in block.norms)
    adapter = make_adapter(architecture, state, embeddings=not shifts)  # peft has no lora_bias for embeddings
    adapter.save_pretrained(str(tmp_path / "adapter"))
    stored = Adapter(str(tmp_path / "adapter"))
    expected = outputs(model.holding(merged(adapter, architecture, state)), given)
    assert difference(home, expected) > 1e-3
    for what, options in GROUPS.items():
        if options.residual not in admitted:
            continue
        new, alignment = other_coordinates(architecture, state, options)
        carried = carry_adapter(stored, Carrier(architecture, state, new, alignment), config, "new")
        assert difference(outputs(model.holding(new), given), home) <= 1e-8, what
        there = outputs(model.holding(merged(carried.adapter, architecture, new)), given)
        size = max(float(x.abs().max()) for x in expected.values())
        assert difference(there, expected) <= 1e-8 * max(size, 1), what
    for info in architecture.tensors():
        if (stored_tensor := read_tensor(info, state)) is not None and stored_tensor.ndim > 1:
            again = dense(of_low_rank(stored_tensor, info, 10**6), info)
            assert torch.allclose(again, stored_tensor, atol=1e-9), info.name
    tuned = Delta(Carrier(architecture, state, new, alignment), merged(adapter, architecture, state))
    whole = {name: x for _, pieces, *_ in tuned.tensors() for name, x in pieces.items()}
    assert set(whole) == set(new)
    there = outputs(model.holding(whole), given)
    assert difference(there, expected) <= 1e-8 * max(size, 1)
