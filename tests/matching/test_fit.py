"""Learned matching: elements stay in their groups, functions are kept, nothing gets worse, files reach mergekit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import tqdm
from cli_support import CHECKPOINTS, digits, hasten, parsed, run
from click.testing import Result
from plugin_support import from_file, merged, recipe_for
from safetensors.torch import load_file, save_file
from test_measuring import tiny
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rotation_merge import AlignConfig, FitConfig, RotationMergeError, evaluate, fit
from rotation_merge.matching.between import LearnedTransforms, Mixture
from rotation_merge.matching.fit import _Fit, _pairs, along
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.objective import distillation, mix
from rotation_merge.matching.stream import random_gauge
from rotation_merge.run.functions import architecture_of

VITS = [CHECKPOINTS / name for name in ("vit-0", "vit-1")]
LOCAL = AlignConfig(attention="none", scaling=False, residual="permutation")


@pytest.fixture(autouse=True)
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


def stop_at(step: int) -> Callable[..., None]:
    """A watcher that interrupts a fit."""

    def watch(done: int, *_: object) -> None:
        if done == step:
            raise KeyboardInterrupt

    return watch


def at_once(done: int, *_: object) -> None:
    """A watcher that ends a fit with its first step."""
    raise RuntimeError(f"step {done}")


@pytest.fixture(scope="module")
def vits():
    return [AutoModelForImageClassification.from_pretrained(path, dtype=torch.float32) for path in VITS]


def batches(count: int, labels: bool = True, size: int = 32) -> list[dict[str, Tensor]]:
    pixels, classes, _, _ = digits()
    parts = (slice(i, i + size) for i in range(0, count, size))
    return [{"pixel_values": pixels[part], **({"labels": classes[part]} if labels else {})} for part in parts]


def tiny_llama(seed: int, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **kwargs})).eval()


def token_batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 40, (4, 12), generator=generator)} for _ in range(count)]


# --- what is learned


@pytest.fixture(scope="module")
def learned(vits):
    return fit(vits[0], vits[1], batches(128), options=FitConfig(steps=24))


@pytest.mark.slow
def test_learning_lowers_the_loss_and_keeps_function_and_groups(vits, learned):
    report, transforms, (_, _, pixels, _) = learned.report, learned.alignments[0].transforms, digits()
    assert report.after < 0.7 * min(report.before, report.unaligned)
    assert report.barrier_after < report.barrier_before
    assert "residual: rotation" in learned.alignments[0].report.recipe  # the largest group, as none is named
    moved = learned.alignments[0].apply(vits[1]).to_module()
    with torch.no_grad():
        found, expected = (model(pixel_values=pixels[:64]).logits for model in (moved, vits[1]))
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    heads = [transform for name, transform in transforms.items() if name.endswith("attn")]
    stream = transforms["residual"].elements["map"].matrix[0]
    torch.testing.assert_close(stream.sum(1), torch.ones(len(stream)).double(), atol=1e-12, rtol=0)
    assert len(heads) > 1
    for matrix in (stream, *(head.elements[side].matrix for head in heads for side in ("qk", "vo"))):
        matrix = matrix / matrix.norm(dim=-1, keepdim=True)  # each head or RoPE pair has a scale of its own
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
        torch.testing.assert_close(matrix @ matrix.mT, eye, atol=1e-12, rtol=0)


@pytest.mark.parametrize("heads", ["none", "permutation"])
def test_what_is_trained_is_what_is_stored(vits, heads: str):
    """At zero steps the start; then the differentiable transforms and the exact ones do the same."""
    architecture, generator = architecture_of(vits[0]), torch.Generator().manual_seed(1)
    state = {name: x.double() for name, x in vits[0].state_dict().items()}
    start = random_gauge(architecture, AlignConfig(heads=heads), generator)
    module, spaces = LearnedTransforms(architecture, start), architecture.spaces()
    for name, transform in module.final_transforms().items():
        assert architecture.widest_group(spaces[name], transform).admits(transform)
        for part, element in transform.elements.items():
            torch.testing.assert_close(element.matrices(), start[name].elements[part].matrices())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        soft = dict(moved_tensors(architecture, state, module()))
    hard = dict(moved_tensors(architecture, state, module.final_transforms()))
    for name, tensor in hard.items():
        torch.testing.assert_close(soft[name], tensor, atol=1e-5, rtol=1e-5)
        assert not name.endswith("q_proj.weight") or not torch.equal(tensor, state[name])


@pytest.mark.slow
def test_never_worse_than_the_start_and_says_when_nothing_was_found():
    result = fit(tiny_llama(0), tiny_llama(0), token_batches(), options=FitConfig(steps=6))
    assert result.report.after <= result.report.before
    assert "gains nothing" in result.report.verdict()


@pytest.mark.slow
def test_a_start_matched_on_samples(vits, tmp_path: Path):
    """Of the samples that are learned from, by the command and in Python; another start than that of weights."""
    scores = {}
    for how in ("weights", "both"):
        given = ("--limit", 96, "--batch-size", 32, "--steps", 1, "--start", "matched", "--match-on", how)
        data = ("--data", "demo:digits", "--heads", "permutation")
        scores[how] = [parsed("align", *VITS, "--learn", *given, *data, "--alignment", tmp_path / how)["learned"]]
        options = FitConfig(steps=1, start="matched", match_on=how)
        scores[how].append(fit(*vits, batches(64), options=options).report.to_dict())
    for weights, both in zip(scores["weights"], scores["both"], strict=True):
        assert weights["before"] != both["before"] < both["unaligned"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_three_models_are_learned_jointly(tied: bool):
    models = [tiny_llama(seed, tie_word_embeddings=tied) for seed in (0, 1, 2)]
    match = AlignConfig(heads="permutation", residual="signed_permutation" if tied else "rotation")
    result = fit(models[0], models[1:], token_batches(), match, FitConfig(steps=8, objective="distill"))
    assert len(result.alignments) == 2
    assert result.report.after <= result.report.before


def test_what_files_hold_once_is_learned_as_of_modules_that_share_it(tmp_path: Path):
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    modules, paths, histories = [], [tmp_path / "0", tmp_path / "1"], []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        modules.append(T5ForConditionalGeneration(config).eval())
        modules[seed].save_pretrained(path)
    data = [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in token_batches()]
    for models in (paths, modules, (modules[0], paths[1])):
        report = fit(*models, data, options=FitConfig(steps=1, objective="distill")).report
        histories.append([row[2] for row in report.history])
    assert histories[1:] == [pytest.approx(histories[0])] * 2


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda v: fit(*v, batches(64, False), options=FitConfig(steps=1, objective="labels")), "needs data with labels"),
    (lambda v: FitConfig(steps=1, objective="telepathy"), "option 'objective' is 'telepathy'"),
    (lambda v: fit(v[0], tiny_llama(0), batches(64, False)), "only models of one architecture"),
    (lambda v: fit(*v, batches(32, False)), "two batches"),
    (lambda v: fit(*v, batches(64, False), LOCAL, FitConfig(steps=1)), "nothing to learn"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_learned_is_refused(vits, call, message):
    with pytest.raises(RotationMergeError, match=message):
        call(vits)


# --- steps, and what they are judged by


@pytest.mark.parametrize(
    ("seeds", "options", "expected"),
    [((0, 0), FitConfig(steps=48, patience=2), [*range(1, 9)]), ((0, 1), FitConfig(steps=3), [1, 2, 3])],
    ids=["nothing is gained", "all steps"],
)
def test_a_fit_that_finds_nothing_stops_early(seeds: tuple[int, int], options: FitConfig, expected: list[int]):
    steps: list[int] = []
    fit(*map(tiny_llama, seeds), token_batches(), options=options, watch=lambda n, *_: steps.append(n))
    assert steps == expected


@pytest.mark.slow
def test_a_fit_looks_after_its_last_step_too():
    data = [{"input_ids": torch.arange(12).reshape(2, 6)}] * 2
    found = fit(tiny(0), tiny(1), data, options=FitConfig(steps=25, patience=12, start="identity"))
    assert [step for step, *_ in found.report.history] == [*range(0, 25, 2), 25]


def test_masked_positions_do_not_count_in_distillation():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 5, 7, generator=generator) for _ in range(2))
    mask, share = torch.tensor([[1, 1, 1, 0, 0]]), torch.tensor([0.0, 1.0])
    taught = [torch.zeros_like(teacher), teacher.softmax(-1)]
    short = distillation(SimpleNamespace(logits=student[:, :3]), [t[:, :3] for t in taught], share)
    torch.testing.assert_close(distillation(SimpleNamespace(logits=student), taught, share, mask), short)
    assert not torch.isclose(short, distillation(SimpleNamespace(logits=student), taught, share))


def test_mixes_are_convex_combinations():
    first, second = ({"x": x * torch.ones(n, 2), "y": y * torch.ones(n, 1)} for n, x, y in ((4, 0, 5), (3, 4, 2)))
    mixed = mix(first, second, torch.Generator().manual_seed(0))
    share = mixed["x"][:, :1] / 4
    assert mixed["x"].shape == (3, 2)
    assert bool(((share > 0) & (share < 1)).all())
    assert torch.equal(mixed["x"][:, 0], mixed["x"][:, 1])
    torch.testing.assert_close(mixed["y"], (1 - share) * 5 + share * 2)


@pytest.fixture(scope="module")
def a_fit() -> _Fit:
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(1, 12, (2, 6), generator=generator)} for _ in range(8)]
    models = [tiny(0), tiny(1)]
    return _Fit(_pairs(models, AlignConfig()), models[0], data, FitConfig(steps=1, held_out=0.25), lambda *_: None)


def test_held_out_batches_are_never_trained_on(a_fit: _Fit):
    assert len(a_fit.held_out) == 2
    assert sorted(a_fit.held_out + a_fit.training) == list(range(8))
    assert {a_fit._pick() for _ in range(200)} == set(a_fit.training)


def test_the_path_of_three_models_goes_from_the_anchor_over_their_mean_to_the_donors():
    found = torch.stack([along(point, 3) for point in (0.0, 0.25, 0.5, 0.75, 1.0)])
    torch.testing.assert_close(found[:, 0], torch.tensor([1, 2 / 3, 1 / 3, 1 / 6, 0]))
    torch.testing.assert_close(found[:, 1:], (1 - found[:, :1]).expand(5, 2) / 2)


def test_the_score_of_a_fit_measures_above_the_line_from_the_anchor_to_the_donor(a_fit: _Fit, monkeypatch):
    """Losses 0, 1, 2, 3, 10 along the path: above the straight line nothing is, at a quarter of it the most (-1.5)."""
    losses = dict(zip((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 1.0, 2.0, 3.0, 10.0), strict=True))
    monkeypatch.setattr(a_fit, "loss", lambda batch, answers, shares: torch.tensor(losses[float(shares[1])]))
    assert a_fit.score([{}]) == pytest.approx((2.0, 1.0 - 2.5))


# --- the state of an unfinished fit


@pytest.mark.slow
def test_a_fit_is_deterministic_and_resumes_where_it_was(tmp_path: Path):
    models, data, state = [tiny_llama(seed) for seed in (0, 1)], token_batches(8), tmp_path / "new" / "state"
    once = fit(*models, data, options=FitConfig(steps=6, start="matched"))
    options = FitConfig(steps=6, start="matched", state=state)
    with pytest.raises(KeyboardInterrupt):
        fit(*models, data, options=options, watch=stop_at(3))
    assert state.exists()
    again = fit(*models, data, options=options)
    assert not state.exists()
    assert [row[2] for row in again.report.history] == [row[2] for row in once.report.history]
    for name, transform in once.alignments[0].transforms.items():
        for key, tensor in transform.tensors().items():
            assert torch.equal(tensor, again.alignments[0].transforms[name].tensors()[key])


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "seed": ({"seed": 1}, 1),
    "rate": ({"learning_rate": 0.01}, 1),
    "objective": ({"objective": "distill"}, 1),
    "steps": ({"steps": 4}, 1),
    **dict.fromkeys(("donor", "anchor", "data", "groups"), ({}, 1)),
    "time and checkpointing": ({"minutes": 5.0, "checkpointing": True}, 3),
}
"""What differs in the second fit, and the step that it is interrupted at, the first that it takes."""


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_fit_is_not_taken(other: str, tmp_path: Path):
    """Whatever differs, the fit begins anew; another limit of time, or checkpointing, is the same fit."""
    models, data = [tiny_llama(i) for i in range(2)], token_batches()
    options = FitConfig(steps=3, start="identity", state=tmp_path / "state")
    match = AlignConfig(heads="permutation")
    with pytest.raises(KeyboardInterrupt):
        fit(models[0], models[1], data, match, options, stop_at(2))
    if other in ("donor", "anchor"):
        models[other == "donor"] = tiny_llama(7)
    if other == "data":
        data[-1] = {"input_ids": data[-1]["input_ids"].flip(0)}
    groups, (changes, first) = AlignConfig() if other == "groups" else match, OTHERS[other]
    with pytest.raises(RuntimeError, match=f"step {first}$"):
        fit(models[0], models[1], data, groups, replace(options, **changes), at_once)


def test_short_fits_write_no_state_and_no_file_of_others_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models, options = (tiny_llama(0), tiny_llama(1)), FitConfig(steps=2, start="identity", state=tmp_path / "state")
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    with pytest.raises(KeyboardInterrupt):
        fit(*models, token_batches(), options=options, watch=stop_at(2))
    assert not (tmp_path / "state").exists()
    (tmp_path / "state").write_bytes(b"nonsense")
    for place, words in (("state", "name a directory to write"), ("", "rotation-merge did not write it")):
        with pytest.raises(RotationMergeError, match=words):
            fit(*models, token_batches(), options=replace(options, state=tmp_path / place))
    assert (tmp_path / "state").read_bytes() == b"nonsense"


# --- the command: models as people have them


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an adapter of the second and what it makes of that, and samples."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("anchor", "donor")):
        tiny_llama(seed).save_pretrained(folder / name)
        tiny_llama(seed).bfloat16().save_pretrained(folder / f"{name}-half")
        tiny_llama(seed).bfloat16().float().save_pretrained(folder / f"{name}-rounded")
    tuned = peft.get_peft_model(tiny_llama(1), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    tuned.save_pretrained(folder / "lora")
    tuned.merge_and_unload().save_pretrained(folder / "tuned")
    save_file({"input_ids": torch.cat([batch["input_ids"] for batch in token_batches(2)])}, folder / "data.safetensors")
    return folder


def by_command(models: Path, out: Path, *names: str, options: str = "") -> Result:
    data = ["--data", str(models / "data.safetensors"), "--batch-size", "4", "--steps", "2"]
    paths = ["+".join(str(models / part) for part in name.split("+")) for name in names]
    return run("align", *paths, "--learn", *data, "--alignment", out, *options.split())


def file_of(models: Path, out: Path, *names: str, options: str = "") -> dict[str, Tensor]:
    result = by_command(models, out, *names, options=options)
    assert result.exit_code == 0, result.output
    return load_file(out)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_donor_with_an_adapter_is_the_donor_that_it_makes(models: Path, tmp_path: Path) -> None:
    found, wanted = (
        file_of(models, tmp_path / name.rpartition("+")[2], "anchor", name, options="--residual rotation")
        for name in ("donor+lora", "tuned")
    )
    same(found, wanted)
    recipe = from_file(
        recipe_for("linear", models / "anchor", f"{models / 'donor'}+{models / 'lora'}"), tmp_path / "lora"
    )
    for entry, weight in zip(recipe["models"], (0.0, 1.0), strict=True):
        entry["parameters"]["weight"] = weight
    merged(recipe, tmp_path / "out")
    verified = run("verify", tmp_path / "out", models / "tuned")
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_models_stay_in_the_type_that_they_are_stored_in(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless numbers would change: what is learned is what models of the same numbers in float32 learn."""
    held, stock = list[list[set[torch.dtype]]](), Mixture.__init__

    def watched(self: Mixture, architecture: Any, parents: Any, *arguments: Any) -> None:
        held.append([{tensor.dtype for tensor in parent.values()} for parent in parents])
        stock(self, architecture, parents, *arguments)

    monkeypatch.setattr(Mixture, "__init__", watched)
    options = "--start matched --match-on both"
    found, wanted = (
        file_of(models, tmp_path / kind, f"anchor-{kind}", f"donor-{kind}", options=options)
        for kind in ("half", "rounded")
    )
    same(found, wanted)
    assert held == [[{torch.bfloat16}] * 2, [{torch.float32}] * 2]


@pytest.mark.slow
def test_an_interrupted_command_continues(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, options = ("anchor", "donor"), "--steps 8 --residual rotation"
    whole = file_of(models, tmp_path / "whole.safetensors", *names, options=options)
    stock, out, updates = tqdm.tqdm.update, tmp_path / "out.safetensors", list[float]()

    def interrupted(bar: Any, steps: float = 1) -> Any:
        updates.append(steps)
        if len(updates) == 6:
            raise KeyboardInterrupt
        return stock(bar, steps)

    monkeypatch.setattr(tqdm.tqdm, "update", interrupted)
    assert by_command(models, out, *names, options=options).exit_code == 130
    assert (tmp_path / "out.safetensors.unfinished" / "state").exists()
    updates.clear()
    again = file_of(models, out, *names, options=options)
    assert len(updates) < 6
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.slow
def test_from_recipe_to_merged_model_through_the_commands(tmp_path: Path):
    file, groups = tmp_path / "learned.safetensors", ["--heads", "permutation", "--residual", "rotation"]
    samples = ["--learn", "--data", "demo:digits", "--limit", "192", "--steps", "16"]
    fitted = run("align", *VITS, *groups, *samples, "--alignment", file)
    assert fitted.exit_code == 0, fitted.output
    merged(from_file(recipe_for("linear", *VITS), file), tmp_path / "out")
    told = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("nothing was matched. It was learned: held-out loss" in note for note in told["notes"])
    assert [tuple(one.values()) for one in told["data"]] == [(f"learning how {VITS[1]} is aligned", "demo:digits", 192)]
    assert evaluate(tmp_path / "out", "demo:digits")["accuracy"] > 0.6
