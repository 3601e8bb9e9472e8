"""The rules that merge task vectors, on matrices: optimal, equivariant, exact where the answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import merged
from residual_support import checkpoint, report
from test_task_vectors import recipe, tuned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rotation_merge as rm
from rotation_merge.averaging.methods import mean
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.task_vectors import TaskVectorMethod, change_of, shortening
from rotation_merge.averaging.wudi import added_by_wudi, both_sides, one_side

BY_NAME = {method.spec.name: method for method in TASK_VECTORS}


def defaults(method: TaskVectorMethod, **values: Any) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in method.spec.parameters} | values


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(size, size, seed=seed))[0]


CASES = [("wudi", {}), ("wudi", {"sides": "both", "ridge": 0.3}), ("tsv", {}), ("iso", {})]


@pytest.mark.parametrize(("name", "values"), CASES)
@pytest.mark.parametrize("shape", [(6, 9), (4, 9), (9, 6)])
def test_merged_changes_follow_rotations(name: str, values: dict[str, Any], shape: tuple[int, int]) -> None:
    """f(L D R^T) = L f(D) R^T: merging commutes with an alignment."""
    method = BY_NAME[name]
    changes = [random(*shape, seed=seed) for seed in range(3)]
    left, right = orthogonal(shape[0], 7), orthogonal(shape[1], 8)
    parameters, weights = defaults(method, **values), [1.0, 2.0, 0.5]
    merged_change = method.change(changes, weights, parameters)
    turned = method.change([left @ d @ right.T for d in changes], weights, parameters)
    torch.testing.assert_close(turned, left @ merged_change @ right.T, atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Measures the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        self.size = max([self.size, *(part.numel() for part in made)])
        return result


@pytest.mark.parametrize(("name", "values"), CASES)
def test_a_map_into_a_large_vocabulary_takes_no_square_of_it(name: str, values: dict[str, Any]) -> None:
    """A head of 128,000 tokens would need 130 GB."""
    method, changes = BY_NAME[name], [random(500, 4, seed=seed) for seed in range(3)]
    with Largest() as largest:
        method.change(changes, [1.0] * 3, defaults(method, **values))
    assert largest.size <= sum(change.numel() for change in changes)


IN_SLICES = [case for case in CASES if "sides" not in case[1]]


@pytest.mark.parametrize(("name", "values"), IN_SLICES)
def test_a_map_into_a_large_vocabulary_is_merged_in_slices(name: str, values: dict[str, Any]) -> None:
    """The same as of the whole, and nothing is made that is larger than a slice or (inputs, inputs)."""
    method, changes = BY_NAME[name], [random(500, 4, seed=seed) for seed in range(3)]
    parts = [slice(start, start + 20) for start in range(0, 500, 20)]
    matrices = [SlicedMatrix(lambda part, change=change: change[part], parts) for change in changes]
    parameters, weights = defaults(method, **values), [1.0, 2.0, 0.5]
    with Largest() as largest:
        rows = [method.in_slices(matrices, weights, parameters).rows(parts[7])]
    assert largest.size <= 3 * 24 * 4
    wanted = method.change(changes, weights, parameters)[parts[7]]
    torch.testing.assert_close(rows[0], wanted, atol=1e-10, rtol=1e-8)


def test_a_change_that_comes_twice_counts_once_in_tsv() -> None:
    """The triples of the copies are the same: there are no other directions to make them orthogonal to."""
    change = random(8, 2) @ random(2, 6, seed=1)
    merged_change = BY_NAME["tsv"].change([change, change], [1.0, 1.0], defaults(BY_NAME["tsv"]))
    torch.testing.assert_close(merged_change, change, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["wudi", "tsv"])
def test_one_change_is_kept(name: str) -> None:
    method, change = BY_NAME[name], random(5, 7)
    torch.testing.assert_close(method.change([change], [1.0], defaults(method)), change, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["wudi", "tsv"])
def test_changes_that_do_not_meet_are_all_kept(name: str) -> None:
    """Two tasks that read and write different directions: the merged change does what each of them does."""
    u, v = orthogonal(8, 1), orthogonal(8, 2)
    changes = [u[:, :3] @ random(3, 3, seed=3) @ v[:, :3].T, u[:, 3:6] @ random(3, 3, seed=4) @ v[:, 3:6].T]
    method = BY_NAME[name]
    parameters = defaults(method, **({"ridge": 1e-10} if name == "wudi" else {}))
    merged_change = method.change(changes, [1.0, 1.0], parameters)
    for change, inputs in zip(changes, (v[:, :3], v[:, 3:6]), strict=True):
        torch.testing.assert_close(merged_change @ inputs, change @ inputs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 6, 9)])
def test_a_change_beside_another_one(shape: tuple[int, ...]) -> None:
    """It is kept where the two read from orthogonal inputs; else it follows rotations, and disturbs the other less."""
    inputs = orthogonal(shape[-1], 1)
    apart = random(*shape, seed=2) @ inputs[:, :4] @ inputs[:, :4].T
    first = random(*shape, seed=3) @ inputs[:, 4:] @ inputs[:, 4:].T
    torch.testing.assert_close(added_by_wudi(first, apart), apart, atol=1e-10, rtol=1e-10)
    first, second = random(*shape, seed=4), random(*shape, seed=5)
    added = added_by_wudi(first, second)
    left, right = orthogonal(shape[-2], 7), orthogonal(shape[-1], 8)
    turned = added_by_wudi(left @ first @ right.T, left @ second @ right.T)
    torch.testing.assert_close(turned, left @ added @ right.T, atol=1e-9, rtol=1e-9)
    assert float((added @ first.mT).norm()) < float((second @ first.mT).norm())
    for none in (torch.zeros_like(first), first):
        kept = added_by_wudi(none, torch.zeros_like(first) if none is first else second)
        torch.testing.assert_close(kept, torch.zeros_like(first) if none is first else second)


def test_one_side_is_the_minimum_of_its_objective() -> None:
    """sum_t a_t |(D - D_t) D_t^T|^2 + l |D - M|^2: the gradient vanishes."""
    changes, shares = [random(4, 6, seed=seed) for seed in range(3)], [0.2, 0.5, 1.0]
    prior = mean(changes, shares)
    merged_change = one_side(changes, shares, prior, 0.1)
    values = torch.linalg.eigvalsh(sum(a * d.T @ d for a, d in zip(shares, changes, strict=True)))
    penalty = 0.1 * float(values.square().sum() / values.sum())
    x = merged_change.clone().requires_grad_()
    objective = sum(a * ((x - d) @ d.T).square().sum() for a, d in zip(shares, changes, strict=True))
    (objective + penalty * (x - prior).square().sum()).backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) < 1e-9


def test_both_sides_solve_their_equation() -> None:
    changes, weights = [random(5, 4, seed=seed) for seed in range(2)], [1.0, 3.0]
    merged_change = both_sides(changes, weights, 0.1)
    left = [d @ d.T / d.square().sum() for d in changes]
    right = [d.T @ d / d.square().sum() for d in changes]
    spectra = [torch.linalg.eigvalsh(gram) for gram in right]
    start = 0.7 * (1 + 3) / (1 + 9) * (changes[0] + 3 * changes[1])
    ridge = sum(w * (0.1 * s.square().sum()) ** 2 for w, s in zip(weights, spectra, strict=True))
    rest = sum(w * a @ (d - merged_change) @ b for w, a, d, b in zip(weights, left, changes, right, strict=True))
    torch.testing.assert_close(rest + ridge * (start - merged_change), torch.zeros(5, 4).double(), atol=1e-8, rtol=0)


@pytest.mark.parametrize("values", [{}, {"sides": "both"}])
def test_a_model_of_next_to_no_weight_counts_for_nothing(values: dict[str, Any]) -> None:
    changes = [random(10, 2, seed=t) @ random(2, 12, seed=9 + t) for t in range(3)]
    method = BY_NAME["wudi"]
    parameters = defaults(method, **values)
    without = method.change(changes[:2], [1.0, 1.0], parameters)
    torch.testing.assert_close(method.change(changes, [1.0, 1.0, 1e-9], parameters), without, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("values", [{}, {"sides": "both"}])
def test_low_rank_changes_are_not_blown_up(values: dict[str, Any]) -> None:
    """Changes of rank 2 whose inputs nearly coincide, as those of LoRAs: the result is no longer than their sum."""
    common = random(2, 60)
    changes = [random(40, 2, seed=t) @ (common + 0.1 * random(2, 60, seed=10 + t)) for t in range(1, 3)]
    method = BY_NAME["wudi"]
    merged_change = method.change(changes, [1.0, 1.0], defaults(method, **values))
    assert float(merged_change.norm()) < sum(float(d.norm()) for d in changes)


def test_long_changes_are_shortened_where_lengths_differ_by_more_than_two() -> None:
    short, long = 2.0, 5.0
    assert shortening([short, long, 0.0]) == ([1.0, 0.5, 1.0], 2.5)  # its share in the mean of those that count
    assert shortening([short, long, short])[0] == [1.0, pytest.approx(1 / 2.5), 1.0]  # the shortest one's length
    assert shortening([short, 1.5 * short])[0] == [1.0, 1.0]
    assert shortening([short, 1e9 * long])[0] == [1.0, 0.5]  # by no more than the number of changes


@pytest.mark.parametrize(("lengths", "factor"), [("auto", 0.5), ("keep", 1.0)])
def test_long_changes_of_tensors_that_are_no_maps_are_shortened_too(
    lengths: str, factor: float, tmp_path: Path
) -> None:
    base = checkpoint("llama", "llama", tmp_path / "base")
    models = [base, tuned(base, tmp_path / "short", 1, 0.01), tuned(base, tmp_path / "long", 2, 0.1)]
    asked = recipe(*(model.path for model in models), delegate="wudi", lengths=lengths)
    result = merged(asked, tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        start, short, long = (model.state[name] for model in models)
        expected = start + (short - start + factor * (long - start)) / 2
        torch.testing.assert_close(result[name], expected, atol=1e-6, rtol=1e-6)


def test_the_rounding_of_a_base_is_no_change_of_a_model_that_was_trained_from_the_rounded_base() -> None:
    base = random(20, 30).float()
    assert not change_of(base, base.bfloat16()).whole().any()
    step = torch.where(random(20, 30, seed=1) > 1.5, 1 + 2**-7, 1.0).float()
    tuned = (base.bfloat16().float() * step).bfloat16()
    assert torch.equal(change_of(base, tuned).whole(), tuned.double() - base.bfloat16().double())
    tuned = (base + 0.1 * random(20, 30, seed=2).float()).bfloat16()  # trained from the base itself
    assert torch.equal(change_of(base, tuned).whole(), tuned.double() - base.double())
    assert torch.equal(change_of(base.bfloat16(), base).whole(), base.double() - base.bfloat16().double())


@pytest.mark.parametrize("others", ["mean", "sum"])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_long_vocabularies_are_merged_in_slices(
    name: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of embeddings and heads as of the whole, also where one change is shortened."""
    base = checkpoint("llama", "llama", tmp_path / "base")
    models = [base, tuned(base, tmp_path / "short", 1, 0.01), tuned(base, tmp_path / "long", 2, 0.1)]
    asked = recipe(*(model.path for model in models), delegate=name, others=others)
    whole = merged(asked, tmp_path / "whole")
    by_three = [slice(start, start + 3) for start in range(0, len(base.state["lm_head.weight"]), 3)]
    monkeypatch.setattr("rotation_merge.averaging.task_vectors.row_slices", lambda *_: by_three)
    sliced = merged(asked, tmp_path / "sliced")
    for key, tensor in whole.items():
        torch.testing.assert_close(sliced[key], tensor, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_recipes_merge_the_changes_of_every_map(name: str, tmp_path: Path) -> None:
    base = checkpoint("llama", "llama", tmp_path / "base")
    three = base, one, two = [base, tuned(base, tmp_path / "one", 1), tuned(base, tmp_path / "two", 2)]
    result = merged(recipe(base.path, one.path, two.path, delegate=name, **{"lambda": 1.2}), tmp_path / "out")
    start, first, second = (c.state for c in three)
    method = BY_NAME[name]
    for tensor in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        changes = [(state[tensor] - start[tensor]).double() for state in (first, second)]
        wanted = start[tensor] + 1.2 * method.change(changes, [1.0, 1.0], defaults(method))
        torch.testing.assert_close(result[tensor].double(), wanted.double(), atol=1e-5, rtol=1e-5)
    norm = "model.norm.weight"
    mean = start[norm] + 1.2 * ((first[norm] + second[norm]) / 2 - start[norm])
    torch.testing.assert_close(result[norm], mean, atol=1e-6, rtol=1e-5)
    notes = " ".join(report(tmp_path / "out")["notes"])
    assert f"Delegate {name} merged the changes of" in notes


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BY_NAME))
def test_an_embedding_that_is_the_head_is_merged_as_a_map(name: str, tmp_path: Path) -> None:
    """By a recipe, in memory, and with a tensor for the head alone, whose embedding is none."""
    base = checkpoint("llama", "llama, tied, biases", tmp_path / "base")
    models = [tuned(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    embedding, method = "model.embed_tokens.weight", BY_NAME[name]
    start, changes = base.state[embedding].double(), [m.state[embedding] - base.state[embedding] for m in models]
    ruled = (start + method.change([c.double() for c in changes], [1.0, 1.0], defaults(method))).float()
    mean = (start + sum(changes) / 2).float()
    asked = recipe(base.path, *(m.path for m in models), delegate=name)
    torch.testing.assert_close(merged(asked, tmp_path / "out")[embedding], ruled, atol=1e-6, rtol=1e-5)
    assert "embedding among them, which is the head, too" in " ".join(report(tmp_path / "out")["notes"])
    held = rm.average([base.path, *(m.path for m in models)], name)
    torch.testing.assert_close(held[embedding], ruled, atol=1e-6, rtol=1e-5)
    asked["parameters"]["untie"] = True
    apart = merged(asked, tmp_path / "apart")
    torch.testing.assert_close(apart[embedding], mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(apart["lm_head.weight"], ruled, atol=1e-6, rtol=1e-5)


def test_conv1d_is_merged_as_the_map_that_it_is(tmp_path: Path) -> None:
    """GPT-2 stores (inputs, outputs): the rule is not the same along the other side."""
    base = checkpoint("gpt2", "untied", tmp_path / "base")
    models = [tuned(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    result = merged(recipe(base.path, *(m.path for m in models), delegate="wudi"), tmp_path / "out")
    name = next(n for n in base.state if n.endswith("h.0.mlp.c_fc.weight"))
    changes = [(m.state[name] - base.state[name]).double().T for m in models]
    method = BY_NAME["wudi"]
    wanted = base.state[name].double() + method.change(changes, [1.0, 1.0], defaults(method)).T
    torch.testing.assert_close(result[name].double(), wanted, atol=1e-5, rtol=1e-5)
