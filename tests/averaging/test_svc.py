"""SVC behind rules that merge changes: its laws on matrices, and recipes, Python and adapters that ask for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import noisy
from cli_support import run
from plugin_support import lora, merged, write_recipe
from residual_support import Checkpoint, report
from test_task_vectors import fine_tunes, of, orthogonal, random, sliced
from torch import Tensor

import rotation_merge as rm
from rotation_merge.averaging.config import CALIBRATED
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.svc import calibrated
from rotation_merge.model.open import open_model

MAP, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


def svc(total: Tensor, changes: list[Tensor], alpha: float = 0.5) -> Tensor:
    return calibrated(SlicedMatrix.of(total), [SlicedMatrix.of(each) for each in changes], alpha).whole()


def as_in_the_paper(total: Tensor, changes: list[Tensor], alpha: float = 0.5) -> Tensor:
    """Equations of arXiv 2602.05536, one singular direction after the other."""
    result = torch.zeros_like(total)
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    for u, s, v in zip(left.T, values, right, strict=True):
        shares = [(u @ total) @ (u @ d) / (u @ d).square().sum() for d in changes]
        result += s * len(changes) / sum(max(alpha, float(share)) for share in shares) * torch.outer(u, v)
    return result


@pytest.mark.parametrize("alpha", [0.25, 1.0])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_singular_values_are_divided_as_in_the_paper(shape: tuple[int, int], alpha: float) -> None:
    changes = [random(*shape, seed=seed) for seed in range(3)]
    total = changes[0] + changes[1] + 0.5 * changes[2]
    expected = as_in_the_paper(total, changes, alpha)
    torch.testing.assert_close(svc(total, changes, alpha), expected, atol=1e-10, rtol=1e-10)
    whole = calibrated(sliced(total, 4), [sliced(each, 4) for each in changes], alpha)
    torch.testing.assert_close(whole.whole(), expected, atol=1e-8, rtol=1e-8)
    left, right = orthogonal(shape[0], 7), orthogonal(shape[1], 8)
    turned = svc(left @ total @ right.T, [left @ each @ right.T for each in changes], alpha)
    torch.testing.assert_close(turned, left @ expected @ right.T, atol=1e-8, rtol=1e-8)


def test_what_changes_share_counts_once() -> None:
    """A change alone and equal changes give themselves, whatever their sum is multiplied by; zero does not count."""
    one, none = random(5, 2, seed=1) @ random(2, 7), torch.zeros(5, 7, dtype=torch.float64)
    for total, changes in ((one, [one]), (3 * one, [one, one, one]), (0.7 * one, [one, one]), (one, [one, none])):
        factor = float(total.norm() / one.norm())
        expected = one if factor > 0.5 else none
        torch.testing.assert_close(svc(total, changes), expected, atol=1e-9, rtol=1e-9)
    assert torch.equal(svc(none, [none, none]), none)
    assert torch.equal(svc(none, [one, -one]), none)


def test_what_changes_do_not_share_is_lengthened() -> None:
    """Along what one of T models changes alone by ``T / (1 + (T - 1) alpha)``; other changes' rounding is no share."""
    u, v = orthogonal(8, 1), orthogonal(9, 2)
    apart = [u[:, 3 * t : 3 * t + 3] @ random(3, 3, seed=t) @ v[:, 3 * t : 3 * t + 3].T for t in range(2)]
    for alpha in (0.25, 0.5, 1.0):
        expected = 2 / (1 + alpha) * (apart[0] + apart[1])
        torch.testing.assert_close(svc(apart[0] + apart[1], apart, alpha), expected, atol=1e-9, rtol=1e-9)


# --- recipes, Python, adapters ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return fine_tunes("llama", "llama", tmp_path_factory.mktemp("calibrated"))


@pytest.mark.parametrize("delegate", CALIBRATED)
def test_it_follows_every_delegate_of_changes(delegate: str, three: list[Checkpoint], tmp_path: Path) -> None:
    """Maps are the delegate's, calibrated; all other tensors are the delegate's own. Python gives the same."""
    bare = delegate in ("ram", "sce")
    settings = {} if bare else {"weight": 0.8} if delegate in TASK_VECTORS else {"weight": 0.8, "density": 1.0}
    plain = merged(of(three, delegate, **settings), tmp_path / "plain")
    result = merged(of(three, delegate, **settings, calibrate="svc", alpha=0.4), tmp_path / "out")
    start, *states = ({key: x.double() for key, x in model.state.items()} for model in three)
    changes = [each[MAP] - start[MAP] for each in states]
    expected = start[MAP] + as_in_the_paper(plain[MAP].double() - start[MAP], changes, 0.4)
    torch.testing.assert_close(result[MAP].double(), expected, atol=1e-5, rtol=1e-4)
    assert (result[MAP] - plain[MAP]).norm() > 1e-2 * (plain[MAP] - start[MAP]).norm()
    torch.testing.assert_close(result[NORM], plain[NORM], atol=1e-6, rtol=1e-6)
    notes = " ".join(report(tmp_path / "out")["notes"])
    assert "calibrated (SVC, alpha 0.4)" in notes
    assert ("leave it out" in run("check", tmp_path / "out.yml").output) == (delegate == "wudi")
    parameters = {"calibrate": "svc", "alpha": 0.4, **({} if bare else settings)}
    weights = None if bare else [0.8, 0.8, 0.8]
    parameters.pop("weight", None)
    paths = [str(model.path) for model in three]
    in_python = rm.average(paths, delegate, weights=weights, **parameters).state_dict()
    torch.testing.assert_close(in_python[MAP], result[MAP], atol=1e-6, rtol=1e-6)


def test_it_follows_a_method_that_stands_alone(three: list[Checkpoint], tmp_path: Path) -> None:
    document = of(three, "tsv", calibrate="svc")
    alone = {**document, "merge_method": "tsv", "parameters": {"calibrate": "svc"}}
    expected, result = merged(document, tmp_path / "as delegate"), merged(alone, tmp_path / "alone")
    assert all(torch.equal(expected[name], result[name]) for name in expected)


def test_a_scale_comes_behind_it_and_a_model_without_weight_does_not_count(
    three: list[Checkpoint], tmp_path: Path
) -> None:
    parameters = {"weight": 1.0, "calibrate": "svc"}
    whole = merged(of(three, "task_arithmetic", **parameters), tmp_path / "whole")
    half = merged(of(three, "task_arithmetic", **parameters, **{"lambda": 0.5}), tmp_path / "half")
    for name in (MAP, NORM):
        start = three[0].state[name]
        torch.testing.assert_close(half[name] - start, 0.5 * (whole[name] - start), atol=1e-6, rtol=1e-5)
    document = of(three, "task_arithmetic", calibrate="svc")
    for entry, weight in zip(document["models"], (0.7, 0.0), strict=True):
        entry["parameters"] = {"weight": weight}
    torch.testing.assert_close(merged(document, tmp_path / "one")[MAP], three[1].state[MAP], atol=1e-5, rtol=1e-4)


def test_changes_count_as_long_as_they_were_merged(three: list[Checkpoint], tmp_path: Path) -> None:
    """A method of ours shortens a long one; one of mergekit's does not."""
    models = [*three[:2], replace(three[0], path=noisy(three[0].path, tmp_path / "long", 0.1))]
    for delegate, settings, factor in (("tsv", {}, 0.5), ("task_arithmetic", {"weight": 1.0}, 1.0)):
        plain = merged(of(models, delegate, **settings), tmp_path / f"{delegate} plain")[MAP].double()
        result = merged(of(models, delegate, **settings, calibrate="svc"), tmp_path / delegate)[MAP].double()
        start, short, long = (model.state[MAP].double() for model in models)
        expected = as_in_the_paper(plain - start, [short - start, factor * (long - start)])
        torch.testing.assert_close(result - start, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "name", "maps"), [("gemma", "tied", "embed_tokens"), ("mixtral", "untied", "experts.1")]
)
def test_tied_heads_and_single_experts_are_maps(family: str, name: str, maps: str, tmp_path: Path) -> None:
    models = fine_tunes(family, name, tmp_path)
    plain = merged(of(models, "task_arithmetic", weight=1.0), tmp_path / "plain")
    result = merged(of(models, "task_arithmetic", weight=1.0, calibrate="svc"), tmp_path / "out")
    start, *states = ({key: x.double() for key, x in model.state.items()} for model in models)
    tensor = next(tensor for tensor in start if maps in tensor)
    expected = as_in_the_paper(
        plain[tensor].double() - start[tensor], [each[tensor] - start[tensor] for each in states]
    )
    torch.testing.assert_close(result[tensor].double() - start[tensor], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv"])
def test_adapters_are_merged_as_their_models(method: str, three: list[Checkpoint], tmp_path: Path) -> None:
    """From small cores, or entry by entry: the change of the merged full models."""
    base = three[0].path
    for seed in range(2):
        lora(tmp_path / f"adapter-{seed}", base, seed, spread=0.03, base_model_name_or_path=str(base))
    adapters = [str(tmp_path / f"adapter-{seed}") for seed in range(2)]
    document = of(three[:1], method, calibrate="svc", **({} if method == "tsv" else {"weight": 1.0}))
    document["models"] = [{"model": f"{base}+{adapter}"} for adapter in adapters]
    u, values, v = torch.linalg.svd(merged(document, tmp_path / "full")[MAP] - three[0].state[MAP])
    expected = u[:, :4] * values[:4] @ v[:4]  # the ranks together, which an adapter may have
    out = str(tmp_path / "one")
    run("lora", *adapters, out, "--method", method, "-p", "calibrate=svc")
    change = open_model(f"{base}+{out}").state_dict()[MAP] - three[0].state[MAP]
    torch.testing.assert_close(change, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("delegate", "parameters", "words"),
    [
        ("linear", {"calibrate": "svc"}, "read by delegate"),
        ("iso", {"calibrate": "svc"}, "one size"),
        ("tsv", {"calibrate": "sum"}, "'calibrate' is 'sum'"),
        ("tsv", {"calibrate": "svc", "alpha": 0.0}, "'alpha' is 0.0"),
        ("tsv", {"calibrate": "svc", "alpha": 1.5}, "'alpha' is 1.5"),
        ("tsv", {"alpha": 0.5}, "add 'calibrate: svc'"),
    ],
)
def test_what_it_does_not_do_is_refused(
    delegate: str, parameters: dict[str, Any], words: str, three: list[Checkpoint], tmp_path: Path
) -> None:
    weight = {"weight": 0.5} if delegate == "linear" else {}
    path = write_recipe(of(three, delegate, **weight, **parameters), tmp_path / "r.yml")
    assert words in run("check", path).output
