"""A model between its parents: one function, whether its weights are kept, mixed again, or its layers run again."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cli_support import run
from safetensors.torch import save_file
from second_device import Far, second_device
from test_fit import tiny_llama, token_batches
from torch import Tensor, nn

from rotation_merge import AlignConfig, Alignment, FitConfig, fit
from rotation_merge.matching import between
from rotation_merge.matching.between import LearnedTransforms, Mixture, mixed_model

FIRST = {case.family: case for case in reversed(tiny_models.ALL)}
WIDEST = AlignConfig(heads="permutation", residual="largest")
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
def test_the_ends_are_the_parents_and_gradients_do_not_depend_on_what_is_kept(family: str) -> None:
    """In float64: the donor's end computes what the donor does, buffers that move and tied heads included."""
    case = FIRST[family]
    models = [tiny_models.make(case, seed) for seed in range(3)]
    drawn = [Alignment.random(models[0], WIDEST, seed=seed, untie=True) for seed in range(2)]
    architecture = drawn[0].basis.architecture
    batch = tiny_models.inputs(case, models[0])
    learned = nn.ModuleList(LearnedTransforms(architecture, a.transforms) for a in drawn).double()
    gradients = list[dict[str, Tensor]]()
    with tiny_models.keep_float64():
        for keeps, checkpointing in ((True, False), (False, False), (False, True)):
            mixture = Mixture(architecture, [m.state_dict() for m in models], drawn[0].folded, CPU, keeps)
            model = mixed_model(models[0], mixture, checkpointing)
            transforms = [module() for module in learned]
            for number, share in enumerate(torch.eye(3)):
                with torch.no_grad(), mixture.at(transforms, share):
                    outputs = dict(tiny_models.floating("", model(**batch)))
                for name, wanted in tiny_models.outputs(models[number], batch).items():
                    torch.testing.assert_close(outputs[name], wanted, rtol=1e-9, atol=1e-9)
            learned.zero_grad()
            with mixture.at(transforms, torch.tensor([0.5, 0.2, 0.3])):
                outputs = dict(tiny_models.floating("", model(**batch)))
                sum(x.square().sum() for x in outputs.values()).backward()
            gradients.append({n: p.grad.clone() for n, p in learned.named_parameters() if p.grad is not None})
    assert gradients[0]
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(other[name], gradient, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpointing": True}, {"half": True}],
    ids=["plain", "checkpointing", "stored in half precision"],
)
def test_fits_that_keep_nothing_go_the_same_way(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for keeps in (True, False):
        monkeypatch.setattr(between, "LARGEST_KEPT", 1 << 28)
        monkeypatch.setattr("rotation_merge.matching.fit.LARGEST_KEPT", 1 << 28 if keeps else 0)
        models = [tiny_llama(seed) for seed in range(2)]
        for model in models if options.get("half") else []:
            for parameter in model.parameters():
                parameter.data = parameter.bfloat16().float() if keeps else parameter.bfloat16()
        chosen = FitConfig(steps=3, objective="distill", start="identity", **options)
        reports.append(fit(*models, token_batches(), options=chosen).report)
    rows = [[row[2:] for row in report.history] for report in reports]
    assert rows[1] == [pytest.approx(row, abs=1e-5) for row in rows[0]]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_parents_on_two_devices_learn_the_same(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor on a device of its own; operations on tensors of both raise."""
    monkeypatch.setattr("rotation_merge.matching.fit.LARGEST_KEPT", 1 << 28 if keeps else 0)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which does not know the second device
    results = []
    for far in (False, True):
        models = [tiny_llama(seed, num_hidden_layers=1) for seed in range(2)]
        with second_device() if far else nullcontext():
            for module in models[1].modules() if far else ():
                for name, tensor in module._parameters.items():
                    module._parameters[name] = None if tensor is None else nn.Parameter(Far(tensor.detach()))
                for name, tensor in module._buffers.items():
                    module._buffers[name] = None if tensor is None else Far(tensor)
            options = FitConfig(steps=1, objective="distill", start="matched")
            results.append(fit(*models, token_batches(2), options=options))
    for mine, wanted in zip(results[1].report.history, results[0].report.history, strict=True):
        assert mine[2:] == pytest.approx(wanted[2:], abs=1e-5)


def test_mixed_weights_are_gone_when_the_forward_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that keeps nothing; those that the backward pass needs are mixed again there."""
    mixed = list[weakref.ref[Tensor]]()
    stock = Mixture.tensor

    def watched(self: Mixture, names: Any) -> Tensor:
        tensor = stock(self, names)
        mixed.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Mixture, "tensor", watched)
    models = [tiny_llama(seed) for seed in range(2)]
    alignment = Alignment.random(models[0], untie=True)
    architecture = alignment.basis.architecture
    learned = LearnedTransforms(architecture, alignment.transforms)
    mixture = Mixture(architecture, [m.state_dict() for m in models], alignment.folded, CPU, keeps=False)
    model = mixed_model(models[0], mixture)
    with mixture.at([learned()], torch.tensor([0.5, 0.5])):
        loss = model(**token_batches(1)[0]).logits.square().mean()
        count = len(mixed)
        assert count == sum(1 for _ in models[0].parameters())
        assert not any(weight() is not None for weight in mixed)
        loss.backward()
    assert len(mixed) > count
    assert all(p.grad is not None for p in learned.parameters())


@pytest.mark.parametrize("keeps", [True, False])
def test_models_stay_as_they_are_and_nothing_of_a_fit_outlives_it(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotation_merge.matching.fit.LARGEST_KEPT", 1 << 28 if keeps else 0)
    models = [tiny_llama(seed) for seed in range(2)]
    before = [{name: tensor.clone() for name, tensor in m.state_dict().items()} for m in models]
    fit(*models, token_batches(), options=FitConfig(steps=2, objective="distill", start="identity"))
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    gc.collect()
    assert not any(isinstance(one, Mixture) and one._mixed for one in gc.get_objects())


@pytest.mark.parametrize("place", ["fit.match_model", "between.Mixture.tensor"])
def test_a_device_without_memory_is_one_line(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of matching or learning; no half-written file is left."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB")

    for seed in range(2):
        tiny_llama(seed).save_pretrained(tmp_path / str(seed))
    monkeypatch.setattr(f"rotation_merge.matching.{place}", full)
    save_file({"input_ids": token_batches(1)[0]["input_ids"]}, tmp_path / "data.safetensors")
    models = [tmp_path / str(seed) for seed in range(2)]
    data = ("--data", tmp_path / "data.safetensors", "--batch-size", "2")
    result = run("align", *models, "--learn", *data, "--alignment", tmp_path / "out")
    assert result.exit_code == 2
    assert "the GPU ran out of memory (tried to allocate 2.00 GiB); match on another" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out*"))
