"""Measuring, judging, refitting and polishing from Python: modules, folders and views alike."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from plugin_support import build
from scipy import stats
from transformers import PreTrainedModel, ViTForImageClassification

import rotation_merge as rm
from rotation_merge.model.open import open_model
from rotation_merge.run.data import data_in_memory
from rotation_merge.run.demo import CHECKPOINTS
from rotation_merge.run.evaluate import Curve, margin, mean_error, of_floats, score

SAMPLES = [{"input_ids": torch.randint(40, (6, 10), generator=torch.Generator().manual_seed(n))} for n in range(8)]


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return build("llama").eval(), build("llama", seed=1).eval()


def loss(model: PreTrainedModel) -> float:
    with torch.no_grad():
        return sum(float(model(**batch, labels=batch["input_ids"]).loss) for batch in SAMPLES) / len(SAMPLES)


def test_evaluate_is_the_loss(models, tmp_path: Path) -> None:
    figures = rm.evaluate(models[0], SAMPLES)
    assert figures["loss"] == pytest.approx(loss(models[0]), rel=1e-5)
    models[0].save_pretrained(tmp_path / "model")
    assert rm.evaluate(str(tmp_path / "model"), SAMPLES) == pytest.approx(figures)
    assert rm.evaluate(rm.align(*models).apply(models[1]), SAMPLES)["loss"] == pytest.approx(loss(models[1]), rel=1e-4)


def test_padding_is_no_token_to_predict(models) -> None:
    ids = SAMPLES[0]["input_ids"]
    row = torch.zeros_like(ids)
    padded = [{"input_ids": torch.cat([ids, row], 1), "labels": torch.cat([ids, row - 100], 1)}]
    assert rm.evaluate(models[0], padded) == pytest.approx(rm.evaluate(models[0], SAMPLES[:1]))


def test_several_sets_have_a_mean_and_losses_an_error(models) -> None:
    """Errors are those of drawing samples again; of texts with other numbers of tokens, too."""
    (first, second), ids = models, SAMPLES[0]["input_ids"]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.4, -100)
    data = data_in_memory([{"input_ids": ids, "labels": labels}], first)
    scores, other = score(first, data), score(second, data)
    draws = np.random.default_rng(0).integers(len(ids), size=(400, len(ids)))
    again = [score(first, data.with_batches([{k: x[row] for k, x in data.batches[0].items()}])).loss for row in draws]
    assert fmean(scores.losses) == pytest.approx(scores.loss)
    assert mean_error([scores.losses]) == pytest.approx(stdev(again), rel=0.25)
    of_pairs = stdev(a - b for a, b in zip(scores.losses, other.losses, strict=True)) / len(ids) ** 0.5
    half = of_pairs / 2**0.5 * stats.t.ppf(0.975, 2 * len(ids) - 2)
    assert margin([scores.losses] * 2, [other.losses] * 2) == pytest.approx(half)
    assert mean_error([[1.0], [1.0, 2.0]]) is None
    rows = rm.evaluate([str(CHECKPOINTS / "llama-0")], ["demo:c", "demo:python"], rm.EvaluateConfig(limit=8))
    assert [(row["data"], row["examples"]) for row in rows] == [("demo:c", 8), ("demo:python", 8), ("mean of 2", 16)]
    for name in ("loss", "accuracy"):
        assert rows[2][name] == pytest.approx((rows[0][name] + rows[1][name]) / 2)
    assert rows[2]["error"] == pytest.approx((rows[0]["error"] ** 2 + rows[1]["error"] ** 2) ** 0.5 / 2)


@pytest.mark.parametrize("task", ["similarity", "regression", "labels"])
def test_errors_of_numbers_are_those_of_drawing_again(task: str) -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(200, 1, generator=draw)
    logits = truth + torch.randn(200, 1, generator=draw)
    truth = (truth > 0).float() if task == "labels" else truth
    scores, draws = of_floats(logits, truth, task), np.random.default_rng(0).integers(200, size=(300, 200))
    again = [of_floats(logits[rows], truth[rows], task).loss for rows in draws]
    assert fmean(scores.losses) == pytest.approx(scores.loss)
    assert mean_error([scores.losses]) == pytest.approx(stdev(again), rel=0.15)


def test_models_in_a_list_have_the_classes_of_the_first(tmp_path: Path) -> None:
    """In whatever form each of them is given; one name where several belong is refused."""
    first, order = CHECKPOINTS / "vit-0", [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    model = ViTForImageClassification.from_pretrained(first, dtype=torch.float32)
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data[order]
    names = [model.config.id2label[number] for number in order]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    second = shutil.copytree(first, tmp_path / "second")
    model.save_pretrained(second)
    config = rm.EvaluateConfig(limit=60)
    for models in ([str(first), str(second)], [first, open_model(second)], [open_model(first), second]):
        rows = rm.evaluate(models, ["demo:digits"], config)
        assert rows[0]["accuracy"] == rows[1]["accuracy"] > 0.9
    with pytest.raises(rm.RotationMergeError, match="give a list of samples"):
        rm.evaluate([first], "demo:digits", config)


def test_a_model_is_judged_in_its_own_dtype(models) -> None:
    """As it would be stored; a view in its own, not in that of the module that it was made of."""
    half = copy.deepcopy(models[0]).to(torch.bfloat16)
    moved = rm.Alignment.random(half).apply(half, dtype=torch.float32)
    for model in (half, rm.average([models[0]]).to(torch.bfloat16), moved):
        assert rm.evaluate(model, SAMPLES)["loss"] == pytest.approx(loss(copy.deepcopy(half).float()), rel=1e-5)
    assert {x.dtype for x in rm.average([moved]).to_module().parameters()} == {torch.float32}


def test_a_path_begins_and_ends_at_its_models(models) -> None:
    curve = rm.barrier(*models, SAMPLES, rm.BarrierConfig(points=3))
    assert curve.loss[0] == pytest.approx(loss(models[0]), rel=1e-5)
    assert curve.loss[-1] == pytest.approx(loss(models[1]), rel=1e-5)
    assert curve.loss[1] == pytest.approx(rm.evaluate(rm.average(models), SAMPLES)["loss"], rel=1e-5)
    assert curve.t == pytest.approx([0, 0.5, 1])
    data, between = data_in_memory(SAMPLES, models[0]), rm.average(models).to_module()
    first, middle, last = (score(model, data).losses for model in (models[0], between, models[1]))
    line = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
    assert curve.margins == pytest.approx([0, margin([middle], [line]), 0], rel=1e-3)


@pytest.mark.parametrize(
    ("places", "losses", "margin", "barrier", "above", "words"),
    [
        ([0.0, 0.5, 1.0], [1.0, 2.5, 3.0], 0.1, 0.5, 0.1, None),  # above the line, below the higher end
        ([0.0, 0.5, 1.0], [3.0, 2.5, 1.0], 0.1, 0.5, 0.1, None),
        ([0.0, 0.5, 1.0], [3.0, 2.5, 1.0], 0.6, 0.5, 0.6, "no clear barrier on the path, path: 0.5000 ± 0.6; give"),
        ([0.0, 0.5, 1.0], [3.0, 2.5, 1.0], None, 0.5, None, "no clear barrier on the path, path: 0.5000 ± an unknown"),
        ([0.0, 0.5, 1.0], [1.0, 1.5, 3.0], 0.1, 0.0, 0.0, "at 0.5 the loss is 0.5000 ± 0.1 below the straight"),
        ([0.0, 0.5, 1.0], [1.0, 1.5, 3.0], 0.6, 0.0, 0.1, "no clear barrier on the path, path: 0.0000 ± 0.1"),
        ([0.0, 0.5, 1.0], [2.0, 2.0, 2.0], 1e-7, 0.0, 1e-7, None),
        ([0.0, 0.25, 1.0], [0.0, 2.0, 4.0], 0.1, 1.0, 0.1, None),
    ],
)
def test_the_barrier_stands_on_the_line_between_the_ends(
    places: list[float],
    losses: list[float],
    margin: float | None,
    barrier: float,
    above: float | None,
    words: str | None,
) -> None:
    curve = Curve("path", places, losses, [], [0.0, margin, 0.0])
    assert (curve.barrier(), curve.margin()) == (pytest.approx(barrier), pytest.approx(above))
    assert (curve.verdict() is None) if words is None else (words in (curve.verdict() or ""))


@pytest.mark.parametrize("task", ["regression", "similarity"])
def test_correlations_agree_with_scipy(task: str, recwarn: pytest.WarningsRecorder) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 9, 100).astype(float), draw.normal(size=100)
    scores = of_floats(torch.tensor(x)[:, None], torch.tensor(y)[:, None], task)
    assert scores.figures["pearson"] == pytest.approx(stats.pearsonr(x, y)[0])
    assert scores.figures["spearman"] == pytest.approx(stats.spearmanr(x, y)[0])
    assert scores.loss == pytest.approx(np.square(x - y).mean() if task == "regression" else 1 - scores.main)
    for count in (3, 1):
        constant = of_floats(torch.ones(count, 1), torch.arange(float(count))[:, None], task)
        assert set(constant.figures.values()) == {0.0}
    assert not recwarn.list


def test_several_labels_an_example_by_hand() -> None:
    scores = of_floats(torch.tensor([[2.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "labels")
    assert scores.figures == {"accuracy": 0.75}


def test_a_models_own_answers_as_labels_give_full_marks() -> None:
    ids = torch.randint(3, 40, (12, 8), generator=torch.Generator().manual_seed(0))
    for classes, expected in ((3, {"accuracy": 1.0}), (1, {"pearson": 1.0, "spearman": 1.0})):
        model = build("bert", num_labels=classes).eval()
        logits = model(input_ids=ids).logits.detach()
        labels = logits[:, 0] if classes == 1 else logits.argmax(-1)
        figures = rm.evaluate(model, [{"input_ids": ids, "labels": labels}])
        assert {name: figures[name] for name in expected} == pytest.approx(expected)


@pytest.mark.slow
def test_samples_may_be_a_loader_or_a_generator(models) -> None:
    """Also where they are read more than once."""
    rows = [{"input_ids": row} for batch in SAMPLES for row in batch["input_ids"]]
    loader = torch.utils.data.DataLoader(rows, batch_size=6)
    assert rm.evaluate(models[0], loader) == pytest.approx(rm.evaluate(models[0], SAMPLES))
    narrow = ({"input_ids": batch["input_ids"].int()} for batch in SAMPLES)
    assert rm.evaluate(models[0], narrow) == pytest.approx(rm.evaluate(models[0], SAMPLES))
    again = rm.average(models, "regmean", samples=iter(SAMPLES))
    expected = rm.average(models, "regmean", samples=SAMPLES)
    assert all(torch.equal(tensor, again[name]) for name, tensor in expected.items())
    assert rm.fit(*models, iter(SAMPLES), options=rm.FitConfig(steps=1)).alignments
