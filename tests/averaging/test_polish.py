"""Polish: a few steps towards the teachers' answers; answers on disk; nothing written where gains nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_support import parsed, run
from peft import LoraConfig, get_peft_model
from plugin_support import build, make, merged, state
from rounding import assert_equal_up_to_rounding
from tiny_models import ALL
from tiny_models import make as tiny
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from rotation_merge.averaging.low_rank import initialise_along_gradient, with_lora
from rotation_merge.averaging.polish import LEAST_GAIN, PolishOptions, PolishReport, polish
from rotation_merge.matching.teachers import AnsweredSamples, answer, divergence, write_answers


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


def test_a_gain_is_more_than_the_margin() -> None:
    for share, gained in ((-2.0, False), (-0.5, False), (0.5, False), (2.0, True)):
        report = PolishReport(3.0, 3.0 * (1 - share * LEAST_GAIN))
        assert report.gained is gained
        assert ("gains nothing" in report.verdict()) is not gained


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


def test_it_learns_and_is_resumed(models: list[Path], tmp_path: Path) -> None:
    a, _, merged = models
    teacher, student = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (a, merged))
    ids = torch.randint(40, (24, 8), generator=torch.Generator().manual_seed(0))
    write_answers(teacher, [{"input_ids": part} for part in ids.split(4)], tmp_path / "a.safetensors", "mark")
    answered = [AnsweredSamples(tmp_path / "a.safetensors")]
    assert (answered[0].count, answered[0].mark) == (6, "mark")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    done = polish(student, answered, PolishOptions(12, rates=(2e-3,)))
    assert done.gained
    assert done.after < done.before
    assert 0 < done.best_step <= 12
    whole = {name: tensor.clone() for name, tensor in student.state_dict().items()}

    student.load_state_dict(before)
    options = PolishOptions(12, rates=(2e-3,), state=tmp_path / "state.pt")

    def stop(what: str, step: int, _: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polish(student, answered, options, stop)
    again = AutoModelForCausalLM.from_pretrained(merged).eval()
    resumed = polish(again, answered, options)
    assert resumed.before == pytest.approx(done.before, rel=1e-6)
    assert resumed.best_step == done.best_step
    for name, tensor in again.state_dict().items():
        assert torch.allclose(tensor, whole[name], atol=1e-6), name
    assert not (tmp_path / "state.pt").exists()


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 20])
def test_any_number_of_steps(steps: int, models: list[Path], tmp_path: Path) -> None:
    a, _, merged = models
    teacher, student = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (a, merged))
    ids = torch.randint(40, (8, 8), generator=torch.Generator().manual_seed(0))
    write_answers(teacher, [{"input_ids": part} for part in ids.split(4)], tmp_path / "a.safetensors", "mark")
    done = polish(student, [AnsweredSamples(tmp_path / "a.safetensors")], PolishOptions(steps, rates=(2e-3,)))
    assert done.after < done.before


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


def test_lora(models: list[Path], tmp_path: Path) -> None:
    a, b, merged = models
    flags = ("--teachers", a, b, "--samples", 8, "--steps", 6, "--length", 12, "--lora", 4, "--learning-rate", 0.01)
    assert run("polish", merged, tmp_path / "adapter", *flags).exit_code == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(merged))
    assert config["target_modules"] == sorted(config["target_modules"])
    assert run("polish", merged, tmp_path / "whole", *flags, "--merge-lora").exit_code == 0
    assert state(tmp_path / "whole").keys() == state(merged).keys()


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


def test_a_new_lora_of_stacked_experts_begins_along_each_ones_gradient() -> None:
    """It changes nothing; every expert's rows of A are orthonormal, and hold its gradient where that has few rows."""
    model = tiny(next(case for case in ALL if case.family == "gpt_oss")).float().requires_grad_(True)
    ids = torch.tensor([[3, 9, 4]])
    (model(input_ids=ids).logits ** 2).sum().backward()
    wanted = model.model.layers[1].mlp.experts.down_proj.grad.clone()  # experts, in, out
    model.zero_grad()
    before = model(input_ids=ids).logits.detach()
    trained = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    initialise_along_gradient(trained, lambda: (trained(input_ids=ids).logits ** 2).sum().backward())
    assert_equal_up_to_rounding(trained(input_ids=ids).logits, before)
    layer = model.model.layers[1].mlp.experts
    rows = layer.lora_A["default"].weight.double().view(len(wanted), 4, -1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(4).double().expand(len(rows), 4, 4), atol=1e-5, rtol=0)
    reads = wanted.double().mT
    assert ((reads - reads @ rows.mT @ rows).norm(dim=(1, 2)) <= 1e-4 * reads.norm(dim=(1, 2))).all()


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


def encoders(folder: Path) -> tuple[list[Path], list[Path], Path]:
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
    recipe["parameters"] = {"delegate": "linear", "heads_of": "each"}
    merged(recipe, folder / "merged")
    return paths, [folder / f"{path.name}.jsonl" for path in paths], folder / "merged"


NAMED = {"two": 2, "five": 5}
"""Numbers of classes of fine-tunes."""


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


def test_one_lora_for_several_heads_is_refused(tmp_path: Path) -> None:
    teachers, data, before = encoders(tmp_path)
    done = run("polish", before, tmp_path / "out", "--teachers", *teachers, "--data", *data, "--lora", 2)
    assert done.exit_code == 2
    assert "one LoRA cannot hold them" in done.output
    assert not list(tmp_path.glob("out*"))


def test_teachers_of_one_name_are_refused(tmp_path: Path) -> None:
    teachers, data, before = encoders(tmp_path)
    again = make("bert", tmp_path / "other" / "five", seed=3, num_labels=5)
    flags = ("--teachers", teachers[1], again, "--data", data[1])
    done = run("polish", before, tmp_path / "out", *flags)
    assert done.exit_code == 2
    assert "two teachers are called 'five'" in done.output
    assert not list(tmp_path.glob("out*"))


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


@pytest.mark.parametrize("what", ["answers", "state"])
def test_a_full_disk_leaves_nothing(
    what: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: str, **_: object) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    place = {"answers": "matching.teachers", "state": "files.ledger"}[what]
    monkeypatch.setattr(f"rotation_merge.{place}.save_file", full)
    done = run(
        "polish", models[2], tmp_path / "out", "--teachers", *models[:2], models[0], "--samples", 4, "--length", 8
    )
    assert done.exit_code == 2
    assert "no space left" in done.output.lower()
    assert f"the {what}" in done.output or what == "answers"
    assert not list(tmp_path.iterdir())


def test_less_than_rounding_is_no_gain() -> None:
    """Kernels that add in another order leave equal models some 1e-8 apart, of either sign."""
    assert not PolishReport(-9e-9, -9e-9).gained
    assert not PolishReport(9e-9, 0.0, best_step=1).gained
    assert PolishReport(0.1, 0.09, best_step=1).gained


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
