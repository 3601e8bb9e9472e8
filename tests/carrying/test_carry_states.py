"""`rotation_merge.transfer`: state dicts and modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugin_support import make
from safetensors.torch import load_file
from tiny_models import ALL, difference, outputs, planted

import rotation_merge

LLAMA = next(case for case in ALL if case.family == "llama" and not case.config.get("tie_word_embeddings"))


@pytest.mark.parametrize("residual", ["signed_permutation", None])
def test_what_is_carried_computes_what_it_computed_at_home(residual: str | None) -> None:
    model = planted(LLAMA)
    generator = torch.Generator().manual_seed(0)
    noise = {name: 0.02 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in model.state.items()}
    norms = [name for name in noise if noise[name].ndim == 1]  # a change of gains is not carried under rotations
    tuned = {name: x if name in norms else x + noise[name] for name, x in model.state.items()}
    expected = outputs(model.holding(tuned), model.given)
    new = model.twin(heads="permutation", residual="signed_permutation")
    given = {} if residual is None else {"residual": residual}
    models = [(state, model.config) for state in (tuned, model.state, new)]
    carried = rotation_merge.transfer(*models, heads="permutation", **given)
    assert difference(outputs(model.holding(carried.state_dict()), model.given), expected) <= 1e-5
    assert carried.report.relative_distances("old")[1] <= 1e-5
    none = rotation_merge.transfer(*models, scale=0.0, heads="permutation", **given)
    assert model.differs(none.state_dict()) <= 1e-5


def test_what_has_no_counterpart_is_named() -> None:
    model = planted(LLAMA)
    less = {name: x for name, x in model.state.items() if name != "lm_head.weight"}
    with pytest.raises(rotation_merge.RotationMergeError, match=r"lm_head\.weight"):
        rotation_merge.transfer(*((state, model.config) for state in (less, model.state, model.state)))


def test_a_change_is_a_value(tmp_path: Path) -> None:
    """Scaled, moved and applied: as `transfer` does it; an adapter stays one, on the way of the command."""
    first, second = (make("llama", tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    state = load_file(first / "model.safetensors")
    config = json.loads((first / "config.json").read_text())
    tuned = ({name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in state.items()}, config)
    delta = rotation_merge.Delta.between(first, tuned)
    assert torch.equal(delta.applied()["model.norm.weight"], tuned[0]["model.norm.weight"])
    for name, change in (0.5 * delta).state_dict().items():
        torch.testing.assert_close(change, 0.5 * (tuned[0][name] - state[name]).double(), atol=1e-7, rtol=1e-5)
    config_of = rotation_merge.TransferConfig.from_values({"scale": 0.5, "heads": "permutation"})
    alignment = rotation_merge.align(second, first, config_of.match)
    moved, carried = (0.5 * delta).moved(alignment, second), rotation_merge.transfer(tuned, first, second, config_of)
    for name, tensor in moved.applied().state_dict().items():
        assert torch.equal(tensor, carried[name]), name
    lora = rotation_merge.transfer(tuned, first, second, rank=2)
    lora.save_pretrained(str(tmp_path / "lora"))
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["r"] == 2
    again = rotation_merge.transfer(str(tmp_path / "lora"), second, first)
    assert again.tensors.keys() == lora.tensors.keys()
    with pytest.raises(rotation_merge.RotationMergeError, match="option 'method' is 'refitt'; did you mean 'refit'"):
        rotation_merge.transfer(tuned, first, second, method="refitt")
