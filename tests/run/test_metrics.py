"""Figures of merit by hand and against scipy, and models measured by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import parsed, run
from plugin_support import make
from scipy import stats

from rotation_merge.run.evaluate import of_floats


@pytest.mark.parametrize("task", ["regression", "similarity"])
def test_correlations_agree_with_scipy(task: str, recwarn: pytest.WarningsRecorder):
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


def test_several_labels_an_example_by_hand():
    scores = of_floats(torch.tensor([[2.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "labels")
    assert scores.figures == {"accuracy": 0.75}


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
    assert found["accuracy"] == 1.0
    (found,) = parsed("evaluate", one, "--data", tmp_path / "numbers.jsonl")
    assert found["task"] == "regression"
    assert found["loss"] == pytest.approx(0.0, abs=1e-9)
    assert found["pearson"] == pytest.approx(1.0)
    assert found["spearman"] == pytest.approx(1.0)
    done = run("evaluate", several, "--data", tmp_path / "numbers.jsonl")
    assert done.exit_code == 2
    assert "one number for each output" in done.output
