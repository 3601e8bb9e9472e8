"""Learned matching: elements stay in their groups, functions are kept, nothing gets worse, files reach mergekit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from cli_support import CHECKPOINTS, digits, error_of, hasten, output_of, run
from plugin_support import build, from_file, lora, merged, recipe_for
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForImageClassification, T5Config, T5ForConditionalGeneration

from rotation_merge import AlignConfig, Alignment, FitConfig, fit
from rotation_merge.averaging.polish import PolishReport
from rotation_merge.cli.show import Progress
from rotation_merge.matching.between import LearnedTransforms, Mixture, mixed_model
from rotation_merge.matching.fit import _Fit, _pairs, along
from rotation_merge.matching.objective import distillation, mix
from rotation_merge.matching.training import Training
from rotation_merge.run.ledger import NOWHERE

FIRST = {case.family: case for case in reversed(tiny_models.ALL)}
SAMPLES = [{"input_ids": torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(n))} for n in range(4)]


@pytest.fixture(autouse=True)
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture(scope="module")
def vits() -> list[Any]:
    paths = (CHECKPOINTS / name for name in ("vit-0", "vit-1"))
    return [AutoModelForImageClassification.from_pretrained(path, dtype=torch.float32) for path in paths]


def batches(count: int) -> list[dict[str, Tensor]]:
    pixels, classes, _, _ = digits()
    parts = (slice(i, i + 32) for i in range(0, count, 32))
    return [{"pixel_values": pixels[part], "labels": classes[part]} for part in parts]


# --- the model between


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
def test_the_ends_are_the_parents_and_gradients_do_not_depend_on_what_is_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: the donor's end computes what the donor does, buffers that move and tied heads included."""
    again = partial(checkpoint, context_fn=lambda: (nullcontext(), tiny_models.keep_float64()))
    monkeypatch.setattr("rotation_merge.matching.between.checkpoint", again)
    case = FIRST[family]
    models = [tiny_models.make(case, seed) for seed in range(3)]
    groups = AlignConfig(heads="permutation", residual="largest")
    drawn = [Alignment.random(models[0], groups, seed=seed, untie=True) for seed in range(2)]
    architecture, batch = drawn[0].basis.architecture, tiny_models.inputs(case, models[0])
    learned = nn.ModuleList(LearnedTransforms(architecture, a.transforms) for a in drawn).double()
    gradients, expected = list[dict[str, Tensor]](), [tiny_models.outputs(model, batch) for model in models]
    with tiny_models.keep_float64():
        for keeps, checkpointing in ((True, False), (False, True)):
            states = [m.state_dict() for m in models]
            mixture = Mixture(architecture, states, drawn[0].folded, torch.device("cpu"), keeps)
            model, transforms = mixed_model(models[0], mixture, checkpointing), [module() for module in learned]
            for number, share in enumerate(torch.eye(3)):
                with torch.no_grad(), mixture.at(transforms, share):
                    outputs = dict(tiny_models.floating("", model(**batch)))
                assert_close({n: outputs[n] for n in expected[number]}, expected[number], rtol=1e-9, atol=1e-9)
            learned.zero_grad()
            with mixture.at(transforms, torch.tensor([0.5, 0.2, 0.3])):
                outputs = dict(tiny_models.floating("", model(**batch)))
                assert keeps or not mixture._mixed  # mixed weights are gone when the forward is done
                sum(x.square().sum() for x in outputs.values()).backward()
            gradients.append({n: p.grad.clone() for n, p in learned.named_parameters() if p.grad is not None})
    assert gradients[0]
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-9 * max(1.0, float(gradient.abs().max())))


# --- what is learned


@pytest.mark.slow
def test_learning_lowers_the_loss_and_keeps_function_and_groups(vits: Any) -> None:
    learned = fit(vits[0], vits[1], batches(128), options=FitConfig(steps=24))
    report, transforms, (_, _, pixels, _) = learned.report, learned.alignments[0].transforms, digits()
    assert report.after < 0.7 * min(report.before, report.unaligned)
    assert report.barrier_after < report.barrier_before
    assert "residual: rotation" in learned.alignments[0].report.recipe  # the largest group, as none is named
    moved = learned.alignments[0].apply(vits[1]).to_module()
    with torch.no_grad():
        found, expected = (model(pixel_values=pixels[:64]).logits for model in (moved, vits[1]))
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    stream = transforms["residual"].elements["map"].matrix[0]
    assert_close(stream.sum(1), torch.ones(len(stream)).double(), atol=1e-12, rtol=0)
    for matrix in (x for t in transforms.values() for name, x in t.tensors().items() if name.endswith("matrix")):
        gram = matrix @ matrix.mT  # each head or RoPE pair has a scale of its own
        assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), atol=1e-12, rtol=0)


def test_what_files_hold_once_is_learned_as_of_modules_that_share_it(tmp_path: Path) -> None:
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    modules, paths = [], [tmp_path / "0", tmp_path / "1"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        modules.append(T5ForConditionalGeneration(config).eval())
        modules[seed].save_pretrained(path)
    data = [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in SAMPLES]
    options = FitConfig(steps=1)
    results = [fit(*models, data, options=options) for models in (paths, modules, (modules[0], paths[1]))]
    histories = [[row[2] for row in result.report.history] for result in results]
    assert histories[1:] == [pytest.approx(histories[0])] * 2
    results[0].alignments[0].save(tmp_path / "file")
    assert Alignment.load(tmp_path / "file").transforms  # each is in its group


# --- steps, and what they are judged by


@pytest.mark.parametrize(
    ("seeds", "residual", "taken"),
    [((0, 0), "largest", 4), ((0, 1), "largest", 5), ((0, 1, 2), "rotation", 5), ((0, 1, 2), "signed_permutation", 5)],
)
def test_a_fit_looks_after_its_last_step_and_ends_early_where_nothing_is_gained(
    seeds: tuple[int, ...], residual: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so. Several donors are learned jointly, also where the head is tied; all models stay as they are.

    Also where mixed weights are not kept for a step.
    """
    monkeypatch.setattr("rotation_merge.matching.fit.LARGEST_KEPT", 0)
    for name in ("LOOKS", "PATIENCE"):
        monkeypatch.setattr(f"rotation_merge.matching.fit.{name}", 2)
    models = [build("llama", seed, tie_word_embeddings=residual == "signed_permutation") for seed in seeds]
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    match, seen = AlignConfig(heads="permutation", residual=residual), list[float]()
    options = {"options": FitConfig(steps=5), "progress": lambda _, done, __: seen.append(done)}
    result = fit(models[0], models[1:], SAMPLES, match, **options)
    assert (len(result.alignments), seen) == (len(seeds) - 1, [*range(1, taken + 1)])
    assert [step for step, *_ in result.report.history] == [0, 2, 4, 5][: taken - 1]
    assert result.report.after <= result.report.before
    assert ("gains nothing" in result.report.verdict()) == (seeds == (0, 0))
    assert_close([dict(model.state_dict()) for model in models], before, rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for model in models for p in model.parameters())


def test_the_best_state_is_kept() -> None:
    """Of three steps, each of which adds one, judged as 3, 1 and 2."""
    model, figures, report = nn.Linear(1, 1, bias=False), iter([3.0, 1.0, 2.0]), PolishReport(4.0, 4.0)
    nn.init.zeros_(model.weight).grad = -torch.ones(1, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0)
    steps = Training(model, optimiser, schedule, torch.Generator(), report, optimiser.step, lambda: (next(figures),))
    steps.run(3, 3, lambda _: None, NOWHERE)
    assert (model.weight.item(), report.after, report.best_step) == (2.0, 1.0, 2)


def test_masked_positions_do_not_count_in_distillation() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 5, 7, generator=generator) for _ in range(2))
    mask, share = torch.tensor([[1, 1, 1, 0, 0]]), torch.tensor([0.0, 1.0])
    taught = [torch.zeros_like(teacher), teacher.softmax(-1)]
    short = distillation(SimpleNamespace(logits=student[:, :3]), [t[:, :3] for t in taught], share)
    assert_close(distillation(SimpleNamespace(logits=student), taught, share, mask), short)
    assert not torch.isclose(short, distillation(SimpleNamespace(logits=student), taught, share))


def test_mixes_are_convex_combinations() -> None:
    first, second = ({"x": x * torch.ones(n, 2), "y": y * torch.ones(n, 1)} for n, x, y in ((4, 0, 5), (3, 4, 2)))
    mixed = mix(first, second, torch.Generator().manual_seed(0))
    share = mixed["x"][:, :1] / 4
    assert mixed["x"].shape == (3, 2)
    assert bool(((share > 0) & (share < 1)).all())
    assert_close(mixed["y"], (1 - share) * 5 + share * 2)


def test_a_path_and_the_score_along_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses 0, 1, 2, 3, 10 along the path: above the straight line nothing is, at a quarter of it the most (-1.5).

    The path of three models goes from the anchor over their mean to the donors. Held-out batches are never drawn;
    shares are fixed where that is asked for.
    """
    models, options = [build("llama", seed) for seed in (0, 1)], FitConfig(coefficients=(0.75, 0.25))
    fitting = _Fit(_pairs(models, AlignConfig()), models[0], 2 * SAMPLES, options, lambda *_: None)
    assert fitting.draw().tolist() == [0.75, 0.25]
    assert sorted(fitting.held_out + fitting.training) == list(range(8))
    assert (len(fitting.held_out), {fitting._pick() for _ in range(200)}) == (1, set(fitting.training))
    points = (0.0, 0.25, 0.5, 0.75, 1.0)
    losses = dict(zip(points, (0.0, 1.0, 2.0, 3.0, 10.0), strict=True))
    monkeypatch.setattr(fitting, "loss", lambda batch, answers, shares: torch.tensor(losses[float(shares[1])]))
    assert fitting.score([{}]) == pytest.approx((2.0, 1.0 - 2.5))
    path = torch.stack([along(point, 3) for point in points])
    assert_close(path[:, 0], torch.tensor([1, 2 / 3, 1 / 3, 1 / 6, 0]))
    assert_close(path[:, 1:], (1 - path[:, :1]).expand(5, 2) / 2)


# --- the state of an unfinished fit


def stopped(at: int, **given: Any) -> int:
    """The step that a fit is interrupted at: the first that it takes from this one on."""

    def progress(_: str, done: float, total: float) -> None:
        if done >= at:
            raise RuntimeError(int(done))

    with pytest.raises(RuntimeError) as error:
        fit(**given, progress=progress)
    return int(str(error.value))


OTHERS: dict[str, Callable[[FitConfig], dict[str, Any]]] = {
    "anchor": lambda _: {"anchor": build("llama", 7)},
    "donor": lambda _: {"donors": build("llama", 7)},
    "data": lambda _: {"batches": [*SAMPLES[:3], {"input_ids": SAMPLES[3]["input_ids"].flip(0)}]},
    "groups": lambda _: {"match": AlignConfig()},
    "rate": lambda options: {"options": replace(options, learning_rate=0.01)},
    "time and checkpointing": lambda options: {"options": replace(options, minutes=5.0, checkpointing=True)},
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_fit_is_not_taken(other: str, tmp_path: Path) -> None:
    """Whatever differs, the fit begins anew; another limit of time, or checkpointing, is the same fit."""
    options, match = FitConfig(steps=3, start="identity", state=tmp_path / "state"), AlignConfig(heads="permutation")
    given = {"anchor": build("llama"), "donors": build("llama", 1), "batches": SAMPLES, "match": match}
    assert stopped(2, **given, options=options) == 2
    assert stopped(1, **{**given, "options": options, **OTHERS[other](options)}) == (3 if "time" in other else 1)


# --- the command: models as people have them


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an adapter of the second and what it makes of that, and samples."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("anchor", "donor")):
        build("llama", seed).save_pretrained(folder / name)
        build("llama", seed).bfloat16().save_pretrained(folder / f"{name}-half")
        build("llama", seed).bfloat16().float().save_pretrained(folder / f"{name}-rounded")
    lora(folder / "lora", folder / "donor").merge_and_unload().save_pretrained(folder / "tuned")
    save_file({"input_ids": torch.cat([batch["input_ids"] for batch in SAMPLES])}, folder / "data.safetensors")
    return folder


def learned_by_command(models: Path, out: Path, *names: str, options: str = "", code: int = 0) -> dict[str, Tensor]:
    data = ["--data", str(models / "data.safetensors"), "--batch-size", "4", "--steps", "2", "--objective", "distill"]
    paths = ["+".join(str(models / part) for part in name.split("+")) for name in names]
    result = run("align", *paths, "--learn", *data, "--alignment", out, *options.split())
    assert result.exit_code == code, result.output
    return load_file(out) if code == 0 else {}


@pytest.mark.slow
def test_a_donor_with_an_adapter_is_the_donor_that_it_makes(models: Path, tmp_path: Path) -> None:
    """And recipes apply what was learned of it."""
    names = ("donor+lora", "tuned")
    learned = [learned_by_command(models, tmp_path / n[-4:], "anchor", n, options="--residual rotation") for n in names]
    assert_close(*learned, rtol=0, atol=1e-5)
    donor = f"{models / 'donor'}+{models / 'lora'}"
    recipe = from_file(recipe_for("linear", models / "anchor", donor), tmp_path / "lora")
    for entry, weight in zip(recipe["models"], (0.0, 1.0), strict=True):
        entry["parameters"]["weight"] = weight
    merged(recipe, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("nothing was matched. It was learned: " in note for note in report["notes"])
    data = (f"learning how {donor} is aligned", str(models / "data.safetensors"), 16)
    assert [tuple(used.values()) for used in report["data"]] == [data]
    output_of("verify", tmp_path / "out", models / "tuned")


@pytest.mark.slow
def test_models_stay_in_the_type_that_they_are_stored_in(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless numbers would change: what is learned is what models of the same numbers in float32 learn.

    From a start that is matched on the samples that are learned from: another than that of weights.
    """
    held, stock = list[list[set[torch.dtype]]](), Mixture.__init__

    def watched(self: Mixture, architecture: Any, parents: Any, *arguments: Any) -> None:
        held.append([{tensor.dtype for tensor in parent.values()} for parent in parents])
        stock(self, architecture, parents, *arguments)

    monkeypatch.setattr(Mixture, "__init__", watched)
    names = [("anchor-half", "donor-half"), ("anchor-rounded", "donor-rounded")]
    options = "--start matched --match-on both"
    learned = [learned_by_command(models, tmp_path / pair[0], *pair, options=options) for pair in names]
    assert_close(*learned, rtol=0, atol=1e-5)
    assert held == [[{torch.bfloat16}] * 2, [{torch.float32}] * 2]
    of_weights = learned_by_command(models, tmp_path / "of-weights", *names[1], options="--start matched")
    up = [tensors["layers.0.ffn|neurons.index"] for tensors in (learned[1], of_weights)]
    assert not torch.equal(*up)


@pytest.mark.slow
def test_an_interrupted_command_continues(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, options, out = ("anchor", "donor"), "--steps 8 --residual rotation", tmp_path / "out.safetensors"
    whole, steps = learned_by_command(models, tmp_path / "whole.safetensors", *names, options=options), list[float]()

    def interrupted(_: Progress, activity: str, done: float, total: float) -> None:
        if activity == "learning":
            steps.append(done)
        if len(steps) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", interrupted)
    learned_by_command(models, out, *names, options=options, code=130)
    assert (tmp_path / "out.safetensors.unfinished" / "state").exists()
    steps.clear()
    again = learned_by_command(models, out, *names, options=options)
    assert 0 < len(steps) < 6
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("place", ["match_on.match_model", "between.Mixture.tensor"])
def test_a_device_without_memory_is_one_line(
    place: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of matching or learning; no half-written file is left."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB")

    monkeypatch.setattr(f"rotation_merge.matching.{place}", full)
    data = ("--data", models / "data.safetensors", "--batch-size", "2")
    error = error_of("align", models / "anchor", models / "donor", "--learn", *data, "--alignment", tmp_path / "out")
    assert "the GPU ran out of memory" in error
    assert "match on another" in error
    assert not list(tmp_path.glob("out*"))
