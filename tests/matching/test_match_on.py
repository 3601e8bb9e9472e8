"""Matching on activations: twins are found by what their maps read and give, and compute what they computed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of
from plugin_support import merged, recipe_for, state
from residual_support import report
from tiny_models import ALL, Case, difference, inputs, keep_float64, outputs, planted

import rotation_merge as rm
from rotation_merge.matching.match_on import ROWS, Activations, centred, match_on_samples
from rotation_merge.model.open import open_model

FIRST = {case.family: case for case in reversed(ALL)}
KINDS = ("bert", "whisper", "gemma2", "gpt_neox", "mixtral", "deepseek", "falcon_h1")
"""A family for each kind of layer."""
LLAMA = FIRST["llama"]


def twins(case: Case, scaling: bool = True) -> tuple[Any, Any, rm.AlignConfig]:
    """A tiny model, and it in other coordinates of every space, its streams without rotations (gains stay)."""
    model, admitted = planted(case).module, planted(case).architecture.stream_groups
    groups = {name: [group for group in known if group != "rotation"][-1] for name, known in admitted.items()}
    residual = ",".join(f"{name}={group}" for name, group in groups.items()) or "none"
    options = rm.AlignConfig(heads="permutation", scaling=scaling, residual=residual)
    other = copy.deepcopy(model)
    other.load_state_dict(rm.Alignment.random(model, options, seed=1).apply(model).state_dict(), strict=False)
    other.tie_weights()
    return model, other, options


def samples_for(case: Case, model: Any, count: int = 6) -> list[Any]:
    with keep_float64():
        return [inputs(case, model, seed) for seed in range(2, 2 + count)]


def aligned(model: Any, other: Any, how: str, options: rm.AlignConfig, samples: Any) -> rm.Alignment:
    with keep_float64():
        return rm.align(model, other, options, match_on=how, samples=samples)


def close(found: Any, wanted: Any, within: float = 1e-4) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=within, atol=within)


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_twin_is_found_again_from_activations(family: str) -> None:
    model, other, options = twins(FIRST[family])
    found = aligned(model, other, "activations", options, samples_for(FIRST[family], model))
    assert max((m.distance_after / m.distance_before) ** 2 for m in found.rows if m.distance_before > 0) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "t5"])
def test_activations_decide_where_weights_say_nothing(family: str) -> None:
    """The weights that are handed over are others in both models; only activations know the twin."""
    model, other, options = twins(FIRST[family], scaling=False)
    given, architecture = samples_for(FIRST[family], model), rm.average([model]).architecture
    with keep_float64():
        rows = [Activations.of(open_model(m), given, ROWS) for m in (model, other)]
    draw = torch.Generator().manual_seed(3)
    states = [
        {n: x if x.ndim < 2 else 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in m.items()}
        for m in (model.state_dict(), other.state_dict())
    ]
    found = match_on_samples("activations", lambda: (rows[0], rows[1]), None, architecture, *states, options)
    blank = rm.align(model, other, attention="none", ffn="none", scaling=False)
    close(model.state_dict(), replace(blank, transforms=found.transforms).apply(other).state_dict())


@pytest.mark.slow
def test_the_aligned_donor_computes_what_it_did() -> None:
    """Also where samples are too few to say anything: another choice of element never changes the function."""
    model, other, options = twins(LLAMA)
    found = aligned(model, other, "activations", options, samples_for(LLAMA, model, 1))
    other.lm_head.weight.data += 1.0  # so that it is no twin
    before = outputs(other, planted(LLAMA).given)
    other.load_state_dict(found.apply(other, strict=False).state_dict(), strict=False)
    assert difference(outputs(other, planted(LLAMA).given), before) < 1e-9
    assert any("do not span" in note for note in found.notes)
    assert "matched on activations" in found.notes[0]


@pytest.mark.slow
def test_nothing_depends_on_the_order_of_samples() -> None:
    model, other, options = twins(LLAMA)
    given, noise = samples_for(LLAMA, model), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    backwards = [{"input_ids": torch.cat([batch["input_ids"] for batch in reversed(given)]).flip(0)}]
    one, two = (aligned(model, other, "both", options, order).apply(other) for order in (given, backwards))
    close(two, one)


def test_partial_whitening_turns_with_what_is_whitened() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw, dtype=torch.float64) * torch.tensor([9.0, 3.0, 1.0, 0.1]).double()
    turn = torch.linalg.qr(torch.randn(4, 4, generator=draw, dtype=torch.float64))[0]
    torch.testing.assert_close(centred(x + 5.0) @ turn.mT, centred(x @ turn.mT))
    before, after = (torch.linalg.svdvals(m) for m in (x - x.mean(0), centred(x)))
    torch.testing.assert_close(after[0] / after[-1], (before[0] / before[-1]).sqrt())


@pytest.mark.slow
def test_commands_and_recipes_match_on_activations(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert "matched on activations" in output_of(
        "align", *pair, tmp_path / "aligned", "--heads", "permutation", "--match-on", "activations"
    )
    close(state(tmp_path / "aligned"), state(pair[0]), 1e-3)
    close(merged(recipe_for("linear", *pair, match_on="both", samples=16), tmp_path / "out"), state(pair[0]), 1e-3)
    made = report(tmp_path / "out")
    assert any("matched on weights and activations" in note for note in made["notes"])
    assert made["data"] == [{"of": f"matching {pair[1]}", "source": "self", "samples": 16}]
