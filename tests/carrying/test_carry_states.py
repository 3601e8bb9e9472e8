"""`rotation_merge.transfer`: state dicts and modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugin_support import make
from residual_support import checkpoint
from safetensors.torch import load_file
from tiny_models import ALL, difference, outputs, planted

import rotation_merge

LLAMA = next(case for case in ALL if case.family == "llama" and not case.config.get("tie_word_embeddings"))


@pytest.mark.slow
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


def test_models_of_other_sizes_have_no_change() -> None:
    model = planted(LLAMA)
    wide = {name: torch.cat([x, x]) if "up_proj" in name else x for name, x in model.state.items()}
    with pytest.raises(rotation_merge.RotationMergeError, match=r"up_proj.*has shape"):
        rotation_merge.Delta.between((model.state, model.config), (wide, model.config))


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_change_of_a_head_takes_the_class_order_of_the_new_base(tmp_path: Path) -> None:
    """As a value, and by `transfer` in memory."""
    new, old = (checkpoint("bert", "classifier", tmp_path / str(seed), seed=seed) for seed in range(2))
    names = [f"class {number}" for number in range(len(new.config["id2label"]))]
    for path, order in {new.path: names, old.path: names[::-1]}.items():
        config = json.loads((path / "config.json").read_text()) | {"id2label": dict(enumerate(order))}
        config["label2id"] = {name: number for number, name in enumerate(order)}
        (path / "config.json").write_text(json.dumps(config))
    name, state = "classifier.weight", old.state
    tuned = old.write({**state, name: state[name] + torch.randn(state[name].shape)}, tmp_path / "tuned")
    expected = (tuned.state[name] - state[name]).flip(0)
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    alignment = rotation_merge.align(new.path, old.path, **still)
    moved = rotation_merge.Delta.between(old.path, tuned.path).moved(alignment, new.path).applied()
    carried = rotation_merge.transfer(tuned.path, old.path, new.path, **still)
    for result in (moved, carried):
        torch.testing.assert_close(result[name] - new.state[name], expected)


def test_a_change_is_moved_by_an_alignment_of_its_own_base_alone(tmp_path: Path) -> None:
    new, old, other = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(3))
    delta, alignment = rotation_merge.Delta.between(old.path, other.path), rotation_merge.align(new.path, other.path)
    with pytest.raises(
        rotation_merge.RotationMergeError, match=r"is not that of .*2, which the alignment was made for"
    ):
        delta.moved(alignment, new.path).applied().state_dict()
    assert delta.moved(alignment, new.path, strict=False).applied().state_dict()


@pytest.mark.slow
def test_results_of_models_in_memory_name_no_temporary_folder(tmp_path: Path) -> None:
    new, old = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    tuned = {name: x + 0.01 * torch.randn_like(x) for name, x in old.state.items()}, old.config
    module = new.case.model_class.from_pretrained(new.path)
    adapter = rotation_merge.transfer(tuned, (old.state, old.config), module, rank=2)
    assert adapter.config["base_model_name_or_path"] == str(new.path)
    assert (
        rotation_merge.transfer(tuned, old.path, (new.state, new.config), rank=2).config["base_model_name_or_path"]
        is None
    )
    assert adapter.report is not None
    assert adapter.report.anchor == "new"
    assert not any("rotation-merge-" in line for line in (*adapter.notes, adapter.report.text(), repr(adapter)))
    vit = next(case for case in ALL if (case.family, case.name) == ("vit", "classifier")).model_class
    images = [vit(vit.config_class(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)) for _ in range(2)]
    with pytest.raises(rotation_merge.RotationMergeError, match=r"^tuned: ViTForImageClassification writes no text"):
        rotation_merge.transfer(images[1], *images, method="refit")


@pytest.mark.slow
def test_samples_in_memory_are_those_of_a_file(tmp_path: Path) -> None:
    """They solve and judge, between stored models and between models in memory."""
    paths = [make("llama", tmp_path / name, seed) for seed, name in enumerate(("tuned", "old", "new"))]
    config = json.loads((paths[0] / "config.json").read_text())
    ids = torch.randint(0, 40, (32, 10), generator=torch.Generator().manual_seed(0))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids.tolist()))
    batches = [{"input_ids": rows} for rows in ids.split(16)]
    options = {"method": "refit", "scale": 1.0, "residual": "none"}
    expected = rotation_merge.transfer(*paths, data=str(tmp_path / "texts.jsonl"), samples=32, **options)
    in_memory = [(load_file(path / "model.safetensors"), config) for path in paths]
    for models in (paths, in_memory):
        carried = rotation_merge.transfer(*models, samples=batches, **options)
        assert carried.report.data[-1]["source"] == "samples in memory"
        assert carried.report.lift["method"] == "refit"
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(carried[name], tensor, atol=1e-6, rtol=1e-5)
