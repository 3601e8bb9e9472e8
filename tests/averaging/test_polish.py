"""Polish: a few steps towards the teachers' answers; answers on disk; nothing written where gains nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import hasten, parsed, run
from plugin_support import make, merged, state
from transformers import (
    AutoConfig,
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
    found = [make("llama", folder / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in found)
    with torch.no_grad():
        for mine, its in zip(first.parameters(), second.parameters(), strict=True):
            mine.copy_((8 * mine + its) / 2)
            its.mul_(8)
    second.save_pretrained(found[1])
    first.save_pretrained(folder / "merged")
    return [*found, folder / "merged"]


@pytest.mark.slow
def test_it_learns_and_is_resumed(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, merged = models
    flags = ("--teachers", a, "--samples", 24, "--length", 8, "--steps", 12, "--learning-rate", 0.002)
    done = parsed("polish", merged, tmp_path / "out", *flags)
    assert done["after"] < done["before"]
    hasten(monkeypatch)
    train, seen = torch.optim.AdamW.step, []

    def stop(self: torch.optim.AdamW, *arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == 7:
            raise KeyboardInterrupt
        return train(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    assert run("polish", merged, tmp_path / "again", *flags).exit_code != 0
    assert (tmp_path / "again.unfinished").exists()
    resumed = parsed("polish", merged, tmp_path / "again", *flags)
    assert len(seen) < 7 + 12
    assert resumed["before"] == pytest.approx(done["before"], rel=1e-6)
    for name, tensor in state(tmp_path / "again").items():
        torch.testing.assert_close(tensor, state(tmp_path / "out")[name], atol=1e-6, rtol=0)
    assert not (tmp_path / "again.unfinished").exists()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 20])
def test_any_number_of_steps(steps: int, models: list[Path]) -> None:
    a, _, merged = models
    ids = torch.randint(40, (8, 8), generator=torch.Generator().manual_seed(0))
    config = rm.PolishConfig(steps=steps, learning_rate=2e-3)
    samples = [{"input_ids": part} for part in ids.split(4)]
    before = state(merged)
    given = {name: tensor.clone() for name, tensor in before.items()}
    model_config = AutoConfig.from_pretrained(merged).to_dict()
    for model in (str(merged), (given, model_config)):
        view = rm.polish(model, [str(a)], samples, config)
        gains = "gains nothing" not in view.notes[-1]
        assert gains or steps == 1
        assert any(not torch.equal(view[name], tensor) for name, tensor in before.items()) == gains
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_command(models: list[Path], tmp_path: Path) -> None:
    a, b, merged = models
    flags = ("--teachers", a, b, "--samples", 8, "--steps", 6, "--length", 12)
    found = parsed("polish", merged, tmp_path / "out", *flags)
    assert found["after"] < found["before"]
    assert len(found["trials"]) == 3
    assert "**trained**" in (tmp_path / "out" / "README.md").read_text()
    assert state(tmp_path / "out").keys() == state(merged).keys()
    assert not (tmp_path / "out.unfinished").exists()
    again = parsed("polish", merged, tmp_path / "again", *flags)
    assert again["after"] == found["after"]


@pytest.mark.slow
def test_lora(models: list[Path], tmp_path: Path) -> None:
    a, b, merged = models
    flags = ("--teachers", a, b, "--samples", 8, "--steps", 6, "--length", 12, "--lora", 4, "--learning-rate", 0.01)
    assert run("polish", merged, tmp_path / "adapter", *flags).exit_code == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(merged))
    assert config["target_modules"] == sorted(config["target_modules"])
    assert run("polish", merged, tmp_path / "whole", *flags, "--merge-lora").exit_code == 0
    assert state(tmp_path / "whole").keys() == state(merged).keys()


@pytest.mark.slow
def test_models_of_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    """RecurrentGemma: no file says what its tensors are, and it keeps what it has read in a cache of its own."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "lru_width": 16}
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = RecurrentGemmaConfig(**sizes, intermediate_size=32, block_types=("recurrent", "attention"))
        RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path / str(seed))
    flags = ("--samples", 8, "--steps", 6, "--length", 8, "--learning-rate", 0.03)
    done = run("polish", tmp_path / "0", tmp_path / "out", "--teachers", tmp_path / "1", *flags)
    assert done.exit_code == 0, done.output
    assert state(tmp_path / "out").keys() == state(tmp_path / "0").keys()


@pytest.mark.parametrize(("mine", "its"), [(2, 5), (5, 2)])
def test_a_teacher_of_other_classes_is_refused(mine: int, its: int, tmp_path: Path) -> None:
    merged, teacher = (make("bert", tmp_path / str(n), seed=n, num_labels=n) for n in (mine, its))
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"input_ids": [i, i + 1, 7]}) for i in range(8)))
    flags = ("--teachers", teacher, "--data", tmp_path / "d.jsonl", "--samples", 8)
    done = run("polish", merged, tmp_path / "out", *flags)
    assert done.exit_code == 2
    assert f"answers have shape [2, {its}], the model's own [2, {mine}]" in done.output
    assert not list(tmp_path.glob("out*"))


def encoders(folder: Path, **parameters: Any) -> tuple[list[Path], list[Path], Path]:
    """Fine-tunes with heads of two and five classes, their data, and their merge with `heads_of: each`."""
    paths = [make("bert", folder / name, seed=seed, num_labels=n) for seed, (name, n) in enumerate(NAMED.items())]
    for number, path in enumerate(paths):
        model = AutoModelForSequenceClassification.from_pretrained(path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(path)
        rows = [json.dumps({"input_ids": [i + number, i + 1, 7]}) for i in range(4, 28)]
        (folder / f"{path.name}.jsonl").write_text("\n".join(rows))
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in paths]
    recipe = {"merge_method": "rotation_merge", "base_model": str(paths[0]), "models": models, "dtype": "float32"}
    recipe["parameters"] = {"delegate": "linear", "heads_of": "each", **parameters}
    merged(recipe, folder / "merged")
    return paths, [folder / f"{path.name}.jsonl" for path in paths], folder / "merged"


NAMED = {"two": 2, "five": 5}
"""Numbers of classes of fine-tunes."""


@pytest.mark.slow
def test_teachers_with_heads_of_their_own(tmp_path: Path) -> None:
    """One body comes nearer to every teacher, each head on its own teacher's samples; the merge's own head stays."""
    teachers, data, before = encoders(tmp_path)
    five = ("--teachers", teachers[1], "--data", data[1])
    flags = ("--samples", 24, "--steps", 12, "--learning-rate", 0.003)
    out = tmp_path / "out"
    done = parsed("polish", before, out, "--teachers", *teachers, "--data", *data, *flags)
    assert done["after"] < done["before"]
    body = state(out)
    headed, earlier = (state(folder / "heads" / "five") for folder in (out, before))
    assert headed["classifier.weight"].shape[0] == NAMED["five"]
    assert not torch.equal(headed["classifier.weight"], earlier["classifier.weight"])
    assert not torch.equal(body["classifier.weight"], state(before)["classifier.weight"])  # the base's, a teacher, too
    shared = [name for name in headed if not name.startswith("classifier")]
    assert all(torch.equal(headed[name], body[name]) for name in shared)
    assert any(not torch.equal(headed[name], earlier[name]) for name in shared)
    only = tmp_path / "only"
    parsed("polish", before, only, *five, *flags)
    assert torch.equal(state(only)["classifier.weight"], state(before)["classifier.weight"])
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.003, 1e-12])
def test_python_polishes_under_the_heads_of_a_folder_as_the_command_does(rate: float, tmp_path: Path) -> None:
    """The same verdict, and the same files are written; where nothing is gained, the merge with its heads as it was."""
    teachers, data, before = encoders(tmp_path)
    flags = ("--samples", 24, "--steps", 12, "--learning-rate", rate)
    done = run("polish", before, tmp_path / "out", "--teachers", *teachers, "--data", *data, *flags)
    config = rm.PolishConfig(samples=24, steps=12, learning_rate=rate)
    view = rm.polish(before, teachers, list(data), config)
    wanted = tmp_path / "out" if done.exit_code == 0 else before
    assert (wanted == before) == (rate < 1e-6)
    assert view.notes[-1].lower() == done.output.splitlines()[-2].rstrip(".").lower()
    assert set(view.heads) == {"five"}  # the base's is the merge's own
    view.save_pretrained(tmp_path / "python")
    for place in (".", "heads/five"):
        expected, found = (state(path / place) for path in (wanted, tmp_path / "python"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loss = rm.evaluate(view.heads["five"], [{"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([4])}])
    assert loss["loss"] > 0


@pytest.mark.slow
def test_python_merges_and_polishes_under_the_heads_of_all(tmp_path: Path) -> None:
    """As a recipe and the polish of its folder do; a polished view still has its heads."""
    teachers, data, before = encoders(tmp_path, attention="none", heads="none", ffn="none", scaling=False)
    view = rm.average(teachers, heads_of="each")
    view.save_pretrained(tmp_path / "python")
    for place in (".", "heads/five"):
        expected, found = state(before / place), state(tmp_path / "python" / place)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    config, sources = rm.PolishConfig(samples=24, steps=4, learning_rate=0.003), list(data)
    first, second = (rm.polish(merge, teachers, sources, config) for merge in (view, before))
    assert set(first.heads) == set(second.heads) == {"five"}
    assert set(rm.polish(first, teachers, sources, config).heads) == {"five"}
    module = AutoModelForSequenceClassification.from_pretrained(teachers[1])
    with pytest.raises(rm.RotationMergeError, match="a teacher in memory has no name"):
        rm.polish(view, [teachers[0], module], sources, config)


def test_heads_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    """One LoRA for several heads, and teachers of one name; by the command and in Python."""
    teachers, data, before = encoders(tmp_path)
    again = make("bert", tmp_path / "other" / "five", seed=3, num_labels=5)
    cases = [
        (teachers, data, {"lora": 2}, "one LoRA cannot hold them"),
        ([teachers[1], again], data[1:], {}, "two teachers are called 'five'"),
    ]
    for named, files, options, words in cases:
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        done = run("polish", before, tmp_path / "out", "--teachers", *named, "--data", *files, *flags)
        assert done.exit_code == 2
        assert words in done.output
        with pytest.raises(rm.RotationMergeError, match=words):
            rm.polish(before, named, files if len(files) > 1 else files[0], rm.PolishConfig(**options))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_nothing_gained_writes_nothing(models: list[Path], tmp_path: Path) -> None:
    a = models[0]
    copy = make("llama", tmp_path / "copy", seed=0)
    done = run("polish", copy, tmp_path / "out", "--teachers", a, "--samples", 32, "--steps", 2, "--length", 12)
    assert done.exit_code == 1, done.output
    assert "gains nothing" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--teachers", "nowhere"), "no such directory"),
        (("--teachers", "A", "--data", "nowhere.txt"), "no such file"),
        (("--teachers", "A", "--samples", 2, "--data", "self", "self"), "give --data once"),
        (("--teachers", "A", "--data", "one.jsonl"), "too few to hold one out"),
        (("--teachers", "A", "wider", "--samples", 4), "says which tokens are the same"),
        (("--teachers", "A", "--samples", 4, "--learning-rate", "1e30", "--length", 8), "training gives NaN"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...],
    expected: str,
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"input_ids": [3, 4, 5, 6]}\n')
    if "wider" in arguments:
        make("llama", Path("wider"), vocab_size=50)
    done = run("polish", models[2], "out", *(models[0] if x == "A" else x for x in arguments))
    assert done.exit_code == 2
    assert expected in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("out*"))


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
    found = json.loads(run("polish", tmp_path / "merged", tmp_path / "out", *flags).stdout)
    assert len(found["trials"]) > 3
    assert found["rate"] < 2e-4
    assert found["trials"][f"{found['rate']:g}"] < found["trials"]["0.0002"]


@pytest.mark.slow
def test_a_teachers_classes_are_those_of_the_same_names(tmp_path: Path) -> None:
    """A teacher whose classes stand in another order teaches the same, in Python and by the command."""
    model = AutoModelForSequenceClassification.from_pretrained(make("bert", tmp_path / "a", seed=0, num_labels=3))
    model.config.id2label, model.config.label2id = dict(enumerate("xyz")), {n: i for i, n in enumerate("xyz")}
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    model.save_pretrained(tmp_path / "teacher")
    order = [2, 0, 1]
    names = ["xyz"[i] for i in order]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter[order])
    model.save_pretrained(tmp_path / "turned")
    samples = [{"input_ids": torch.tensor([[i, i + 1, 7]])} for i in range(4, 28)]
    for teacher in ("teacher", "turned"):
        view = rm.polish(tmp_path / "teacher", [tmp_path / teacher], samples, rm.PolishConfig(steps=2))
        assert view.notes[-1].startswith("polishing gains nothing: ")
        assert float(view.notes[-1].split()[3]) < 1e-5
        labelled = [{**batch, "labels": torch.tensor([1])} for batch in samples]
        curve = rm.barrier(tmp_path / "teacher", tmp_path / teacher, labelled, rm.BarrierConfig(points=3))
        assert curve.loss == pytest.approx([curve.loss[0]] * 3, rel=1e-4)
