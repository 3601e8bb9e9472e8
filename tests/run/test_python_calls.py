"""Measuring, judging, refitting and polishing from Python: modules, folders and views alike."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plugin_support import build, lora
from scipy import stats
from transformers import PreTrainedModel, ViTForImageClassification

import rotation_merge as rm
from rotation_merge.model.open import open_model
from rotation_merge.run.demo import CHECKPOINTS
from rotation_merge.run.evaluate import Curve, of_floats

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


@pytest.mark.parametrize(
    ("places", "losses", "barrier", "below"),
    [
        ([0.0, 0.5, 1.0], [1.0, 2.5, 3.0], 0.5, None),  # above the line, below the higher end
        ([0.0, 0.5, 1.0], [3.0, 2.5, 1.0], 0.5, None),
        ([0.0, 0.5, 1.0], [1.0, 1.5, 3.0], 0.0, "at 0.5 the loss is 0.5000 below the straight line between its ends"),
        ([0.0, 0.5, 1.0], [2.0, 2.0, 2.0], 0.0, None),
        ([0.0, 0.25, 1.0], [0.0, 2.0, 4.0], 1.0, None),
    ],
)
def test_the_barrier_stands_on_the_line_between_the_ends(
    places: list[float], losses: list[float], barrier: float, below: str | None
) -> None:
    curve = Curve("path", places, losses, [])
    assert curve.barrier() == pytest.approx(barrier)
    assert (curve.verdict() is None) if below is None else (below in (curve.verdict() or ""))


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


def test_refit_keeps_what_models_agree_on(models) -> None:
    same = rm.refit([models[0], copy.deepcopy(models[0])], SAMPLES, rm.RefitConfig(ridge=0.1))
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-3, atol=1e-4)


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


IDS = SAMPLES[0]["input_ids"]


@pytest.fixture(scope="module")
def s(models, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Models in memory, and in folders: of several shapes, and two adapters of the first; what is not there yet."""
    place = tmp_path_factory.mktemp("folders")
    deep, tied = build("llama", num_hidden_layers=3), build("llama", tie_word_embeddings=True)
    for name, model in zip(("a", "b", "deep", "tied"), (*models, deep, tied), strict=True):
        model.save_pretrained(place / name)
    for name in ("one", "two"):
        lora(place / name, copy.deepcopy(models[0]), base_model_name_or_path=str(place / "a"))
    names = ("a", "b", "deep", "tied", "one", "two", "gone", "new")
    return SimpleNamespace(place=place, models=models, m=models[0], **{name: str(place / name) for name in names})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: rm.align(s.a, s.b, layers="0-99"), "the model has no layer 2"),
        (lambda s: rm.align(s.a, s.deep), "'slices'"),
        (lambda s: rm.transfer(s.deep, s.deep, s.a), "another width or depth"),
        (lambda s: rm.transfer(s.one, s.b, s.a), "name its own base"),
        (lambda s: rm.transfer(s.a, s.a, s.b, alignment=rm.align(s.b, s.a), ffn="none"), "no effect beside"),
        (lambda s: rm.transfer(s.a, s.a, s.b, steps=4), "carrying by weights takes no steps"),
        (lambda s: rm.transfer(s.one, s.a, s.b).save_pretrained(s.tied), "already exists"),
        (lambda s: rm.average([s.a, s.b], "slerp"), "add 't'"),
        (lambda s: rm.merge([s.a, s.b], s.deep), "write somewhere else"),
        (lambda s: rm.merge([s.m, s.b], s.new), "one model is of type LlamaForCausalLM; give names"),
        (lambda s: rm.merge([s.a, s.b], s.new, SAMPLES), "one data source is of type dict; give names"),
        (lambda s: rm.merge([s.one, s.two], s.new, config=rm.MergeConfig(base=s.gone)), "no such directory"),
        (lambda s: rm.merge_adapters([s.one, s.two], weights=["x", 1]), "give one number for each adapter"),
        (lambda s: rm.merge_adapters([s.one, s.two]).save(s.tied), "already exists"),
        (lambda s: rm.polish(s.a, s.models, [{"input_ids": IDS[:1]}]), "teacher 1: 1 batches of samples"),
        (lambda s: rm.evaluate(s.a, "synthetic"), "'synthetic' is for image models"),
        (lambda s: rm.evaluate(s.m, IDS), "are no batches"),
        (lambda s: rm.evaluate(s.m, (batch for batch in [IDS])), "are no batches"),
        (lambda s: rm.evaluate(s.m, []), "are no batches"),
        (lambda s: rm.evaluate(s.m, [{"input_ids": "text"}]), "not a tensor"),
        (lambda s: rm.evaluate(s.m, [{"input_ids": IDS[:, :1]}]), "no example has a label"),
        (lambda s: rm.evaluate(s.m, [{"input_ids": IDS, "labels": IDS[:, 0]}]), "labels have shape"),
        (lambda s: rm.evaluate(s.m, [{"input_ids": IDS, "attention_mask": IDS[:, :3]}]), "'attention_mask' has shape"),
        (lambda s: rm.evaluate(s.m, [{"pixel_values": torch.zeros(1, 3, 4, 4)}]), "takes input_ids"),
        (lambda s: rm.evaluate(s.m, [{"input_ids": torch.tensor([[400]])}]), "outside the model's vocabulary"),
    ],
)
def test_a_wrong_call_is_one_line_in_words_of_python(
    call: Callable[[Any], Any], words: str, s: SimpleNamespace
) -> None:
    """Which names no option as the command line spells it; what lies in a folder stays."""
    before = {path: path.read_bytes() for path in s.place.rglob("*") if path.is_file()}
    with pytest.raises(rm.RotationMergeError, match=re.escape(words)) as error:
        call(s)
    assert "\n" not in str(error.value)
    assert "--" not in re.sub(r"\(the command .* with --force\)", "", str(error.value))
    assert {path: path.read_bytes() for path in s.place.rglob("*") if path.is_file()} == before
