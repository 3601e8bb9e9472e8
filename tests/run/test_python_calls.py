"""Measuring, judging, refitting and polishing from Python: modules, folders and views alike."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plugin_support import build
from transformers import PreTrainedModel

import rotation_merge as rm

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


def test_bad_samples_are_one_line(models) -> None:
    ids = SAMPLES[0]["input_ids"]
    for samples, words in [
        (ids, "are no batches"),
        ((batch for batch in [ids]), "are no batches"),
        ([{"input_ids": ids[:, :1]}], "no example has a label"),
        ([{"input_ids": ids, "labels": ids[:, 0]}], "labels have shape"),
        ([{"input_ids": ids, "attention_mask": ids[:, :3]}], "'attention_mask' has shape"),
        ([], "are no batches"),
        ([{"input_ids": "text"}], "not a tensor"),
        ([{"pixel_values": torch.zeros(1, 3, 4, 4)}], "takes input_ids"),
        ([{"input_ids": torch.tensor([[400]])}], "outside the model's vocabulary"),
        (__file__, "no tokenizer can be loaded"),
        ("missing.txt", "no such file"),
    ]:
        with pytest.raises(rm.RotationMergeError, match=words) as error:
            rm.evaluate(models[0], samples)
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of several shapes, and two adapters of the first."""
    where = tmp_path_factory.mktemp("folders")
    deep, tied = build("llama", num_hidden_layers=3), build("llama", tie_word_embeddings=True)
    for name, model in zip(("a", "b", "deep", "tied"), (*models, deep, tied), strict=True):
        model.save_pretrained(where / name)
    for name in ("one", "two"):
        lora = get_peft_model(copy.deepcopy(models[0]), LoraConfig(r=2, target_modules=["q_proj"]))
        lora.save_pretrained(where / name)
        settings = where / name / "adapter_config.json"
        settings.write_text(
            json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": str(where / "a")})
        )
    return where


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "more layers than there are": (lambda of: rm.align(of("a"), of("b"), layers="0-99"), "the model has no layer 2"),
    "models of other depth": (lambda of: rm.align(of("a"), of("deep")), "'slices'"),
    "bases of other depth": (lambda of: rm.transfer(of("deep"), of("deep"), of("a")), "another width or depth"),
    "layers that are to meet": (
        lambda of: rm.transfer(of("deep"), of("deep"), of("a"), layers_map="auto"),
        "there is no option 'layers_map'",
    ),
    "an adapter of another base": (lambda of: rm.transfer(of("one"), of("b"), of("a")), "name its own base"),
    "a method without its number": (lambda of: rm.average([of("a"), of("b")], "slerp"), "add 't'"),
    "groups beside the maps": (
        lambda of: rm.transfer(of("a"), of("a"), of("b"), alignment=rm.align(of("b"), of("a")), heads="permutation"),
        "'heads' has no effect beside 'alignment'",
    ),
    "a full folder": (lambda of: rm.merge([of("a"), of("b")], of("deep")), "write somewhere else"),
    "a module to merge": (lambda of: rm.merge([build("llama"), of("b")], of("new")), "give names, of folders"),
    "adapters of a base that is not here": (
        lambda of: rm.merge([of("one"), of("two")], of("new"), config=rm.MergeConfig(base=of("gone"))),
        "no such directory",
    ),
    "weights of adapters that are words": (
        lambda of: rm.merge_adapters([of("one"), of("two")], weights=["x", 1]),  # type: ignore[list-item]
        "give one number for each adapter",
    ),
    "a full folder for an adapter": (
        lambda of: rm.transfer(of("one"), of("a"), of("b")).save_pretrained(of("tied")),
        "already exists",
    ),
    "a full folder for merged adapters": (
        lambda of: rm.merge_adapters([of("one"), of("two")]).save(of("tied")),
        "already exists",
    ),
    "data that nobody writes": (lambda of: rm.evaluate(of("a"), "synthetic"), "'synthetic' is for image models"),
    "steps of training without training": (
        lambda of: rm.transfer(of("a"), of("a"), of("b"), steps=4),
        "carrying by weights takes no steps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_in_words_of_python(name: str, folders: Path) -> None:
    """One line, which names no option as the command line spells it; what lies in a folder stays."""
    call, words = WRONG[name]
    before = {path: path.read_bytes() for path in folders.rglob("*") if path.is_file()}
    with pytest.raises(rm.RotationMergeError) as error:
        call(lambda part: str(folders / part))
    told = str(error.value)
    assert words in told
    assert "\n" not in told
    assert "--" not in re.sub(r"\(the command .* with --force\)", "", told)
    assert {path: path.read_bytes() for path in folders.rglob("*") if path.is_file()} == before


def test_too_few_samples_name_the_teacher(models) -> None:
    with pytest.raises(rm.RotationMergeError, match=r"^teacher 1: 1 batches of samples are too few"):
        rm.polish(rm.average(models), models, [{"input_ids": SAMPLES[0]["input_ids"][:1]}])


def test_a_search_takes_paths_and_refuses_the_rest_in_one_line(models, tmp_path: Path) -> None:
    place = tmp_path / "model"
    models[0].save_pretrained(place)
    for given, words in [
        (([place, place], tmp_path / "out"), "is named twice"),
        ((models, tmp_path / "out"), "one model is of type LlamaForCausalLM; give names"),
        (([place, tmp_path], tmp_path / "out", SAMPLES), "one data source is of type dict; give names"),
        ((place, tmp_path / "out"), "one PosixPath stands where models belong"),
    ]:
        with pytest.raises(rm.RotationMergeError, match=words):
            rm.merge(*given)
