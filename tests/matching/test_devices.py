"""Every tensor takes its device from its inputs: families and groups, on a second device that needs no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cli_support import CHECKPOINTS, TEXTS
from matching_support import gen
from second_device import Far, second_device, sent
from test_groups import D, N, Pair, groups
from torch import Tensor, nn

from rotation_merge import AlignConfig, Alignment
from rotation_merge.architecture import table
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import shipped
from rotation_merge.linalg import scaling
from rotation_merge.matching import block, heads, match, mean
from rotation_merge.matching.between import LearnedTransforms
from rotation_merge.matching.fit import fit
from rotation_merge.matching.match import match_model
from rotation_merge.matching.match_on import ROWS, Activations, match_on_samples
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.moving import mover
from rotation_merge.matching.options import FitConfig
from rotation_merge.matching.stream import random_gauge
from rotation_merge.model.open import open_model
from rotation_merge.run.batches import unlabelled
from rotation_merge.run.data import read_samples
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.symmetry import Stats, Transform
from rotation_merge.symmetry.element import element_of, in_batch_order, tensors_of
from rotation_merge.symmetry.group import Group

SMALL = {64: 16, 16: 8, 8: 4, 4: 2, 2: 1}
"""Sizes of the samples, and what they are here."""

FAMILIES = (
    *("llama", "bert", "deepseek", "falcon_h1", "gpt_neox", "mixtral", "qwen3", "qwen3_next", "t5", "vit"),
    *("cohere2_moe", "gemma4", "glm5", "gpt_oss", "hunyuan", "mamba", "nemotron_h", "olmo2"),
)
"""Together they have spaces of every kind, norm, rotary style and activation, and streams of every group."""
SEVERAL = ("gpt_neox", "llama", "vit")
BASE, OTHER = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-1"))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are no matter of sizes, and of the first step as much as of the last."""
    monkeypatch.setattr(table, "SIZES", {keys: SMALL.get(size, size) for keys, size in table.SIZES.items()})
    for module, name in ((match, "MOST_PASSES"), (block, "MOST_ROUNDS"), (mean, "MOST_ROUNDS"), (heads, "TURNS")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(scaling, "NEWTON", 1)
    monkeypatch.setattr(scaling, "STEPS", 8)


def weights(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Random tensors under the names of a checkpoint."""
    result = {}
    for info in architecture.tensors():
        shape = [axis.size or 5 for axis in info.axes][info.stacked :]
        for name in info.names:
            result[name] = torch.randn(shape, generator=gen(seed + len(result))) + (len(shape) == 1)
    return result


def wishes(architecture: Architecture) -> list[AlignConfig]:
    """Options that together ask for every group of its spaces that a family admits, and the largest of its stream.

    In some families for every group of the stream, too, and for spaces and stream in turns.
    """
    residual = [kind for kind in architecture.residual_groups if kind != "none"]
    residual = residual if architecture.family in SEVERAL else residual[-1:]
    return [
        AlignConfig(heads="permutation"),
        AlignConfig(ffn="none", scaling="sequential"),
        AlignConfig(heads="spectral", ffn="none", scaling=False),
        *(AlignConfig(attention="none", ffn="none", scaling=False, residual=kind) for kind in residual),
        *(AlignConfig(residual=kind) for kind in residual[-1:] if architecture.family in SEVERAL),
    ]


def held(x: Tensor) -> Tensor:
    return x.held if isinstance(x, Far) else x


def tensors(architecture: Architecture, donor: dict[str, Tensor], alignment: Alignment) -> dict[str, Tensor]:
    """A donor's tensors in the anchor's coordinates, as a view computes them."""
    tensor = mover(architecture, donor, alignment.transforms, alignment.folded)
    moved = {info.name: tensor(b, info, None) for b in architecture.blocks for info in b.tensors}
    return {name: x for name, x in moved.items() if x is not None}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_matching_applying_folding_and_learning(family: str) -> None:
    """Learned transforms act where the model is, and end on the CPU; so do maps of several models to their mean."""
    architecture = table.sample(shipped()[family])
    anchor, donor = weights(architecture, 1), weights(architecture, 2)
    near = match_model(architecture, anchor, donor, wishes(architecture)[0]).transforms if family in SEVERAL else {}
    anchor, donor = sent(anchor), sent(donor)
    together: dict[str, Transform] = {}
    with second_device():
        for options in wishes(architecture):
            found = match_model(architecture, anchor, donor, options)
            gauge = Alignment(random_gauge(architecture, options, gen(3)), found.folded)
            for alignment in (found, gauge):
                assert all(isinstance(x, Far) for x in tensors(architecture, donor, alignment).values())
            again = {name: transform.inverse().compose(transform) for name, transform in found.transforms.items()}
            assert all(d < 1e-5 for transform in again.values() for d in transform.distances().values())
            pairs = [(near[name].tensors(), found.transforms[name].tensors()) for name in near]
            assert all(torch.allclose(held(x[key]), held(y[key]), atol=1e-4) for x, y in pairs for key in x)
            near, together = {}, found.transforms | together  # those of the widest groups
        module = LearnedTransforms(architecture, together)
        for name, parameter in list(module.steps.items()):
            module.steps[name] = nn.Parameter(Far(parameter.detach().clone()))
        moved = tensors(architecture, donor, Alignment(module(), ()))
        sum(x.square().sum() for x in moved.values()).backward()
        assert any(parameter.grad is not None for parameter in module.parameters())
        assert not any(isinstance(x, Far) for t in module.final_transforms().values() for x in t.tensors().values())
        if family in SEVERAL:
            models = {str(seed): sent(weights(architecture, 50 * seed)) for seed in range(3)}
            options = AlignConfig(scaling=False, residual=architecture.residual_groups[-1])
            for name, alignment in match_to_mean(architecture, models, "0", options).items():
                assert all(isinstance(x, Far) for x in tensors(architecture, models[name], alignment).values())


@groups
def test_elements_and_statistics(group: Group) -> None:
    """Elements act where tensors are; the best for statistics of the second device is that for the CPU's."""
    with second_device() as device:
        near, x = group.random(N, D, gen(1)), Far(torch.randn(N, D, 3, generator=gen(2)))
        far = element_of({name: tensor.to(device) for name, tensor in tensors_of(near).items()})
        for element in (far.inverse(), far.compose(far), in_batch_order(far, torch.tensor([1, 0, 2])), near):
            assert isinstance(element.act(x, 0, 1, dual=True), Far)
        assert far.is_identity() == near.is_identity()
        stats = Pair.random().stats
        there = Stats(*(tuple(map(Far, of_sides)) for of_sides in (stats.products, stats.donor, stats.anchor)))
        best = group.solve(there)
        assert not any(isinstance(tensor, Far) for tensor in tensors_of(best).values())
        torch.testing.assert_close(best.matrices(), group.solve(stats).matrices())
        torch.testing.assert_close(held(there.gain(best)), stats.gain(best))


@pytest.mark.slow
def test_matching_on_samples_and_a_whole_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of samples are kept on the CPU, whatever device the weights are on; learned parameters go to these.

    Losses are the same there.
    """
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which does not know the second device
    models = [load(name) for name in (BASE, OTHER)]
    data = read_samples(BASE, str(TEXTS / "python.txt"), 6, 2, 16, module=models[0])
    batches, loss = data.batches, score(models[0], data).loss
    rows = [Activations.of(open_model(model), [unlabelled(batch) for batch in batches], ROWS) for model in models]
    anchor, donor = (sent({name: x.detach() for name, x in model.state_dict().items()}) for model in models)
    options = AlignConfig(heads="permutation", scaling=False, residual="rotation")
    for how in ("activations", "both"):
        with second_device():
            matcher = partial(match_on_samples, how, lambda: (rows[0], rows[1]), None)
            found = matcher(architecture_of(models[0]), anchor, donor, options)
        assert not any(isinstance(x, Far) for x in found.transforms["residual"].tensors().values())
    for module in models[0].modules():  # the donor stays where it is
        for name, x in module._parameters.items():
            module._parameters[name] = None if x is None else nn.Parameter(Far(x.detach().clone()))
        module._buffers.update({n: None if x is None else Far(x.clone()) for n, x in module._buffers.items()})
    with second_device():
        assert score(models[0], data).loss == pytest.approx(loss, rel=1e-6)
        result = fit(models[0], models[1:], batches, options=FitConfig(steps=1, start="identity"))
    assert result.report.after <= result.report.before
