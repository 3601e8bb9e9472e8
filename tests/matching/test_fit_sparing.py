"""A fit that holds no mixed weights: forward and gradients are those of the whole mixed model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path as FilePath
from typing import Any

import pytest
import tiny_models
import torch
from cli_support import run
from safetensors.torch import save_file
from second_device import Far, second_device
from test_fit import tiny_llama, token_batches
from torch import Tensor

from rotation_merge import AlignConfig, Alignment, FitConfig, fit
from rotation_merge.matching import engine
from rotation_merge.matching.engine import Path, untie_heads
from rotation_merge.matching.mixing import Mixed, Mixing

FAMILIES = ("llama", "mixtral", "gpt2", "t5", "deberta_v2", "vit", "deepseek")
"""Maps of every kind: heads in groups, stacked experts, transposed maps, shared tables, biases, latents."""

FIRST = {case.family: case for case in reversed(tiny_models.ALL)}
WIDEST = AlignConfig(heads="permutation", residual="largest")


def leaves(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor) and held.is_floating_point():
        yield held
    elif isinstance(held, dict | list | tuple):
        for one in held.values() if isinstance(held, dict) else held:
            yield from leaves(one)
    elif is_dataclass(held):
        vars(held).pop("_learned", None)  # as it was before it was learned
        yield from leaves([getattr(held, own.name) for own in fields(held)])


def outputs_and_gradients(path: Path, gauges: list, share: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    moved = [tensor.requires_grad_(True) for tensor in (share, *leaves(gauges))]
    with tiny_models.keep_float64():
        weights = path.weights(gauges, share)
        with path.holding(weights):
            found = dict(tiny_models.floating("", path.outputs(weights, given)))
            sum(x.square().sum() for x in found.values()).backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in moved]
    for tensor in moved:
        tensor.grad = None
    return [*(x.detach() for x in found.values()), *gradients]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_held_is_the_same_as_all_held(family: str, monkeypatch: pytest.MonkeyPatch):
    """Three models, all in float64: with maps on activations, on weights, and the whole model mixed."""
    case = FIRST[family]
    models = [tiny_models.make(case, seed) for seed in range(3)]
    drawn = [Alignment.random(models[0], WIDEST, seed=seed, untie=True) for seed in range(2)]
    architecture, folded = drawn[0].basis.architecture, drawn[0].folded
    if folded:
        for model in models:
            untie_heads(model, architecture)
    given = tiny_models.inputs(case, models[0])
    states = [dict(model.state_dict()) for model in models]
    gauges = [alignment.transforms for alignment in drawn]
    share = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    found = []
    for held, acting in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(Mixing, "_less", lambda *_, acting=acting: acting)
        path = Path.between(models[0], architecture, states[0], states[1:], folded, torch.device("cpu"), held)
        assert held != any(isinstance(x, Mixed) for x in path.weights(gauges, share).values())
        found.append(outputs_and_gradients(path, gauges, share, given))
    for other in found[1:]:
        for wanted, tensor in zip(found[0], other, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-10 * max(1.0, float(wanted.abs().max())))


@pytest.mark.slow
@pytest.mark.parametrize(("held", "half"), [(True, False), (False, True)], ids=["held", "half precision"])
def test_parents_on_two_devices_learn_the_same(held: bool, half: bool, monkeypatch: pytest.MonkeyPatch):
    """The donor on a device of its own: products there, all else where the anchor is; operations on both raise."""
    monkeypatch.setattr(engine, "LARGEST_HELD", 1 << 20 if held else 0)
    found = []
    for far in (False, True):
        dtype = torch.bfloat16 if half else torch.float32
        models = [tiny_llama(seed, num_hidden_layers=1).to(dtype) for seed in range(2)]
        with second_device() if far else nullcontext():
            for name, parameter in list(models[1].named_parameters()) if far else []:
                owner, _, leaf = name.rpartition(".")
                setattr(models[1].get_submodule(owner), leaf, torch.nn.Parameter(Far(parameter.detach())))
            for name, buffer in list(models[1].named_buffers()) if far else []:
                owner, _, leaf = name.rpartition(".")
                setattr(models[1].get_submodule(owner), leaf, Far(buffer))
            options = FitConfig(steps=1, objective="distill", start="matched")
            found.append(fit(*models, token_batches(2), options=options))
    for mine, wanted in zip(found[1].report.history, found[0].report.history, strict=True):
        assert mine[2:] == pytest.approx(wanted[2:], abs=1e-5)
    for name, transform in found[0].alignments[0].transforms.items():
        for key, tensor in transform.tensors().items():
            torch.testing.assert_close(
                found[1].alignments[0].transforms[name].tensors()[key], tensor, rtol=0, atol=1e-4
            )


@pytest.mark.parametrize("acting", [False, True])
def test_mixed_weights_are_gone_when_the_forward_is_done(acting: bool, monkeypatch: pytest.MonkeyPatch):
    made: list[weakref.ref[Tensor]] = []
    plainly = Mixing._plainly

    def watched(self: Mixing, *given: Any) -> Tensor:
        found = plainly(self, *given)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Mixing, "_plainly", watched)
    monkeypatch.setattr(Mixing, "_less", lambda *_: acting)
    models = [tiny_llama(seed) for seed in range(2)]
    architecture = Alignment.random(models[0], untie=True).basis.architecture
    states = [dict(model.state_dict()) for model in models]
    path = Path.between(models[0], architecture, states[0], states[1:], (), torch.device("cpu"), in_memory=False)
    share = torch.tensor([0.5, 0.5], requires_grad=True)
    weights = path.weights([{}], share)
    loss = path.outputs(weights, token_batches(1)[0]).logits.square().mean()
    assert len(made) == (5 if acting else 20)  # norms alone; all but the embedding
    assert not any(one() is not None for one in made)
    loss.backward()
    assert share.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"permutations": True}, {"checkpointing": True}, {"half": True}],
    ids=["plain", "permutations", "checkpointing", "stored in half precision"],
)
def test_fits_that_hold_nothing_go_the_same_way(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """With orders of neurons, layers run again, and parents that stay as they are stored."""
    found = []
    for held in (True, False):
        monkeypatch.setattr(engine, "LARGEST_HELD", 1 << 20 if held else 0)
        models = [tiny_llama(seed) for seed in range(2)]
        for model in models if options.get("half") else []:
            for parameter in model.parameters():
                parameter.data = parameter.bfloat16().float() if held else parameter.bfloat16()
        chosen = FitConfig(steps=3, objective="distill", start="identity", **options)
        found.append(fit(*models, token_batches(), options=chosen).report)
    assert [row[2:] for row in found[1].history] == [pytest.approx(row[2:], abs=1e-5) for row in found[0].history]
    assert found[1].after == pytest.approx(found[0].after, abs=1e-5)


def mixed() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, Mixed | Mixing)]


@pytest.mark.slow
def test_nothing_of_a_step_outlives_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "LARGEST_HELD", 0)
    options = FitConfig(steps=2, objective="distill", start="identity")
    before, left = mixed(), list[int]()  # some of other tests may be alive

    def watch(*_: object) -> None:
        left.append(sum(all(one is not old for old in before) for one in mixed()))

    fit(tiny_llama(0), tiny_llama(1), token_batches(), options=options, watch=watch)
    assert left == [0, 0]


@pytest.mark.parametrize("place", ["fit.match_model", "engine.Path.outputs"])
def test_a_device_without_memory_is_one_line(place: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch):
    """In the middle of matching or learning; no half-written file is left."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB")

    for seed in range(2):
        tiny_llama(seed).save_pretrained(tmp_path / str(seed))
    monkeypatch.setattr(f"rotation_merge.matching.{place}", full)
    data = tmp_path / "data.safetensors"
    save_file({"input_ids": token_batches(1)[0]["input_ids"]}, data)
    given = ["fit", *(str(tmp_path / str(seed)) for seed in range(2)), "--data", str(data), "--batch-size", "2"]
    result = run(*given, "--alignment", tmp_path / "out")
    assert result.exit_code == 2
    assert "the GPU ran out of memory (tried to allocate 2.00 GiB); match on another" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out*"))
