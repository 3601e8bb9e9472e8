"""The laws that every tiny model keeps, through the public interface alone: `pairs.tsv` lists them, with tolerances."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import difference, load
from subjects import LISTED, MODELS, SEED, Pair, Subject, changed, distance, fresh, options, subject, tried
from torch import Tensor

import rotation_merge as rm


def function(subject: Subject, pair: Pair) -> float:
    """A random element of every group that the model admits moves weights and leaves its outputs; so does folding."""
    model = subject.with_own_head if "rotation" in pair.residual else subject.module
    drawn, twin = subject.drawn(model, pair.residual)
    moved = changed(model, twin)
    for seed in (2, 3):  # one draw may leave a small space where it is
        if len(moved) < pair.moved:
            moved |= changed(model, subject.drawn(model, pair.residual, seed)[1])
    assert len(moved) >= pair.moved, f"{len(moved)} tensors move"
    if model is subject.module:
        return difference(subject.outputs_of(twin.to_module()), subject.expected_of_module)
    views = (twin, drawn.apply_anchor(model))
    return max(difference(subject.outputs_of(load(subject.case, written(view))), subject.expected) for view in views)


def planted(subject: Subject, pair: Pair, seed: int = SEED) -> float:
    """Matching a twin to its model finds the way back: the two then have the same weights."""
    anchor = subject.checkpoint(pair.residual)
    twin = held(subject.drawn(anchor, pair.residual, seed)[1])
    alignment = rm.align(anchor, twin, **options(pair.residual))
    return distance(alignment.apply_anchor(anchor), alignment.apply(twin))


def planted_again(subject: Subject, pair: Pair) -> float:
    """The same with other twins, of models that matching does not always find."""
    return max(planted(subject, pair, seed) for seed in range(2, 7))


def saved(subject: Subject, pair: Pair) -> float:
    """A moved checkpoint is written whole: transformers loads it without a missing or further tensor, and we do."""
    model = subject.checkpoint(pair.residual)
    _, view = subject.drawn(model, pair.residual)
    twin, _ = held(view)
    assert len(changed(model, twin)) >= pair.moved
    folder = written(view)
    again = rm.average([folder]).state_dict()
    assert set(again) == set(twin)
    assert all(torch.equal(again[name], tensor) for name, tensor in twin.items())
    return difference(subject.outputs_of(load(subject.case, folder)), subject.expected)


def adapter(subject: Subject, pair: Pair) -> float:
    """A LoRA of the model computes what peft computes with it, as `base+adapter`."""
    folder, expected = trained(subject)
    assert difference(expected, subject.expected) > 1e-3
    whole = rm.average([f"{subject.folder}+{folder}"]).to(torch.float64)
    return difference(subject.outputs_of(whole.to_module()), expected) / size(expected)


def carried(subject: Subject, pair: Pair) -> float:
    """A LoRA of the model, carried to a twin, computes there by peft what it computed at home."""
    folder, expected = trained(subject)
    base = subject.checkpoint(pair.residual)
    drawn, twin = subject.drawn(base, pair.residual)
    result = fresh("carried")
    rm.transfer(folder, base, twin, rm.TransferConfig(alignment=drawn)).save_pretrained(result)
    moved = peft.PeftModel.from_pretrained(twin.to_module(), result, autocast_adapter_dtype=False)
    return difference(subject.outputs_of(moved.merge_and_unload().eval()), expected) / size(expected)


def changes(subject: Subject, pair: Pair) -> float:
    """What fine-tuning changed, moved to a twin and added there, computes what the fine-tune computes."""
    (state, config), generator = subject.checkpoint(pair.residual), torch.Generator().manual_seed(1)
    noise = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64) for name, x in state.items()}
    tuned = {name: x + 0.1 * x.std(correction=0) * noise[name] for name, x in state.items()}, config
    drawn, twin = subject.drawn((state, config), pair.residual)
    expected = subject.outputs_of(rm.average([tuned]).to_module())
    assert difference(expected, subject.expected) > 1e-3
    moved = rm.Delta.between((state, config), tuned).moved(drawn, held(twin)).applied()
    return difference(subject.outputs_of(moved.to_module()), expected) / size(expected)


LAWS: dict[str, Callable[[Subject, Pair], float]] = {
    law.__name__: law for law in (function, planted, planted_again, saved, adapter, carried, changes)
}


def written(view: rm.View) -> Path:
    """The checkpoint of a view; `load` refuses one with a missing or a further tensor."""
    folder = fresh("written")
    view.save_pretrained(folder)
    return folder


def held(view: rm.View) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A view as a model in memory."""
    return view.state_dict(), view.config


def size(tensors: dict[str, Tensor]) -> float:
    return max(1.0, *(float(x.abs().max()) for x in tensors.values()))


@functools.lru_cache(maxsize=1)
def trained(subject: Subject) -> tuple[Path, dict[str, Tensor]]:
    """An adapter of every linear map that peft takes, with random factors, and what peft computes with it."""
    folder = fresh("adapter")
    torch.manual_seed(0)
    base = load(subject.case, subject.folder)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=linear_modules(base))
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder, subject.outputs_of(model.merge_and_unload().eval())


def linear_modules(model: Any) -> list[str]:
    """Linear maps inside layers that peft takes: not the heads, not fused experts, no maps that kernels read."""
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    names = {name for name, part in model.named_modules() if isinstance(part, kinds)}
    if any("experts" in name for name, _ in model.named_parameters()):
        names = {name for name in names if "mlp" not in name}  # peft turns these into parameters of all experts
    if getattr(model.config, "model_type", "") in ("falcon_h1", "nemotron_h", "mamba", "mamba2", "falcon_mamba"):
        names = {name for name in names if not name.endswith("out_proj")}  # peft refuses these
    return sorted(name for name in names if re.search(r"layer|\bh\.|\.block\.", name))


@pytest.mark.parametrize("pair", tried(LAWS))
def test_law(pair: Pair) -> None:
    worst = LAWS[pair.law](subject(pair.model), pair)
    assert worst <= pair.tolerance, f"{worst:.1e}"


def test_every_model_has_its_laws() -> None:
    """Each model keeps its function, is found again, is written and read again."""
    laws = {model: {pair.law for pair in LISTED if pair.model == model} for model in MODELS}
    assert all({"function", "planted", "saved"} <= kept for kept in laws.values())
