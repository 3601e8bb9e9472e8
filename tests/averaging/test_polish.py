"""Polish: a few steps towards the teachers' answers; answers on disk; nothing written where gains nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import hasten, output_of, parsed, run, stop_training
from plugin_support import make, merged, recipe_for, state, write_state
from test_labels import MOVED, NAMES, of_head, renamed, reordered
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import rotation_merge as rm


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two teachers, and their average."""
    folder = tmp_path_factory.mktemp("polish")
    first, second = (make("llama", folder / name, seed=seed) for seed, name in enumerate(("a", "small")))
    a, b = state(first), state(second)
    large = write_state({name: 8 * tensor for name, tensor in b.items()}, second, folder / "b")
    return [first, large, write_state({name: (8 * a[name] + b[name]) / 2 for name in a}, first, folder / "merged")]


@pytest.mark.slow
def test_it_learns_and_is_resumed(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, merge = models
    flags = ("--teachers", a, "--samples", 24, "--length", 8, "--steps", 12, "--learning-rate", 0.002)
    done = parsed("polish", merge, tmp_path / "out", *flags)
    assert done["after"] < done["before"]
    hasten(monkeypatch)
    steps = stop_training(monkeypatch, 7)
    assert run("polish", merge, tmp_path / "again", *flags).exit_code != 0
    (answers,) = (tmp_path / "again.unfinished").glob("answers-*.pt")
    answers.write_bytes(answers.read_bytes()[:100])  # damaged: the teacher answers again
    resumed = parsed("polish", merge, tmp_path / "again", *flags)
    assert len(steps) < 7 + 12
    assert resumed["before"] == pytest.approx(done["before"], rel=1e-6)
    torch.testing.assert_close(state(tmp_path / "again"), state(tmp_path / "out"), atol=1e-6, rtol=0)
    assert not (tmp_path / "again.unfinished").exists()


@pytest.mark.slow
@pytest.mark.parametrize("in_file", [True, False])
def test_answers_to_data_that_have_changed_are_not_taken_up(
    in_file: bool, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if batches in memory differ in the middle alone, which their text does not show."""
    data, config = tmp_path / "data.jsonl", rm.PolishConfig(samples=12, steps=4, learning_rate=0.002)
    for first in (3, 4):
        rows = [[7] * 100 + [first] + [7] * 99] * 12
        data.write_text("\n".join(json.dumps({"input_ids": row[97:103]}) for row in rows))
        samples = str(data) if in_file else [{"input_ids": torch.tensor(rows[:6])}] * 2
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            if first == 3:
                stop_training(patch, 2)
            rm.polish(models[2], [models[0]], samples, config, out=tmp_path / "out")
    assert "it is replaced" in caplog.text
    assert (tmp_path / "out").exists()


@pytest.mark.slow
def test_any_number_of_steps(models: list[Path]) -> None:
    """Of a stored model or one in memory, which stays as it is."""
    before, ids = state(models[2]), torch.randint(40, (8, 8), generator=torch.Generator().manual_seed(0))
    tensors, samples = state(models[2]), [{"input_ids": part} for part in ids.split(4)]
    stored = tensors, json.loads((models[2] / "config.json").read_text())
    for steps, model in ((1, str(models[2])), (3, stored)):
        view = rm.polish(model, [str(models[0])], samples, rm.PolishConfig(steps=steps, learning_rate=2e-3))
        gains = "gains nothing" not in view.notes[-1]
        assert gains or steps == 1
        assert any(not torch.equal(view[name], tensor) for name, tensor in before.items()) == gains
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_command(models: list[Path], tmp_path: Path) -> None:
    """All weights, twice the same; a LoRA, beside the model or in it."""
    a, b, merge = models
    flags = ("--teachers", a, b, "--samples", 8, "--steps", 6, "--length", 12)
    results = [parsed("polish", merge, tmp_path / out, *flags) for out in ("out", "again")]
    assert results[0]["after"] < results[0]["before"]
    assert results[1]["after"] == results[0]["after"]
    assert len(results[0]["trials"]) > 1
    assert "**trained**" in (tmp_path / "out" / "README.md").read_text()
    lora = (*flags, "--lora", 4, "--learning-rate", 0.01)
    assert run("polish", merge, tmp_path / "adapter", *lora).exit_code == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(merge))
    assert config["target_modules"] == sorted(config["target_modules"])
    assert run("polish", merge, tmp_path / "whole", *lora, "--merge-lora").exit_code == 0
    assert state(tmp_path / "out").keys() == state(tmp_path / "whole").keys() == state(merge).keys()


@pytest.mark.slow
def test_models_of_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    """RecurrentGemma: no file says what its tensors are, and it keeps what it has read in a cache of its own."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "lru_width": 16}
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = RecurrentGemmaConfig(**sizes, intermediate_size=32, block_types=("recurrent", "attention"))
        RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path / str(seed))
    flags = ("--samples", 8, "--steps", 6, "--length", 8, "--learning-rate", 0.03)
    output_of("polish", tmp_path / "0", tmp_path / "out", "--teachers", tmp_path / "1", *flags)
    assert state(tmp_path / "out").keys() == state(tmp_path / "0").keys()


@pytest.mark.slow
def test_lower_rates_are_tried_where_the_lowest_is_best(models: list[Path], tmp_path: Path) -> None:
    """The merge is much nearer to its teacher than a step at the usual rates goes, as pretrained models are."""
    teacher = AutoModelForCausalLM.from_pretrained(models[0])
    with torch.no_grad():
        teacher.lm_head.weight.mul_(300)
        teacher.save_pretrained(tmp_path / "teacher")
        draw = torch.Generator().manual_seed(0)
        for parameter in teacher.model.parameters():
            parameter.add_(2e-4 * torch.randn(parameter.shape, generator=draw))
    teacher.save_pretrained(tmp_path / "merged")
    flags = ("--teachers", tmp_path / "teacher", "--samples", 16, "--steps", 10, "--length", 12, "--json")
    result = json.loads(run("polish", tmp_path / "merged", tmp_path / "out", *flags).stdout)
    assert len(result["trials"]) > 3
    assert result["rate"] < 3e-4
    assert result["trials"][f"{result['rate']:g}"] < result["trials"]["0.0003"]


# --- heads and classes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path], Path]:
    """Fine-tunes with heads of two and five classes, their data, and their merge with `heads_of: each`."""
    folder, paths, data = tmp_path_factory.mktemp("encoders"), list[Path](), list[Path]()
    for number, (name, labels) in enumerate((("two", 2), ("five", 5))):
        small = make("bert", folder / f"small {name}", number, num_labels=labels)
        paths.append(write_state({key: 4 * tensor for key, tensor in state(small).items()}, small, folder / name))
        data.append(folder / f"{name}.jsonl")
        data[-1].write_text("\n".join(json.dumps({"input_ids": [i + number, i + 1, 7]}) for i in range(4, 28)))
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    merged(recipe_for("linear", *paths, heads_of="each", **still), folder / "merged")
    return paths, data, folder / "merged"


def states(folder: Path) -> list[dict[str, Tensor]]:
    return [state(folder / place) for place in (".", "heads/five")]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.003, 1e-12])
def test_teachers_with_heads_of_their_own(rate: float, encoders: Any, tmp_path: Path) -> None:
    """One body comes nearer to every teacher, each head on its own teacher's samples; in Python as by the command,
    from files as in memory. Where nothing is gained, the merge with its heads stays as it was."""
    teachers, data, before = encoders
    flags = ("--samples", 24, "--steps", 12, "--learning-rate", rate)
    done = run("polish", before, tmp_path / "out", "--teachers", *teachers, "--data", *data, *flags)
    gains = rate > 1e-6
    assert (done.exit_code == 0) == (tmp_path / "out").exists() == gains
    result = tmp_path / "out" if gains else before
    body, headed = states(result)
    shared = [name for name in headed if not name.startswith("classifier")]
    assert all(torch.equal(headed[name], body[name]) for name in shared)
    changed = [
        any(not torch.equal(after[name], x) for name, x in old.items())
        for after, old in zip((body, headed), states(before), strict=True)
    ]
    assert changed == [gains, gains]
    config = rm.PolishConfig(samples=24, steps=12, learning_rate=rate)
    view = rm.polish(before, teachers, list(data), config)
    assert view.notes[-1].lower() == done.output.splitlines()[-2].rstrip(".").lower()
    assert set(view.heads) == {"five"}  # the base's is the merge's own
    view.save_pretrained(tmp_path / "python")
    torch.testing.assert_close(states(tmp_path / "python"), states(result), atol=0, rtol=0)
    if gains:
        average = rm.average(teachers, heads_of="each")
        average.save_pretrained(tmp_path / "average")
        torch.testing.assert_close(states(tmp_path / "average"), states(before), atol=0, rtol=0)
        assert set(rm.polish(view, teachers, list(data), rm.PolishConfig(samples=24, steps=2)).heads) == {"five"}
        only = ("--teachers", teachers[1], "--data", data[1])
        assert run("polish", before, tmp_path / "only", *only, *flags).exit_code == 0
        assert torch.equal(states(tmp_path / "only")[0]["classifier.weight"], states(before)[0]["classifier.weight"])
        module = AutoModelForSequenceClassification.from_pretrained(teachers[1])
        with pytest.raises(rm.RotationMergeError, match="a teacher in memory has no name"):
            rm.polish(average, [teachers[0], module], list(data), config)
    assert not list(tmp_path.glob("*.unfinished"))


def test_heads_that_cannot_be_trained_are_refused(encoders: Any, tmp_path: Path) -> None:
    """One LoRA for several heads, by the command; and teachers of one name, in Python."""
    teachers, data, before = encoders
    words = ("polish", before, tmp_path / "out", "--teachers", *teachers, "--data", *data, "--lora", 2)
    assert "one LoRA cannot hold them" in output_of(*words, code=2)
    assert not list(tmp_path.glob("out*"))
    again = make("bert", tmp_path / "other" / "five", seed=3, num_labels=5)
    with pytest.raises(rm.RotationMergeError, match="two teachers are called 'five'"):
        rm.polish(before, [teachers[1], again], data[1], rm.PolishConfig())


@pytest.mark.slow
def test_a_teachers_classes_are_those_of_the_same_names(tmp_path: Path) -> None:
    """A teacher whose classes stand in another order teaches the same, and no barrier is in between."""
    small = make("bert", tmp_path / "small", num_labels=3)
    large = {name: 20 * x if name in of_head(()) else x for name, x in state(small).items()}
    turned = reordered(large, of_head(tuple(map(NAMES.index, MOVED))))
    merge = renamed(write_state(large, small, tmp_path / "merge"), NAMES)
    samples = [{"input_ids": torch.tensor([[i, i + 1, 7]])} for i in range(4, 28)]
    for teacher in (merge, renamed(write_state(turned, small, tmp_path / "turned"), MOVED)):
        view = rm.polish(merge, [teacher], samples, rm.PolishConfig(steps=2))
        assert view.notes[-1].startswith("polishing gains nothing: ")
        assert float(view.notes[-1].split()[3]) < 1e-5
        labelled = [{**batch, "labels": torch.tensor([1])} for batch in samples]
        curve = rm.barrier(merge, teacher, labelled, rm.BarrierConfig(points=3))
        assert curve.loss == pytest.approx([curve.loss[0]] * 3, rel=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", ["answers", "state"])
def test_a_full_disk_leaves_nothing(
    part: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without place for answers nothing can be learned; without place for states training goes on."""
    save = torch.save

    def full(tensors: object, path: str) -> None:
        if isinstance(tensors, list) and part == "state":
            return save(tensors, path)
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr("rotation_merge.run.ledger.SECONDS", 0.0)
    done = run("polish", models[2], tmp_path / "out", "--teachers", *models[:2], "--samples", 4, "--length", 8)
    assert done.exit_code == (2 if part == "answers" else 0), done.output
    assert "No space left" in (done.output if part == "answers" else caplog.text)
    assert caplog.text.count("after an interruption the run starts again") == (part == "state")
    assert {path.name for path in tmp_path.iterdir()} == ({"out"} if part == "state" else set())
