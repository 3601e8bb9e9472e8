"""Delegates that merge task vectors: their rules on matrices, recipes that name them, and what these refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import build, merged, mergekit_yaml, one_error, write_adapter, write_recipe
from residual_support import Checkpoint, checkpoint, report, twin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rotation_merge as rm
from rotation_merge.averaging.methods import mean
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.sliced import SlicedMatrix, combined
from rotation_merge.averaging.task_vectors import TaskVectorMethod, change_of, shortening
from rotation_merge.averaging.wudi import added_by_wudi, both_sides, one_side

BY_NAME = {method.spec.name: method for method in TASK_VECTORS}
EACH_RULE = pytest.mark.parametrize("name", list(BY_NAME))
EITHER_SIDE = pytest.mark.parametrize("values", [{}, {"sides": "both"}], ids=["one side", "both sides"])


def defaults(method: TaskVectorMethod, **values: Any) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in method.spec.parameters} | values


def change(name: str, changes: list[Tensor], weights: list[float] | None = None, **values: Any) -> Tensor:
    """The merged change by a rule."""
    method = BY_NAME[name]
    return method.change(changes, weights or [1.0] * len(changes), defaults(method, **values))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(size, size, seed=seed))[0]


# --- matrices in slices -----------------------------------------------------------------------------------------------


def sliced(matrix: Tensor, step: int) -> SlicedMatrix:
    return SlicedMatrix(lambda part: matrix[part], [slice(i, i + step) for i in range(0, len(matrix), step)])


@pytest.mark.parametrize("step", [3, 7, 50])
def test_the_decomposition_of_slices(step: int) -> None:
    """Slices of fewer rows than columns, of more, and one of all; singular values from 1 to 1e-10."""
    matrix = random(50, 6) * torch.logspace(0, -10, 6, dtype=torch.float64)
    left_vectors, values, right = sliced(matrix, step).svd()
    u = left_vectors(6).whole()
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=1e-5, atol=0)
    torch.testing.assert_close(u * values @ right, matrix, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(u.mT @ u, torch.eye(6, dtype=u.dtype), atol=1e-5, rtol=0)
    torch.testing.assert_close(left_vectors(2).whole(), u[:, :2])
    left_vectors, values, _ = sliced(torch.zeros(50, 6, dtype=torch.float64), step).svd()
    assert torch.isfinite(left_vectors(6).whole()).all()
    assert not values.any()


@pytest.mark.parametrize("step", [3, 50])
def test_the_polar_factor_of_slices(step: int) -> None:
    """Orthonormal and nearest; of less than full rank it is zero where the matrix is."""
    matrix = random(50, 6)
    factor = sliced(matrix, step).polar().whole()
    torch.testing.assert_close(factor.mT @ factor, torch.eye(6, dtype=factor.dtype), atol=1e-12, rtol=0)
    stretch = factor.mT @ matrix
    torch.testing.assert_close(stretch, stretch.mT)
    assert torch.linalg.eigvalsh(stretch).min() > 0
    expected = torch.cat([factor, factor], 1) / 2**0.5
    twice = combined([sliced(matrix, step), sliced(matrix, step)], lambda rows: torch.cat(rows, 1))
    torch.testing.assert_close(twice.polar().whole(), expected)
    torch.testing.assert_close(SlicedMatrix.of(torch.cat([matrix, matrix], 1).mT).polar().whole().mT, expected)


def test_sums_and_products_of_slices() -> None:
    one, two, right = random(50, 6), random(50, 6, seed=1), random(6, 4, seed=2)
    first, second = sliced(one, 8), sliced(two, 8)
    torch.testing.assert_close((first @ right * 3.0).whole(), 3 * one @ right)
    total = combined([first, second], lambda rows: 0.5 * rows[0] + 2 * rows[1])
    torch.testing.assert_close(total.whole(), 0.5 * one + 2 * two)
    torch.testing.assert_close(first.gram(), one.mT @ one)
    assert first.norm == pytest.approx(float(one.norm()))


# --- rules ------------------------------------------------------------------------------------------------------------

CASES = [("wudi", {}), ("wudi", {"sides": "both", "ridge": 0.3}), ("tsv", {}), ("iso", {})]


@pytest.mark.parametrize(("name", "values"), CASES)
@pytest.mark.parametrize("shape", [(6, 9), (4, 9), (9, 6)])
def test_merged_changes_follow_rotations(name: str, values: dict[str, Any], shape: tuple[int, int]) -> None:
    """f(L D R^T) = L f(D) R^T: merging commutes with an alignment."""
    changes, weights = [random(*shape, seed=seed) for seed in range(3)], [1.0, 2.0, 0.5]
    left, right = orthogonal(shape[0], 7), orthogonal(shape[1], 8)
    turned = change(name, [left @ d @ right.T for d in changes], weights, **values)
    expected = left @ change(name, changes, weights, **values) @ right.T
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Measures the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        self.size = max([self.size, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize(("name", "values"), CASES)
def test_a_map_into_a_large_vocabulary(name: str, values: dict[str, Any]) -> None:
    """It takes no square of it: a head of 128,000 tokens would need 130 GB. In slices it is the same as of the whole,
    and nothing is made that is larger than a slice or (inputs, inputs)."""
    method, changes, weights = BY_NAME[name], [random(500, 4, seed=seed) for seed in range(3)], [1.0, 2.0, 0.5]
    with Largest() as largest:
        whole = change(name, changes, weights, **values)
    assert largest.size <= sum(each.numel() for each in changes)
    if "sides" in values:
        return
    matrices = [sliced(each, 20) for each in changes]
    with Largest() as largest:
        rows = method.in_slices(matrices, weights, defaults(method, **values)).rows(slice(140, 160))
    assert largest.size <= 3 * 24 * 4
    torch.testing.assert_close(rows, whole[140:160], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", ["wudi", "tsv"])
def test_what_does_not_meet_is_kept(name: str) -> None:
    """One change alone; two that read and write different directions; in TSV one that comes twice counts once."""
    alone, twice = random(5, 7), random(8, 2) @ random(2, 6, seed=1)
    torch.testing.assert_close(change(name, [alone]), alone, atol=1e-10, rtol=1e-10)
    if name == "tsv":
        torch.testing.assert_close(change(name, [twice, twice]), twice, atol=1e-10, rtol=1e-10)
    u, v = orthogonal(8, 1), orthogonal(8, 2)
    parts = [slice(0, 3), slice(3, 6)]
    changes = [u[:, part] @ random(3, 3, seed=3 + i) @ v[:, part].T for i, part in enumerate(parts)]
    result = change(name, changes, **({"ridge": 1e-10} if name == "wudi" else {}))
    for each, part in zip(changes, parts, strict=True):
        torch.testing.assert_close(result @ v[:, part], each @ v[:, part], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 6, 9)])
def test_a_change_beside_another_one(shape: tuple[int, ...]) -> None:
    """It is kept where the two read from orthogonal inputs; else it follows rotations, and disturbs the other less."""
    inputs = orthogonal(shape[-1], 1)
    apart = random(*shape, seed=2) @ inputs[:, :4] @ inputs[:, :4].T
    first = random(*shape, seed=3) @ inputs[:, 4:] @ inputs[:, 4:].T
    torch.testing.assert_close(added_by_wudi(first, apart), apart, atol=1e-10, rtol=1e-10)
    first, second, none = random(*shape, seed=4), random(*shape, seed=5), torch.zeros(shape, dtype=torch.float64)
    added = added_by_wudi(first, second)
    left, right = orthogonal(shape[-2], 7), orthogonal(shape[-1], 8)
    turned = added_by_wudi(left @ first @ right.T, left @ second @ right.T)
    torch.testing.assert_close(turned, left @ added @ right.T, atol=1e-9, rtol=1e-9)
    assert float((added @ first.mT).norm()) < float((second @ first.mT).norm())
    assert torch.equal(added_by_wudi(none, second), second)
    assert torch.equal(added_by_wudi(first, none), none)


def test_one_side_is_the_minimum_of_its_objective() -> None:
    """sum_t a_t |(D - D_t) D_t^T|^2 + l |D - M|^2: the gradient vanishes."""
    changes, shares = [random(4, 6, seed=seed) for seed in range(3)], [0.2, 0.5, 1.0]
    prior = mean(changes, shares)
    x = one_side(changes, shares, prior, 0.1).requires_grad_()
    values = torch.linalg.eigvalsh(sum(a * d.T @ d for a, d in zip(shares, changes, strict=True)))
    penalty = 0.1 * float(values.square().sum() / values.sum())
    objective = sum(a * ((x - d) @ d.T).square().sum() for a, d in zip(shares, changes, strict=True))
    (gradient,) = torch.autograd.grad(objective + penalty * (x - prior).square().sum(), x)
    assert float(gradient.abs().max()) < 1e-9


def test_both_sides_solve_their_equation() -> None:
    changes, weights = [random(5, 4, seed=seed) for seed in range(2)], [1.0, 3.0]
    result = both_sides(changes, weights, 0.1)
    left = [d @ d.T / d.square().sum() for d in changes]
    right = [d.T @ d / d.square().sum() for d in changes]
    spectra = [torch.linalg.eigvalsh(gram) for gram in right]
    start = 0.7 * (1 + 3) / (1 + 9) * (changes[0] + 3 * changes[1])
    ridge = sum(w * (0.1 * s.square().sum()) ** 2 for w, s in zip(weights, spectra, strict=True))
    rest = sum(w * a @ (d - result) @ b for w, a, d, b in zip(weights, left, changes, right, strict=True))
    torch.testing.assert_close(rest + ridge * (start - result), torch.zeros(5, 4).double(), atol=1e-8, rtol=0)


@EITHER_SIDE
def test_weights_and_low_ranks_in_wudi(values: dict[str, Any]) -> None:
    """A model of next to no weight counts for nothing. Changes of rank 2 whose inputs nearly coincide, as those of
    LoRAs, are not blown up: the result is no longer than their sum."""
    changes = [random(10, 2, seed=t) @ random(2, 12, seed=9 + t) for t in range(3)]
    found, without = change("wudi", changes, [1.0, 1.0, 1e-9], **values), change("wudi", changes[:2], **values)
    torch.testing.assert_close(found, without, atol=1e-5, rtol=1e-5)
    common = random(2, 60)
    changes = [random(40, 2, seed=t) @ (common + 0.1 * random(2, 60, seed=10 + t)) for t in range(1, 3)]
    assert float(change("wudi", changes, **values).norm()) < sum(float(d.norm()) for d in changes)


def test_long_changes_are_shortened_where_lengths_differ_by_more_than_two() -> None:
    short, long = 2.0, 5.0
    assert shortening([short, long, 0.0]) == ([1.0, 0.5, 1.0], 2.5)  # its share in the mean of those that count
    assert shortening([short, long, short])[0] == [1.0, pytest.approx(1 / 2.5), 1.0]  # the shortest one's length
    assert shortening([short, 1.5 * short])[0] == [1.0, 1.0]
    assert shortening([short, 1e9 * long])[0] == [1.0, 0.5]  # by no more than the number of changes


def test_the_rounding_of_a_base_is_no_change_of_a_model_that_was_trained_from_the_rounded_base() -> None:
    base = random(20, 30).float()
    assert not change_of(base, base.bfloat16()).whole().any()
    step = torch.where(random(20, 30, seed=1) > 1.5, 1 + 2**-7, 1.0).float()
    model = (base.bfloat16().float() * step).bfloat16()
    assert torch.equal(change_of(base, model).whole(), model.double() - base.bfloat16().double())
    model = (base + 0.1 * random(20, 30, seed=2).float()).bfloat16()  # trained from the base itself
    assert torch.equal(change_of(base, model).whole(), model.double() - base.double())
    assert torch.equal(change_of(base.bfloat16(), base).whole(), base.double() - base.bfloat16().double())


def of_rank(seed: int, rank: int | None) -> dict[str, Tensor]:
    """Changes of some maps of a tiny Llama: of a rank, or (None) of all."""
    draw, maps = torch.Generator().manual_seed(seed), ("q_proj", "o_proj", "up_proj", "down_proj")
    shapes = {n: p.shape for n, p in build("llama").named_parameters() if n.removesuffix(".weight").endswith(maps)}
    if rank is None:
        return {n: 1e-3 * torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in shapes.items()}
    factors = {
        n: [0.1 * torch.randn(s, generator=draw) for s in ((x, rank), (rank, y))] for n, (x, y) in shapes.items()
    }
    return {n: b.double() @ a.double() for n, (b, a) in factors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, None])
@EACH_RULE
def test_precision_does_not_matter(name: str, rank: int | None) -> None:
    """Changes are merged alike in single and double precision; as factors: test_adapter_merge.py."""
    results = []
    for dtype in (torch.float32, torch.float64):
        base = build("llama").to(dtype)
        start, changes = base.state_dict(), [of_rank(seed, rank) for seed in (1, 2, 3)]
        tuned = [({n: (x.double() + c.get(n, 0.0)).to(dtype) for n, x in start.items()}, base.config) for c in changes]
        view = rm.average([base, *tuned], name, weights=[1.0] * 4).to(torch.float64)
        results.append({n: view[n] - start[n].double() for n in changes[0]})
    for tensor, exact in results[1].items():
        assert (results[0][tensor] - exact).norm() <= 1e-4 * exact.norm(), tensor


# --- recipes ----------------------------------------------------------------------------------------------------------


def tuned(base: Checkpoint, where: Path, seed: int, noise: float = 0.01) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    moved = {name: x + noise * torch.randn(x.shape, generator=generator) for name, x in base.state.items()}
    return base.write(moved, where)


def recipe(base: Path, *models: Path | str, dtype: str | None = "float32", **parameters: Any) -> dict[str, Any]:
    document = {
        "merge_method": "rotation_merge",
        "base_model": str(base),
        "models": [{"model": str(model)} for model in models],
        "parameters": {"attention": "none", "ffn": "none", "scaling": False, **parameters},
    }
    return document if dtype is None else {**document, "dtype": dtype}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """A base and two fine-tunes of it."""
    folder = tmp_path_factory.mktemp("three")
    base = checkpoint("llama", "llama", folder / "base")
    return [base, tuned(base, folder / "one", 1), tuned(base, folder / "two", 2)]


def of(three: list[Checkpoint], delegate: str, **options: Any) -> dict[str, Any]:
    return recipe(*(model.path for model in three), delegate=delegate, **options)


def test_equal_models_stay_bit_for_bit(three: list[Checkpoint], tmp_path: Path) -> None:
    base = three[0]
    copies = [base.write(base.state, tmp_path / name) for name in ("copy", "another")]
    result = merged(of([base, *copies], "wudi"), tmp_path / "out")
    assert all(torch.equal(result[name], tensor) for name, tensor in base.state.items())


@EACH_RULE
def test_recipes_merge_the_changes_of_every_map(name: str, three: list[Checkpoint], tmp_path: Path) -> None:
    """Only the result is rounded: of changes that are rounded before, some entries vanish and others double."""
    exact = merged(of(three, name, **{"lambda": 1.2}), tmp_path / "out")
    start, *states = (model.state for model in three)
    for tensor in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        expected = start[tensor] + 1.2 * change(name, [(each[tensor] - start[tensor]).double() for each in states])
        torch.testing.assert_close(exact[tensor].double(), expected.double(), atol=1e-5, rtol=1e-5)
    norm = "model.norm.weight"
    expected = start[norm] + 1.2 * ((states[0][norm] + states[1][norm]) / 2 - start[norm])
    torch.testing.assert_close(exact[norm], expected, atol=1e-6, rtol=1e-5)
    assert f"Delegate {name} merged the changes of" in " ".join(report(tmp_path / "out")["notes"])
    rounded = merged(of(three, name, dtype="bfloat16", **{"lambda": 1.2}), tmp_path / "rounded")
    assert all(torch.equal(rounded[tensor], values.bfloat16()) for tensor, values in exact.items())


def test_weights_count(three: list[Checkpoint], tmp_path: Path) -> None:
    document = of(three, "wudi", dtype="bfloat16")
    document["models"][1]["parameters"] = {"weight": 0.0}
    for name, tensor in merged(document, tmp_path / "out").items():
        torch.testing.assert_close(tensor, three[1].state[name].bfloat16(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("others", ["mean", "sum"])
@EACH_RULE
def test_long_vocabularies_are_merged_in_slices(
    name: str, others: str, three: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of embeddings and heads as of the whole, also where one change is shortened."""
    document = of([*three[:2], tuned(three[0], tmp_path / "long", 2, 0.1)], name, others=others)
    whole = merged(document, tmp_path / "whole")
    by_three = [slice(start, start + 3) for start in range(0, len(three[0].state["lm_head.weight"]), 3)]
    monkeypatch.setattr("rotation_merge.averaging.task_vectors.row_slices", lambda *_: by_three)
    torch.testing.assert_close(merged(document, tmp_path / "sliced"), whole, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("lengths", "factor"), [("auto", 0.5), ("keep", 1.0)])
def test_long_changes_of_tensors_that_are_no_maps_are_shortened_too(
    lengths: str, factor: float, three: list[Checkpoint], tmp_path: Path
) -> None:
    models = [*three[:2], tuned(three[0], tmp_path / "long", 2, 0.1)]
    result = merged(of(models, "wudi", lengths=lengths), tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        start, short, long = (model.state[name] for model in models)
        expected = start + (short - start + factor * (long - start)) / 2
        torch.testing.assert_close(result[name], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@EACH_RULE
def test_an_embedding_that_is_the_head_is_merged_as_a_map(name: str, tmp_path: Path) -> None:
    """By a recipe, in memory, and with a tensor for the head alone, whose embedding is none."""
    base = checkpoint("llama", "llama, tied, biases", tmp_path / "base")
    models = [base, *(tuned(base, tmp_path / str(seed), seed) for seed in (1, 2))]
    embedding, start = "model.embed_tokens.weight", base.state["model.embed_tokens.weight"]
    changes = [model.state[embedding] - start for model in models[1:]]
    as_map = (start.double() + change(name, [c.double() for c in changes])).float()
    close: Callable[..., None] = lambda x, y: torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)  # noqa: E731
    close(merged(of(models, name), tmp_path / "out")[embedding], as_map)
    assert "embedding among them, which is the head, too" in " ".join(report(tmp_path / "out")["notes"])
    close(rm.average([model.path for model in models], name)[embedding], as_map)
    apart = merged(of(models, name, untie=True), tmp_path / "apart")
    close(apart[embedding], start + sum(changes) / 2)
    close(apart["lm_head.weight"], as_map)


def test_conv1d_is_merged_as_the_map_that_it_is(tmp_path: Path) -> None:
    """GPT-2 stores (inputs, outputs): the rule is not the same along the other side."""
    base = checkpoint("gpt2", "untied", tmp_path / "base")
    models = [base, *(tuned(base, tmp_path / str(seed), seed) for seed in (1, 2))]
    result = merged(of(models, "wudi"), tmp_path / "out")
    name = next(n for n in base.state if n.endswith("h.0.mlp.c_fc.weight"))
    start, *states = (model.state[name].double() for model in models)
    expected = start + change("wudi", [(each - start).T for each in states]).T
    torch.testing.assert_close(result[name].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_twins_fine_tune_is_merged_as_if_made_in_the_anchors_coordinates(
    three: list[Checkpoint], tmp_path: Path
) -> None:
    moved = twin(three[2], tmp_path / "moved", "permutation", attention="rotation")
    plain = merged(of(three, "wudi"), tmp_path / "plain")
    groups = {"attention": "rotation", "ffn": "permutation", "heads": "permutation", "residual": "permutation"}
    found = merged(of([*three[:2], moved], "wudi", scaling=True, **groups), tmp_path / "aligned")
    name = "model.layers.0.mlp.up_proj.weight"
    size = (plain[name] - three[0].state[name]).norm()
    assert float((found[name] - plain[name]).norm() / size) < 0.2  # the match is of noisy weights


@pytest.mark.slow
@EACH_RULE
def test_adapters_of_a_base_in_bfloat16_are_merged_unrounded(
    name: str, three: list[Checkpoint], tmp_path: Path
) -> None:
    base = three[0].write({key: x.bfloat16() for key, x in three[0].state.items()}, tmp_path / "base")
    maps = [key.removesuffix(".weight") for key, x in base.state.items() if x.ndim == 2 and "layers" in key]
    models = []
    for seed in (1, 2):
        generator, factors = torch.Generator().manual_seed(seed), {}
        for key in maps:
            outputs, inputs = base.state[f"{key}.weight"].shape
            factors[f"base_model.model.{key}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
            factors[f"base_model.model.{key}.lora_B.weight"] = 1e-3 * torch.randn(outputs, 2, generator=generator)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(base.path)}
        models.append(f"{base.path}+{write_adapter(config, factors, tmp_path / f'adapter-{seed}')}")
    exact = merged(recipe(base.path, *models, delegate=name), tmp_path / "exact")
    for dtype in ("bfloat16", None):
        rounded = merged(recipe(base.path, *models, dtype=dtype, delegate=name), tmp_path / str(dtype))
        assert all(torch.equal(rounded[tensor], values.bfloat16()) for tensor, values in exact.items())


@pytest.mark.parametrize("name", ["wudi", "linear"])
@pytest.mark.parametrize("expert", [0, 1])
def test_single_experts_may_be_excluded(expert: int, name: str, tmp_path: Path) -> None:
    base = checkpoint("mixtral", "untied", tmp_path / "base")
    models = [base, *(tuned(base, tmp_path / str(seed), seed) for seed in (1, 2))]
    document = of(models, name, exclude=f"experts.{expert}.")
    if name == "linear":
        document["models"] = [{"model": str(m.path), "parameters": {"weight": 0.5}} for m in models]
    start, result = base.state, merged(document, tmp_path / "out")
    kept = {tensor for tensor in start if ".experts." in tensor and torch.equal(result[tensor], start[tensor])}
    assert kept == {tensor for tensor in start if f".experts.{expert}." in tensor}


# --- what is refused, and what is said --------------------------------------------------------------------------------

UNDER_ONE = r"'{}' of delegate {} has no effect under one model.*move it under the recipe's 'parameters'"
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "lengths": ("wudi", {"lengths": "evn"}, {}, "'lengths' is 'evn'.*auto, keep"),
    "ridge": ("wudi", {"ridge": -1}, {}, "'ridge' is -1"),
    "sides": ("wudi", {"sides": "two"}, {}, "'sides' is 'two'.*one, both"),
    "others": ("wudi", {"others": "median"}, {}, "'others' is 'median'"),
    "lambda of one": ("wudi", {"weight": 1.0}, {"lambda": 0.5}, UNDER_ONE.format("lambda", "wudi")),
    "others of one": ("iso", {"weight": 1.0}, {"others": 0.5}, UNDER_ONE.format("others", "iso")),
    "of mergekit's": ("ties", {"weight": 1.0, "density": 0.5}, {"lambda": 0.5}, UNDER_ONE.format("lambda", "ties")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_values_are_one_line(fault: str, three: list[Checkpoint], tmp_path: Path) -> None:
    delegate, parameters, of_one, words = FAULTS[fault]
    document = of(three, delegate, **parameters)
    document["models"][1]["parameters"] = of_one
    result = mergekit_yaml(document, tmp_path / "out")
    assert result.exit_code == 2
    assert re.search(words, one_error(result.output))
    assert not (tmp_path / "out").exists()


def test_the_base_is_required_and_alone_no_merge(three: list[Checkpoint], tmp_path: Path) -> None:
    result = mergekit_yaml(of([three[0]] * 2, "tsv"), tmp_path / "out")
    assert result.exit_code == 2
    assert "delegate tsv" in one_error(result.output)


@EACH_RULE
def test_weights_that_are_no_numbers_are_named_in_one_line(name: str, three: list[Checkpoint], tmp_path: Path) -> None:
    tensor, tensors = "model.layers.0.mlp.up_proj.weight", three[2].state
    spoilt = three[0].write({**tensors, tensor: torch.full_like(tensors[tensor], float("nan"))}, tmp_path / "spoilt")
    result = mergekit_yaml(of([*three[:2], spoilt], name), tmp_path / "out")
    assert result.exit_code != 0
    assert tensor in one_error(result.stderr)
    assert not (tmp_path / "out").exists()
    assert name in run("inspect", "--methods").output


@pytest.mark.parametrize(("name", "words"), [("wudi", "share in the mean"), ("ties", "'weight'")])
def test_check_says_how_long_the_changes_are(name: str, words: str, three: list[Checkpoint], tmp_path: Path) -> None:
    base, short, long = (*three[:2], tuned(three[0], tmp_path / "long", 2, 0.05))
    path = write_recipe(of([base, short, long], name, weight=1.0), tmp_path / "r.yml")
    changes = json.loads(run("check", path, "--json").stdout)["changes"]
    assert changes["ratio"] == pytest.approx(5, rel=0.1)
    assert changes["lengths"][str(long.path)] == pytest.approx(5 * changes["lengths"][str(short.path)], rel=0.1)
    assert words in run("check", path).output
    linear = write_recipe(of([base, short, long], "linear", weight=0.5), tmp_path / "l.yml")
    assert "changes" not in json.loads(run("check", linear, "--json").stdout)


def test_inspect_says_what_the_averaging_costs(three: list[Checkpoint], tmp_path: Path) -> None:
    """More with more models; nothing of a delegate that merges no changes."""

    def cost(models: list[Checkpoint], delegate: str, **parameters: Any) -> dict[str, Any]:
        path = write_recipe(of(models, delegate, **parameters), tmp_path / "r.yml")
        result = run("inspect", path, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)[0].get("averaging", {})

    wudi = cost(three, "wudi")
    assert wudi["delegate"] == "wudi"
    assert cost([*three, tuned(three[0], tmp_path / "third", 3)], "wudi")["memory"] > wudi["memory"]
    assert not cost(three, "linear", weight=0.5)
    path = write_recipe(of(three, "tsv"), tmp_path / "r.yml")
    assert "Delegate tsv: " in run("inspect", path).output
