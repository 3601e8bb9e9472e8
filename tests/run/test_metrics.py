"""Figures of merit by hand and against scikit-learn and scipy, and models measured by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import parsed, run
from plugin_support import make
from scipy import stats
from sklearn import metrics

from rotation_merge.run.evaluate import of_classes, of_labels, of_numbers


def test_classes_by_hand():
    found = of_classes(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]))
    assert found == pytest.approx(
        {"accuracy": 0.75, "macro_f1": (2 / 3 + 4 / 5) / 2, "micro_f1": 0.75, "matthews": 3**-0.5}
    )


def test_figures_agree_with_scikit_learn_and_scipy():
    draw = np.random.default_rng(0)
    predicted, labels = draw.integers(0, 5, 200), draw.integers(0, 4, 200)
    found = of_classes(torch.tensor(predicted), torch.tensor(labels))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    assert found["micro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="micro"))
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(labels, predicted))
    a, b = draw.integers(0, 2, (50, 4)).astype(bool), draw.integers(0, 2, (50, 4)).astype(bool)
    several = of_labels(torch.tensor(a), torch.tensor(b))
    assert several["macro_f1"] == pytest.approx(metrics.f1_score(b, a, average="macro"))
    assert several["micro_f1"] == pytest.approx(metrics.f1_score(b, a, average="micro"))
    x, y = draw.integers(0, 9, 100).astype(float), draw.normal(size=100)
    numbers = of_numbers(torch.tensor(x), torch.tensor(y))
    assert numbers["pearson"] == pytest.approx(stats.pearsonr(x, y)[0])
    assert numbers["spearman"] == pytest.approx(stats.spearmanr(x, y)[0])
    assert of_numbers(torch.ones(3), torch.arange(3.0)) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.slow
def test_models_with_classes_and_with_one_output(tmp_path: Path):
    """A file of its own for each task; the model's own answers as labels give full marks."""
    several, one = make("bert", tmp_path / "several", num_labels=3), make("bert", tmp_path / "one", num_labels=1)
    from plugin_support import load

    ids = torch.randint(3, 40, (12, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        classes = load(str(several))(input_ids=ids).logits.argmax(-1).tolist()
        numbers = load(str(one))(input_ids=ids).logits[:, 0].tolist()
    for name, labels in (("classes", classes), ("numbers", numbers)):
        lines = [
            json.dumps({"input_ids": row, "label": label}) for row, label in zip(ids.tolist(), labels, strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (found,) = parsed("evaluate", several, "--data", tmp_path / "classes.jsonl")
    assert found["task"] == "class"
    assert (found["accuracy"], found["macro_f1"], found["micro_f1"]) == (1.0, 1.0, 1.0)
    (found,) = parsed("evaluate", one, "--data", tmp_path / "numbers.jsonl")
    assert found["task"] == "regression"
    assert found["loss"] == pytest.approx(0.0, abs=1e-9)
    assert found["pearson"] == pytest.approx(1.0)
    assert found["spearman"] == pytest.approx(1.0)
    done = run("evaluate", several, "--data", tmp_path / "numbers.jsonl")
    assert done.exit_code == 2
    assert "one number for each output" in done.output
    assert "Pearson" in run("evaluate", one, "--data", tmp_path / "numbers.jsonl").output
