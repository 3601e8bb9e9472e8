"""Parts of averaging, each alone: plans, formulas, divergences, and how adapters that are trained begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import run
from plugin_support import build, make
from rounding import assert_equal_up_to_rounding
from tiny_models import ALL
from tiny_models import make as tiny
from torch import Tensor

from rotation_merge.averaging.fisher import Fisher
from rotation_merge.averaging.low_rank import initialise_along_gradient, with_lora
from rotation_merge.averaging.methods import Source
from rotation_merge.averaging.ot_fusion import Solver
from rotation_merge.averaging.polish import LEAST_GAIN, PolishReport
from rotation_merge.averaging.regmean import RegMean
from rotation_merge.matching.objective import answer, divergence, read_answers, write_answers
from rotation_merge.run.fisher import LabelScores


def test_plans_by_hand():
    """Two points that change places; a soft plan between equidistant points shares them out."""
    a = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert Solver(True, 0.06).plan(a, a.flip(0)).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    soft = Solver(False, 0.06).plan(a, a.flip(0))
    torch.testing.assert_close(soft.sum(1), torch.ones(2, dtype=torch.float64))
    assert 0 < float(soft[0, 0]) < 0.1
    torch.testing.assert_close(
        Solver(False, 100.0).plan(a, a), torch.full((2, 2), 0.5, dtype=torch.float64), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("count", [2, 3])
def test_averages_by_hand(count: int):
    """Shares, ridges in both sums, shrinking, norms and floors: against the formulas, spelled out."""
    draw = torch.Generator().manual_seed(count)

    def some(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    def whole(matrix: Tensor) -> Tensor:
        off = 0.8 * matrix + 0.2 * torch.diag(matrix.diagonal())
        return off + 0.05 * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)

    shares, parameters = (0.2, 0.3, 0.5)[:count], {"shrink": 0.8, "ridge": 0.05, "normalize": True, "floor": 0.4}
    sources = []
    for number, share in enumerate(shares):
        inputs = some(9, 4)
        held = {"gram": inputs.T @ inputs, "fisher": some(3, 4).square(), "norm": 3.0 - number}
        sources.append(Source(some(3, 4), share, held))
    grams = [s.share * whole(s.inputs["gram"]) for s in sources]
    best = sum(s.weight @ g for s, g in zip(sources, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    torch.testing.assert_close(RegMean().average(sources, parameters), best)
    floors = [0.4, 0.0, 0.0]
    rows = [s.share / s.inputs["norm"] * s.inputs["fisher"].clamp(min=f) for s, f in zip(sources, floors, strict=False)]
    best = sum(r * s.weight for r, s in zip(rows, sources, strict=True)) / sum(rows)
    torch.testing.assert_close(Fisher().average(sources, parameters), best)


@pytest.mark.parametrize("task", ["regression", "labels"])
def test_scores_of_the_datas_own_numbers(task: str):
    """Of a likelihood that grows where the data are: its gradient by the outputs is what they lack."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1 if task == "regression" else 3, generator=draw, requires_grad=True)
    labels = torch.rand(5, generator=draw) if task == "regression" else torch.tensor([[1.0, 0, 1]] * 5)
    model = build("bert", num_labels=logits.shape[1])
    (score,) = LabelScores(task, True).of(model, {"logits": logits}, {"labels": labels}, draw)
    (found,) = torch.autograd.grad(score, logits)
    given = logits if task == "regression" else logits.sigmoid()
    torch.testing.assert_close(found, labels.reshape(logits.shape) - given)


class Given:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def test_divergence_is_that_of_all_classes() -> None:
    """With few classes exactly KL; with many, the classes that were not kept count as one."""
    draw = torch.Generator().manual_seed(0)
    for classes in (2, 5, 300):
        a, b = (torch.randn(3, 4, classes, generator=draw) * 2 for _ in range(2))
        found = float(divergence(Given(b), answer(Given(a))))
        p, q = a.softmax(-1), b.softmax(-1)
        order = p.topk(min(64, classes)).indices
        kept = [x.gather(-1, order) for x in (p, q)]
        if classes > 64:
            kept = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in kept]
        assert found == pytest.approx(float((kept[0] * (kept[0] / kept[1]).log()).sum(-1).mean()), abs=1e-4)
        assert float(divergence(Given(a), answer(Given(a)))) == pytest.approx(0.0, abs=1e-5)
    a, b = Given(torch.ones(3, 1)), Given(torch.full((3, 1), 3.0))  # one number: no distribution
    assert float(divergence(b, answer(a))) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("before", "after", "gained"),
    [
        *((3.0, 3.0 * (1 - share * LEAST_GAIN), share > 1) for share in (-2.0, -0.5, 0.5, 2.0)),
        (-9e-9, -9e-9, False),
        (9e-9, 0.0, False),
        (0.1, 0.09, True),
    ],
)
def test_a_gain_is_more_than_the_margin_and_rounding(before: float, after: float, gained: bool) -> None:
    """Kernels that add in another order leave equal models some 1e-8 apart, of either sign."""
    report = PolishReport(before, after)
    assert report.gained is gained
    assert ("gains nothing" in report.verdict()) is not gained


@pytest.mark.parametrize(("family", "head"), [("llama", True), ("qwen2", False), ("gpt2", False)])
def test_a_new_lora_begins_along_the_gradient(family: str, head: bool) -> None:
    """It changes nothing; A's rows are orthonormal, and hold all of a gradient that has no more rows than they are."""
    model = tiny(next(case for case in ALL if case.family == family)).float() if family == "gpt2" else build(family)
    ids = torch.tensor([[3, 9, 4]])
    model.requires_grad_(True)
    (model(input_ids=ids).logits ** 2).sum().backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    before = model(input_ids=ids).logits.detach()
    trained = with_lora(model, 4, 0)
    initialise_along_gradient(trained, lambda: (trained(input_ids=ids).logits ** 2).sum().backward())
    assert_equal_up_to_rounding(trained(input_ids=ids).logits, before)
    layers = {name: module for name, module in model.named_modules() if getattr(module, "lora_A", None)}
    assert any("lm_head" in name for name in layers) is head
    for name, layer in layers.items():
        a, gradient = layer.lora_A["default"].weight.double(), wanted[f"{name}.weight"].double()
        gradient = gradient if gradient.shape[1] == a.shape[1] and not layer.fan_in_fan_out else gradient.mT
        torch.testing.assert_close(a @ a.mT, torch.eye(4, dtype=torch.float64), atol=1e-5, rtol=0)
        assert (gradient - gradient @ a.mT @ a).norm() <= 1e-4 * gradient.norm(), name  # three tokens: three rows


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid"])
def test_a_lora_leaves_out_what_kernels_read_past_it(family: str) -> None:
    trained = with_lora(tiny(next(case for case in ALL if case.family == family)).float(), 2, 0)
    adapted = {name.rpartition(".")[2] for name, module in trained.named_modules() if getattr(module, "lora_A", None)}
    assert {"in_proj", "q_proj"} <= adapted
    assert not {"out_proj", "conv1d"} & adapted


def test_a_lora_leaves_out_routers_that_give_more_than_their_product() -> None:
    model = tiny(next(case for case in ALL if case.family == "llama4")).float()
    ids = torch.tensor([[3, 9, 4]])
    before = model(input_ids=ids).logits
    assert_equal_up_to_rounding(with_lora(model, 2, 0)(input_ids=ids).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["answers", "state"])
def test_a_full_disk_leaves_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without place for answers nothing can be learned; without place for states training goes on."""
    models = [make("llama", tmp_path / "models" / name, seed=seed) for seed, name in enumerate("abc")]

    def full(tensors: object, path: str) -> None:
        if isinstance(tensors, list) and what == "state":
            return save(tensors, path)
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    save = torch.save
    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr("rotation_merge.run.ledger.SECONDS", 0.0)
    done = run(
        "polish", models[2], tmp_path / "out", "--teachers", *models[:2], models[0], "--samples", 4, "--length", 8
    )
    assert done.exit_code == (2 if what == "answers" else 0), done.output
    assert "no space left" in (done.output if what == "answers" else caplog.text).lower()
    assert {path.name for path in tmp_path.iterdir()} == {"models", *(["out"] if what == "state" else [])}


def test_answers_come_back_with_their_samples(tmp_path: Path) -> None:
    teacher = build("llama").eval()
    ids = torch.randint(40, (24, 8), generator=torch.Generator().manual_seed(0))
    write_answers(teacher, [{"input_ids": part} for part in ids.split(4)], tmp_path / "a.pt")
    samples = read_answers(tmp_path / "a.pt")
    assert torch.equal(torch.cat([batch["input_ids"] for batch, _ in samples]), ids)
    for batch, known in samples:
        assert all(torch.equal(known[name], x) for name, x in answer(teacher(**batch)).items())
