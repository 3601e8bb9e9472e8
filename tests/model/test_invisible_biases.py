"""Biases that softmax cannot see: donors get the anchor's, what they compute unchanged, and twins merge exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import build, make, merged, recipe_for, save, write_state
from plugin_support import twin as moved_twin
from residual_support import Checkpoint, checkpoint, recipe
from residual_support import twin as stream_twin
from test_averaging import data_for, measure, state, worst
from tiny_models import Case, planted, twin_of
from torch import Tensor
from variants import ONE

import rotation_merge as rm
from rotation_merge.architecture.model import Architecture, Axis, Part, Space
from rotation_merge.model.apply import split_axis
from rotation_merge.model.biases import HiddenBias, block_hidden_biases

TOLERANCE = 2e-4
BIASED = ("vit", "bert", "opt", "gpt2", "whisper", "bart", "clip", "distilbert", "siglip", "dinov2", "phi", "gpt_neox")
HEADS = {"heads": "permutation"}


def entries(axis: Axis, space: Space, role: str) -> Tensor:
    """The entries of an axis that play one role, in the order of the role's own factors."""
    piece = axis.pieces.index((Part(space, role),))
    return split_axis(torch.arange(axis.size or 0), 0, axis)[piece].flatten()


def hidden(architecture: Architecture) -> Iterator[tuple[HiddenBias, Tensor]]:
    """The biases of keys and values that softmax cannot see, and their entries in the tensors that hold them."""
    for bias in (bias for block in architecture.blocks for bias in block_hidden_biases(block)):
        yield bias, entries(bias.info.axes[0], bias.space, bias.role)


def shifted(architecture: Architecture, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """A model with other key biases and with value biases moved into output biases; and how many were changed."""
    twin, biases = {name: tensor.clone() for name, tensor in tensors.items()}, list(hidden(architecture))
    generator = torch.Generator().manual_seed(4)
    for bias, rows in biases:
        shift = torch.randn(len(rows), generator=generator, dtype=torch.float64).to(twin[bias.info.name])
        twin[bias.info.name][rows] += shift
        if bias.output is not None and bias.bias is not None:
            axes = enumerate(bias.output.axes)
            dim, axis = next((dim, axis) for dim, axis in axes if (Part(bias.space, "o"),) in axis.pieces)
            heads = shift.unflatten(0, bias.space.factors("v"))[:, None].expand(bias.space.factors("o")).flatten()
            inputs = torch.zeros(axis.size or 0).to(shift).index_put((entries(axis, bias.space, "o"),), heads)
            output = torch.tensordot(twin[bias.output.name], inputs, dims=([dim], [0]))
            twin[bias.bias.name] = twin[bias.bias.name] - output
    return twin, len(biases)


@pytest.mark.parametrize("case", [case for case in ONE if not case.images], ids=lambda case: case.family)
def test_a_twin_with_other_unseen_biases_is_the_anchor(case: Case) -> None:
    """In other coordinates besides."""
    model = planted(case)
    twin, changed = shifted(model.architecture, model.state)
    assert changed or case.family not in BIASED
    if not changed:
        return
    assert model.differs(twin) <= 1e-9
    donor = twin_of((twin, model.config), heads="permutation")
    aligned = moved(donor, model.state, model.config, heads="permutation")
    assert model.differs(aligned) <= 1e-9
    assert all(float((aligned[n] - x).norm()) <= 1e-6 * float(x.norm()) for n, x in model.state.items())
    _check_other_donors(case)


def moved(donor: dict[str, Tensor], anchor: dict[str, Tensor], config: Any, **options: Any) -> dict[str, Tensor]:
    """The tensors of a donor in the anchor's coordinates."""
    return rm.align((anchor, config), (donor, config), **options).apply((donor, config)).state_dict()


def _check_other_donors(case: Case) -> None:
    """A donor that is no twin computes what it did, and has the anchor's unseen biases."""
    model = planted(case)
    draw = torch.Generator().manual_seed(5)
    anchor = {n: x + 0.3 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    residual = model.architecture.residual_groups[-1]
    options = {"residual": residual} if residual == "permutation" else {}
    aligned = moved(model.state, anchor, model.config, **HEADS, **options)
    assert model.differs(aligned) <= 1e-9
    for bias, rows in hidden(model.architecture):
        torch.testing.assert_close(aligned[bias.info.name][rows], anchor[bias.info.name][rows])


@pytest.mark.slow
def test_a_turned_stream_takes_them_along() -> None:
    """With gains folded and writers centred, too."""
    model = planted(next(case for case in ONE if case.family == "opt")).untied
    twin, _ = shifted(model.architecture, model.state)
    donor = twin_of((twin, model.config), heads="permutation")
    options = {"heads": "permutation", "residual": "rotation"}
    aligned = moved(donor, model.state, model.config, **options)
    still = moved(model.state, model.state, model.config, **options)
    assert model.differs(aligned) <= 1e-9
    assert all(float((aligned[n] - x).norm()) <= 1e-6 * float(x.norm()) for n, x in still.items())


def test_disentangled_attention_sees_the_biases_of_keys() -> None:
    model = planted(next(case for case in ONE if case.family == "deberta_v2"))
    assert not list(hidden(model.architecture))


def test_a_donor_that_is_the_anchor_stays_bit_for_bit() -> None:
    model = planted(next(case for case in ONE if case.family == "vit"))
    aligned = moved(model.state, model.state, model.config)
    assert all(torch.equal(aligned[name], tensor) for name, tensor in model.state.items())


def architecture(path: Path) -> Any:
    return rm.average([str(path)]).architecture


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An anchor, and a twin with other unseen biases in other coordinates; both measured."""
    folder = tmp_path_factory.mktemp("biases")
    anchor = make("bert", folder / "anchor")
    moved = moved_twin(anchor, folder / "moved")
    tensors, changed = shifted(architecture(anchor), state(moved))
    assert changed == 4
    twin = write_state(tensors, anchor, folder / "twin")
    data = data_for(anchor, folder / "data.npz")
    for model in (anchor, twin):
        measure(model, data)
    return anchor, twin


@pytest.mark.slow
@pytest.mark.parametrize("delegate", ["linear", "regmean", "refit"])
def test_recipes_merge_twins_exactly(delegate: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, twin = models
    plain = recipe_for("linear", anchor, twin)
    plain["parameters"]["delegate"] = delegate
    if delegate == "refit":
        plain["parameters"] |= {"data": str(anchor.parent / "data.npz"), "ridge": 0.001}
    assert worst(merged(plain, tmp_path / "out"), state(anchor)) < TOLERANCE


@pytest.mark.slow
def test_recipes_take_them_along_in_turned_streams(tmp_path: Path) -> None:
    """GPT-2: queries, keys and values in one tensor, stored as (in, out); gains folded, writers centred."""
    tied = checkpoint("gpt2", next(case.name for case in ONE if case.family == "gpt2"), tmp_path / "anchor")
    anchor = Checkpoint(tied.case, tied.path, untied=True)
    moved = stream_twin(anchor, tmp_path / "moved", "rotation")
    twin = moved.write(shifted(moved.architecture, moved.state)[0], tmp_path / "twin")
    same = anchor.write(anchor.state, tmp_path / "same")
    of_same, of_twin = (
        merged(recipe(anchor, donor, residual="rotation", untie=True), tmp_path / f"of-{donor.path.name}")
        for donor in (same, twin)
    )
    assert worst(of_twin, of_same) < TOLERANCE


@pytest.mark.slow
def test_align_writes_the_anchors_biases(models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, twin = models
    done = run("align", anchor, twin, tmp_path / "out", "--heads", "permutation", "--alignment", tmp_path / "maps")
    assert done.exit_code == 0, done.output
    assert worst(state(tmp_path / "out"), state(anchor)) < TOLERANCE
    name = "bert.encoder.layer.0.attention.self.key.bias"
    assert torch.equal(state(tmp_path / "out")[name], state(anchor)[name])
    plain = recipe_for("linear", anchor, twin)
    plain["models"][1]["parameters"]["alignment"] = str(tmp_path / "maps")
    plain["parameters"] = {"delegate": "linear"}
    assert worst(merged(plain, tmp_path / "replayed"), state(anchor)) < TOLERANCE
    same = run("align", anchor, twin, "--heads", "permutation").output
    assert "one model in two coordinate systems" in same


@pytest.mark.slow
def test_a_gram_follows_the_bias_of_values(tmp_path: Path) -> None:
    """Of two models that differ elsewhere too, the merge is the same whichever twin of the donor is given."""
    anchor, donor = make("bert", tmp_path / "anchor"), save(build("bert", 1), tmp_path / "donor")
    twin = write_state(shifted(architecture(donor), state(donor))[0], donor, tmp_path / "twin")
    data = data_for(anchor, tmp_path / "data.npz")
    for model in (anchor, donor, twin):
        measure(model, data)
    merges = []
    for model in (donor, twin):
        plain = recipe_for("linear", anchor, model)
        plain["parameters"]["delegate"] = "regmean"
        merges.append(merged(plain, tmp_path / f"of-{model.name}"))
    assert worst(*merges) < 2e-3
