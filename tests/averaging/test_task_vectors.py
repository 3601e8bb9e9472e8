"""Delegates that merge task vectors: their rules on matrices, and recipes that name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import noisy
from cli_support import run
from plugin_support import lora, merged, write_recipe
from residual_support import Checkpoint, checkpoint, report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.methods import Source
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.task_vectors import change_of, shortening
from rotation_merge.averaging.wudi import BESIDE_RIDGE, WudiBeside, closed_form, prior_of

RULES: dict[str, Any] = {**TASK_VECTORS, "beside": WudiBeside()}
EACH_RULE = pytest.mark.parametrize("name", list(TASK_VECTORS))
WITH_BESIDE = pytest.mark.parametrize("name", list(RULES))
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def defaults(name: str, **values: Any) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in RULES[name].spec.parameters} | values


def change(name: str, changes: list[Tensor], weights: list[float] | None = None, **values: Any) -> Tensor:
    """The merged change by a rule."""
    matrices: list[SlicedMatrix] = [SlicedMatrix.of(each) for each in changes]
    whole: Tensor = RULES[name].change(matrices, weights or [1.0] * len(changes), defaults(name, **values)).whole()
    return whole


def of_models(name: str, weights: list[Tensor], **values: Any) -> Tensor:
    """The merged map by a rule, of the base's, which stands first, and those of its fine-tunes."""
    sources = [Source(weight, 1.0) for weight in weights]
    merged_map: Tensor = RULES[name].merge(sources, TensorInfo("", ("",), ()), defaults(name, **values), True)
    return merged_map


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(size, size, seed=seed))[0]


def sliced(matrix: Tensor, step: int) -> SlicedMatrix:
    return SlicedMatrix(lambda part: matrix[part], [slice(i, i + step) for i in range(0, len(matrix), step)])


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "step"), [(50, 3), (50, 7), (50, 50), (6, 50)])
def test_decompositions(size: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of fewer rows than columns, of more, and one of all, which may be wide; singular values from 1 to 1e-5,
    and one that a Gram cannot hold."""
    monkeypatch.setattr("rotation_merge.averaging.sliced.BLOCK", 4)
    torch.testing.assert_close(sliced(random(50, 11), step).gram(), random(50, 11).mT @ random(50, 11))
    scales, identity = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-5, 1e-13]).double(), torch.eye(5, dtype=torch.float64)
    u, v = (orthogonal(rows, seed)[:, :6] for seed, rows in enumerate((size, 56 - size)))
    matrix = u * scales @ v.mT
    svd = sliced(matrix, step).svd()
    left, right = svd.left(svd.rank).whole(), svd.right(svd.rank)
    torch.testing.assert_close(svd.values[:5], scales[:5], rtol=1e-5, atol=0)
    assert svd.values.count_nonzero() == svd.rank == 5
    torch.testing.assert_close(left * svd.values[:5] @ right, matrix, atol=1e-11, rtol=0)
    for side in (left.mT @ left, right @ right.mT):
        torch.testing.assert_close(side, identity, atol=1e-5, rtol=0)
    torch.testing.assert_close(svd.isometry(3).whole(), left[:, :3] @ right[:3], atol=1e-9, rtol=0)
    assert not sliced(torch.zeros_like(matrix), step).svd().isometry().whole().any()


@pytest.mark.parametrize(("size", "step"), [(50, 7), (50, 50), (6, 50)])
def test_polar_factors(size: int, step: int) -> None:
    matrix = random(size, 56 - size)
    factor = sliced(matrix, step).svd().isometry().whole()
    torch.testing.assert_close(torch.linalg.svdvals(factor), torch.ones(6, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.linalg.eigvalsh(factor.mT @ matrix if size > 6 else factor @ matrix.mT).min() > 0


@WITH_BESIDE
@pytest.mark.parametrize("shape", [(6, 9), (4, 9), (9, 6)])
def test_merged_changes_follow_rotations(name: str, shape: tuple[int, int]) -> None:
    """f(L D R^T) = L f(D) R^T: merging commutes with an alignment. A model of no weight counts for nothing."""
    changes, weights = [random(*shape, seed=seed) for seed in range(3)], [1.0, 2.0, 0.5]
    left, right = orthogonal(shape[0], 7), orthogonal(shape[1], 8)
    turned = change(name, [left @ d @ right.T for d in changes], weights)
    expected = left @ change(name, changes, weights) @ right.T
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=1e-6)
    if name == "wudi":
        result, without = change(name, changes, [1.0, 1.0, 1e-9]), change(name, changes[:2])
        torch.testing.assert_close(result, without, atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Measures the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(part.numel() for part in tree_leaves(result) if isinstance(part, Tensor))])
        return result


@WITH_BESIDE
def test_a_map_into_a_large_vocabulary(name: str) -> None:
    """It takes no square of it. In slices it is the same as of the whole, and nothing is made that is larger than a
    slice or (inputs, inputs)."""
    changes, weights = [random(500, 4, seed=seed) for seed in range(3)], [1.0, 2.0, 0.5]
    with Largest() as largest:
        change(name, changes, weights)
    assert largest.size <= sum(each.numel() for each in changes)
    whole, parts = ([sliced(each, step) for each in changes] for step in (500, 20))
    with Largest() as largest:
        rows = RULES[name].head_change(parts, weights, defaults(name)).rows(slice(140, 160))
    assert largest.size <= 3 * 24 * 4
    expected = RULES[name].head_change(whole, weights, defaults(name)).rows(slice(140, 160))
    torch.testing.assert_close(rows, expected, atol=1e-10, rtol=1e-8)


def test_tsv_keeps_what_does_not_meet_and_iso_evens_out_singular_values() -> None:
    """One change alone is kept, one that comes twice counts once; two that share no direction add up."""
    alone, twice = random(5, 7), random(8, 2) @ random(2, 6, seed=1)
    u, v, parts = orthogonal(8, 1), orthogonal(8, 2), [slice(0, 3), slice(3, 6)]
    apart = [u[:, part] @ random(3, 3, seed=3 + i) @ v[:, part].T for i, part in enumerate(parts)]
    for changes, expected in (([alone], alone), ([twice, twice], twice), (apart, apart[0] + apart[1])):
        torch.testing.assert_close(change("tsv", changes), expected, atol=1e-10, rtol=1e-10)
    values = torch.linalg.svdvals(change("iso", [alone, random(5, 7, seed=1)]))
    torch.testing.assert_close(values, torch.linalg.svdvals(alone + random(5, 7, seed=1)).mean().expand(5))
    assert not change("iso", [alone, -alone]).any()


def added(first: Tensor, second: Tensor) -> Tensor:
    base = torch.zeros_like(first)
    return of_models("beside", [base, first, second], ridge=BESIDE_RIDGE, lengths="keep") - first


def test_a_change_beside_another_one() -> None:
    """It is kept where the two read from orthogonal inputs; else it disturbs the other less."""
    inputs, first, second, none = orthogonal(9, 1), random(4, 9, seed=4), random(4, 9, seed=5), 0 * random(4, 9)
    apart, beside = (each @ part @ part.T for each, part in ((first, inputs[:, :4]), (second, inputs[:, 4:])))
    torch.testing.assert_close(added(beside, apart), apart, atol=1e-10, rtol=1e-10)
    assert float((added(first, second) @ first.mT).norm()) < float((second @ first.mT).norm())
    assert torch.equal(added(none, second), second)
    assert torch.equal(added(first, none), none)


def test_wudi_solves_its_equations() -> None:
    """It is the minimum of sum_t a_t |(D - D_t) D_t^T|^2 + l |D - M|^2, where the gradient vanishes."""
    changes, shares = [random(4, 6, seed=seed) for seed in range(3)], [0.2, 0.5, 1.0]
    prior = sum(a * d for a, d in zip(shares, changes, strict=True)) / sum(shares)
    x = closed_form(changes, shares, prior, 0.1).requires_grad_()
    values = torch.linalg.eigvalsh(sum(a * d.T @ d for a, d in zip(shares, changes, strict=True)))
    objective = sum(a * ((x - d) @ d.T).square().sum() for a, d in zip(shares, changes, strict=True))
    objective = objective + 0.1 * float(values.square().sum() / values.sum()) * (x - prior).square().sum()
    assert float(torch.autograd.grad(objective, x)[0].abs().max()) < 1e-9


def prior(*changes: Tensor, weights: list[float] | None = None) -> Tensor:
    """M of matrices in slices, as it is of the whole."""
    weights = weights or [1.0] * len(changes)
    whole = prior_of([SlicedMatrix.of(each) for each in changes], weights)([*changes])
    rows = prior_of([sliced(each, 3) for each in changes], weights)([each[3:6] for each in changes])
    torch.testing.assert_close(rows, whole[3:6])
    return whole


def test_the_prior_holds_each_change_once() -> None:
    """On the average, but it is no longer than the sum: changes that share nothing add up, equal ones stay."""
    first, second, third = (random(7, 5, seed=seed) for seed in range(3))
    apart = second - first * float((first * second).sum() / first.square().sum())
    torch.testing.assert_close(prior(first, apart), first + apart)
    torch.testing.assert_close(prior(first, first, first), first)
    torch.testing.assert_close(prior(first, first, weights=[1.0, 3.0]), first)
    torch.testing.assert_close(prior(first, apart - 0.3 * first), 0.7 * first + apart)  # not longer
    alike, weights = [first + 0.3 * each for each in (second, third)], [1.0, 2.0]
    merged = prior(*alike, weights=weights)
    held = [float((merged * each).sum() / each.square().sum()) for each in alike]
    assert (held[0] + 2 * held[1]) / 3 == pytest.approx(1.0)
    torch.testing.assert_close(merged / merged.norm(), (t := alike[0] + 2 * alike[1]) / t.norm())
    torch.testing.assert_close(merged, prior(*alike, weights=[3.0, 6.0]))


@WITH_BESIDE
def test_changes_that_are_zero_do_not_count(name: str) -> None:
    changes, zero = [random(4, 6, seed=seed) for seed in range(2)], 0.0 * random(4, 6)
    torch.testing.assert_close(of_models(name, [zero, *changes, zero]), change(name, changes))
    alone = change("iso", changes[:1]) if name == "iso" else changes[0]
    torch.testing.assert_close(of_models(name, [zero, zero, changes[0]]), alone)


def test_low_ranks_are_not_blown_up() -> None:
    """Of changes of rank 2 whose inputs nearly coincide, as those of LoRAs, the result is no longer than their sum."""
    common = random(2, 60)
    changes = [random(40, 2, seed=t) @ (common + 0.1 * random(2, 60, seed=10 + t)) for t in range(1, 3)]
    assert float(change("wudi", changes).norm()) < sum(float(d.norm()) for d in changes)


@pytest.mark.parametrize(
    ("lengths", "factors"),
    [
        ([2.0, 5.0, 0.0], [1.0, 0.5, 1.0]),  # its share in the mean of those that count
        ([2.0, 5.0, 2.0], [1.0, pytest.approx(0.4), 1.0]),  # the shortest one's length
        ([2.0, 3.0], [1.0, 1.0]),
        ([2.0, 5e9], [1.0, 0.5]),  # by no more than the number of changes
    ],
)
def test_long_changes_are_shortened(lengths: list[float], factors: list[float]) -> None:
    assert shortening(lengths)[0] == factors


def test_the_rounding_of_a_base_is_no_change_of_a_model_that_was_trained_from_the_rounded_base() -> None:
    base, rounded = random(20, 30).float(), random(20, 30).bfloat16()
    assert not change_of(base, rounded).whole().any()
    step = torch.where(random(20, 30, seed=1) > 1.5, 1 + 2**-7, 1.0).float()
    model = (rounded.float() * step).bfloat16()
    assert torch.equal(change_of(base, model).whole(), model.double() - rounded.double())
    model = (base + 0.1 * random(20, 30, seed=2).float()).bfloat16()  # trained from the base itself
    assert torch.equal(change_of(base, model).whole(), model.double() - base.double())
    assert torch.equal(change_of(rounded, base).whole(), base.double() - rounded.double())


@EACH_RULE
@pytest.mark.parametrize("shape", [(30, 40), (40, 30), (20, 20)])
def test_precision_does_not_matter(name: str, shape: tuple[int, int]) -> None:
    """Changes of low rank, of which one is shortened, are merged alike in single and double precision."""
    base, results = random(*shape).float(), []
    low = [size * random(shape[0], 2, seed=t) @ random(2, shape[1], seed=9 + t) for t, size in enumerate((0.01, 0.03))]
    for dtype in (torch.float32, torch.float64):
        weights = [x.to(dtype) for x in (base.double(), *(base + each for each in low))]
        results.append(of_models(name, weights) - base.double())
    assert (results[0] - results[1]).norm() <= 1e-4 * results[1].norm()


# --- recipes ----------------------------------------------------------------------------------------------------------


def fine_tunes(family: str, name: str, folder: Path) -> list[Checkpoint]:
    """A base and two fine-tunes of it."""
    base = checkpoint(family, name, folder / "base")
    return [base, *(replace(base, path=noisy(base.path, folder / str(seed), 0.01, seed)) for seed in (1, 2))]


def of(models: list[Checkpoint], delegate: str, **parameters: Any) -> dict[str, Any]:
    """A recipe of a base and its fine-tunes, nothing moved."""
    parameters = {"attention": "none", "ffn": "none", "scaling": False, "delegate": delegate, **parameters}
    entries = [{"model": str(model.path), "parameters": {}} for model in models[1:]]
    document = {"merge_method": "rotation_merge", "base_model": str(models[0].path), "models": entries}
    return {**document, "dtype": parameters.pop("dtype", "float32"), "parameters": parameters}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return fine_tunes("llama", "llama", tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def uneven(three: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """The same with a second fine-tune that is ten times as far away."""
    long = noisy(three[0].path, tmp_path_factory.mktemp("uneven") / "long", 0.1)
    return [*three[:2], replace(three[0], path=long)]


@pytest.mark.parametrize(("name", "family"), [*((name, "llama") for name in TASK_VECTORS), ("wudi", "gpt2")])
def test_recipes_merge_the_changes_of_every_map(
    name: str, family: str, three: list[Checkpoint], tmp_path: Path
) -> None:
    """Only the result is rounded: of changes that are rounded before, some entries vanish and others double. GPT-2
    stores (inputs, outputs): the rule is not the same along the other side."""
    models = three if family == "llama" else fine_tunes(family, "untied", tmp_path)
    exact = merged(of(models, name, **{"lambda": 1.2}), tmp_path / "out")
    start, *states = ({key: x.double() for key, x in model.state.items()} for model in models)
    for tensor in (tensor for tensor in start if tensor.endswith(("1.mlp.down_proj.weight", "h.0.mlp.c_fc.weight"))):
        side = 1 if family == "llama" else 0  # of the inputs
        changes = [(each[tensor] - start[tensor]).movedim(side, 1) for each in states]
        expected = start[tensor] + 1.2 * change(name, changes).movedim(1, side)
        torch.testing.assert_close(exact[tensor].double(), expected, atol=1e-5, rtol=1e-5)
    norm = next(tensor for tensor in start if tensor.endswith(("model.norm.weight", "ln_f.weight")))
    expected = start[norm] + 1.2 * ((states[0][norm] + states[1][norm]) / 2 - start[norm])
    torch.testing.assert_close(exact[norm].double(), expected, atol=1e-6, rtol=1e-5)
    assert f"Delegate {name} merged the changes of" in " ".join(report(tmp_path / "out")["notes"])
    rounded = merged(of(models, name, dtype="bfloat16", **{"lambda": 1.2}), tmp_path / "rounded")
    assert all(torch.equal(rounded[tensor], values.bfloat16()) for tensor, values in exact.items())


@pytest.mark.parametrize("name", ["tsv", "iso"])
def test_heads_are_merged_by_wudi(name: str, three: list[Checkpoint], tmp_path: Path) -> None:
    """By rules of singular vectors, which merge all other maps themselves; weights multiply a head's change, too."""
    own, of_wudi = (merged(of(three, delegate), tmp_path / delegate) for delegate in (name, "wudi"))
    for tensor in (tensor for tensor in own if tensor.endswith("proj.weight")):
        assert not torch.allclose(own[tensor], of_wudi[tensor], rtol=1e-3)
    head, start = own["lm_head.weight"], three[0].state["lm_head.weight"]
    assert torch.equal(head, of_wudi["lm_head.weight"])
    notes = [" ".join(report(tmp_path / delegate)["notes"]) for delegate in (name, "wudi")]
    assert [", heads by wudi; other tensors" in words for words in notes] == [True, False]
    halved = merged(of(three, name, weight=0.5), tmp_path / "half")["lm_head.weight"]
    torch.testing.assert_close(halved, (start + head) / 2, atol=1e-6, rtol=1e-5)


def test_equal_models_stay_bit_for_bit_and_a_weight_of_zero_counts(three: list[Checkpoint], tmp_path: Path) -> None:
    base = three[0]
    copies = [base.write(base.state, tmp_path / name) for name in ("copy", "another")]
    result = merged(of([base, *copies], "wudi"), tmp_path / "out")
    assert all(torch.equal(result[name], tensor) for name, tensor in base.state.items())
    document = of(three, "wudi")
    document["models"][1]["parameters"] = {"weight": 0.0}
    torch.testing.assert_close(merged(document, tmp_path / "one"), three[1].state, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(("name", "others"), [("wudi", "sum"), ("tsv", "mean"), ("iso", "mean")])
def test_long_vocabularies_are_merged_in_slices(
    name: str, others: str, uneven: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of embeddings and heads as of the whole, also where one change is shortened."""
    document = of(uneven, name, others=others)
    whole = merged(document, tmp_path / "whole")
    by_three = [slice(start, start + 3) for start in range(0, len(uneven[0].state["lm_head.weight"]), 3)]
    monkeypatch.setattr("rotation_merge.averaging.task_vectors.row_slices", lambda *_: by_three)
    torch.testing.assert_close(merged(document, tmp_path / "sliced"), whole, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("lengths", "factor"), [("auto", 0.5), ("keep", 1.0)])
def test_long_changes_of_other_tensors_are_shortened_too(
    lengths: str, factor: float, uneven: list[Checkpoint], tmp_path: Path
) -> None:
    result = merged(of(uneven, "wudi", lengths=lengths), tmp_path / "out")
    for name in (EMBEDDING, NORM):
        start, short, long = (model.state[name] for model in uneven)
        expected = start + (short - start + factor * (long - start)) / 2
        torch.testing.assert_close(result[name], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_adapters_of_a_base_in_bfloat16_are_merged_unrounded(three: list[Checkpoint], tmp_path: Path) -> None:
    base = three[0].write({key: x.bfloat16() for key, x in three[0].state.items()}, tmp_path / "base")
    document = of([base], "wudi")
    for seed in range(2):
        lora(tmp_path / f"adapter-{seed}", base.path, seed, spread=0.03, target_modules="all-linear")
        document["models"].append({"model": f"{base.path}+{tmp_path}/adapter-{seed}"})
    exact = merged(document, tmp_path / "exact")
    for dtype in ("bfloat16", None):
        rounded = merged({**document, "dtype": dtype}, tmp_path / str(dtype))
        assert all(torch.equal(rounded[tensor], values.bfloat16()) for tensor, values in exact.items())


def test_single_experts_may_be_excluded(tmp_path: Path) -> None:
    models = fine_tunes("mixtral", "untied", tmp_path)
    start, result = models[0].state, merged(of(models, "wudi", exclude="experts.1."), tmp_path / "out")
    same = {tensor for tensor in start if ".experts." in tensor and torch.equal(result[tensor], start[tensor])}
    assert same == {tensor for tensor in start if ".experts.1." in tensor}


# --- what is said ----------------------------------------------------------------------------------------------------


def test_check_says_how_long_changes_are(uneven: list[Checkpoint], tmp_path: Path) -> None:
    """Nothing of a delegate that merges no changes; of mergekit's, that weights even them out."""
    path = write_recipe(of(uneven, "wudi", weight=1.0), tmp_path / "r.yml")
    changes = json.loads(run("check", path, "--json").stdout)["changes"]
    assert changes["ratio"] == pytest.approx(10, rel=0.1)
    assert "share in the mean" in run("check", path).output
    calibrated = write_recipe(of(uneven, "tsv", weight=1.0, calibrate="svc"), tmp_path / "c.yml")
    assert "with tsv, calibrated the longer ones are shortened" in run("check", calibrated).output
    ties = write_recipe(of(uneven, "ties", weight=1.0), tmp_path / "t.yml")
    assert "'weight'" in run("check", ties).output
    linear = write_recipe(of(uneven, "linear", weight=0.5), tmp_path / "l.yml")
    assert "changes" not in json.loads(run("check", linear, "--json").stdout)
