"""Learned matching: elements stay in their groups, functions are kept, nothing gets worse, files reach mergekit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_support import CHECKPOINTS, digits, hasten, parsed
from cli_support import app as command
from click.testing import CliRunner
from transformers import AutoModelForImageClassification, LlamaConfig, LlamaForCausalLM

from rotation_merge import AlignConfig, FitConfig, RotationMergeError, evaluate, fit

VITS = [CHECKPOINTS / name for name in ("vit-0", "vit-1")]


@pytest.fixture(autouse=True)
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


def stop_at(step: int) -> Callable[..., None]:
    """A watcher that interrupts a fit."""

    def watch(done: int, *_: object) -> None:
        if done == step:
            raise KeyboardInterrupt

    return watch


@pytest.fixture(scope="module")
def vits():
    return [AutoModelForImageClassification.from_pretrained(path, dtype=torch.float32) for path in VITS]


def batches(count: int, labels: bool, size: int = 32) -> list[dict[str, torch.Tensor]]:
    pixels, classes, _, _ = digits()
    made = []
    for i in range(0, count, size):
        extra = {"labels": classes[i : i + size]} if labels else {}
        made.append({"pixel_values": pixels[i : i + size], **extra})
    return made


def tiny_llama(seed: int, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **kwargs})).eval()


def token_batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 40, (4, 12), generator=generator)} for _ in range(count)]


@pytest.fixture(scope="module")
def learned(vits):
    return fit(vits[0], vits[1], batches(128, labels=True), options=FitConfig(steps=24))


@pytest.mark.slow
def test_learning_lowers_the_loss_between_the_models(learned):
    assert learned.report.after < 0.7 * learned.report.before
    assert learned.report.after < 0.7 * learned.report.unaligned
    assert learned.report.barrier_after < learned.report.barrier_before


@pytest.mark.slow
def test_the_donors_function_is_kept(vits, learned):
    _, _, pixels, _ = digits()
    moved = learned.alignments[0].apply(vits[1]).to_module()
    with torch.no_grad():
        found, expected = (model(pixel_values=pixels[:64]).logits for model in (moved, vits[1]))
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.slow
def test_learned_elements_are_inside_their_groups(learned):
    transforms = learned.alignments[0].transforms
    heads = [transform for name, transform in transforms.items() if name.endswith("attn")]
    stream = transforms["residual"].elements["map"].matrix[0]
    ones = torch.ones(len(stream), dtype=stream.dtype)
    torch.testing.assert_close(stream @ ones, ones, atol=1e-12, rtol=0)
    assert len(heads) > 1
    for matrix in (stream, *(head.elements[side].matrix for head in heads for side in ("qk", "vo"))):
        matrix = matrix / matrix.norm(dim=-1, keepdim=True)  # each head or RoPE pair has a scale of its own
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
        torch.testing.assert_close(matrix @ matrix.mT, eye, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_a_fit_is_deterministic_and_resumes_where_it_was(tmp_path: Path):
    models, data = [tiny_llama(seed) for seed in (0, 1)], token_batches(8)
    once = fit(*models, data, options=FitConfig(steps=6, start="matched"))
    state = tmp_path / "state"
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


def test_a_file_in_the_place_of_the_state_is_refused(tmp_path: Path):
    state = tmp_path / "state"
    state.write_bytes(b"nonsense")
    with pytest.raises(RotationMergeError, match="name a directory to write"):
        fit(tiny_llama(0), tiny_llama(1), token_batches(), options=FitConfig(steps=2, start="identity", state=state))
    assert state.read_bytes() == b"nonsense"


@pytest.mark.slow
def test_never_worse_than_the_start_and_says_when_nothing_was_found():
    anchor = tiny_llama(0)
    donor = tiny_llama(0)
    result = fit(anchor, donor, token_batches(), options=FitConfig(steps=6))
    assert result.report.after <= result.report.before
    assert "gains nothing" in result.report.verdict()


@pytest.mark.slow
def test_a_start_matched_on_samples(vits, tmp_path: Path):
    """Of the samples that are learned from; the start is another one than that of weights."""
    scores = {}
    for how in ("weights", "both"):
        given = ("--limit", 96, "--batch-size", 32, "--steps", 1, "--start", "matched", "--match-on", how)
        data = ("--data", "demo:digits", "--heads", "permutation")
        scores[how] = parsed("align", *VITS, "--learn", *given, *data, "--alignment", tmp_path / how)["learned"]
    assert scores["weights"]["before"] != scores["both"]["before"] < scores["both"]["unaligned"]
    reports = [
        fit(
            vits[0], vits[1], batches(64, labels=True), options=FitConfig(steps=1, start="matched", match_on=how)
        ).report
        for how in ("weights", "both")
    ]
    assert reports[0].before != reports[1].before < reports[1].unaligned


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_three_models_are_learned_jointly(tied: bool):
    models = [tiny_llama(seed, tie_word_embeddings=tied) for seed in (0, 1, 2)]
    match = AlignConfig(heads="permutation", residual="signed_permutation" if tied else "rotation")
    result = fit(models[0], models[1:], token_batches(), match, FitConfig(steps=8, objective="distill"))
    assert len(result.alignments) == 2
    assert result.report.after <= result.report.before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "labels"}, "needs data with labels"),
        ({"objective": "telepathy"}, "option 'objective' is 'telepathy'"),
    ],
)
def test_impossible_objectives_are_refused(vits, change, message):
    with pytest.raises(RotationMergeError, match=message):
        fit(vits[0], vits[1], batches(64, labels=False), options=replace(FitConfig(steps=1), **change))


def test_models_of_other_classes_are_refused(vits):
    with pytest.raises(RotationMergeError, match="only models of one architecture"):
        fit(vits[0], tiny_llama(0), batches(64, labels=False))
    with pytest.raises(RotationMergeError, match="two batches"):
        fit(vits[0], vits[1], batches(32, labels=False))


@pytest.mark.slow
def test_nothing_to_learn_is_said(vits):
    match = AlignConfig(attention="none", scaling=False, residual="permutation")
    with pytest.raises(RotationMergeError, match="nothing to learn"):
        fit(vits[0], vits[1], batches(64, labels=False), match, FitConfig(steps=1))


def test_a_fit_that_finds_nothing_stops_early():
    steps: list[int] = []
    same = tiny_llama(0)
    fit(
        same,
        tiny_llama(0),
        token_batches(),
        options=FitConfig(steps=48, patience=2),
        watch=lambda n, *_: steps.append(n),
    )
    assert steps[-1] == 8


@pytest.mark.slow
def test_the_groups_are_the_largest_if_none_are_named(learned):
    assert "residual: rotation" in learned.alignments[0].report.recipe


RECIPE = """
merge_method: rotation_merge
base_model: {anchor}
models:
  - model: {anchor}
    parameters: {{weight: 0.5}}
  - model: {donor}
    parameters: {{weight: 0.5{alignment}}}
parameters: {{delegate: linear{options}}}
dtype: float32
"""


@pytest.mark.slow
def test_from_recipe_to_merged_model_through_the_commands(tmp_path: Path):
    from mergekit.scripts.run_yaml import main

    anchor, donor = VITS
    file = tmp_path / "learned.safetensors"
    recipe = tmp_path / "recipe.yml"
    runner = CliRunner()
    groups = ["--heads", "permutation", "--residual", "rotation"]
    samples = ["--learn", "--data", "demo:digits", "--limit", "192", "--steps", "16"]
    fitted = runner.invoke(command, ["align", str(anchor), str(donor), *groups, *samples, "--alignment", str(file)])
    assert fitted.exit_code == 0, fitted.output
    assert file.exists()
    recipe.write_text(RECIPE.format(anchor=anchor, donor=donor, alignment=f", alignment: {file}", options=""))
    merged = runner.invoke(main, [str(recipe), str(tmp_path / "out"), "--quiet"])
    assert merged.exit_code == 0, merged.output
    told = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("nothing was matched. It was learned: held-out loss" in note for note in told["notes"])
    assert [tuple(one.values()) for one in told["data"]] == [(f"learning how {donor} is aligned", "demo:digits", 192)]
    assert evaluate(tmp_path / "out", "demo:digits")["accuracy"] > 0.6


OTHERS = {
    "seed": {"seed": 1},
    "rate": {"learning_rate": 0.01},
    "objective": {"objective": "distill"},
    "steps": {"steps": 3},
}


@pytest.mark.parametrize("other", [*OTHERS, "donor", "anchor", "data", "groups"])
def test_the_state_of_another_fit_is_not_taken(other: str, tmp_path: Path):
    """Whatever differs, the fit begins anew."""
    models, data = [tiny_llama(i) for i in range(2)], token_batches()
    options = FitConfig(steps=2, start="identity", state=tmp_path / "state")
    match = AlignConfig(heads="permutation")
    with pytest.raises(KeyboardInterrupt):
        fit(models[0], models[1], data, match, options, stop_at(2))
    seen: list[int] = []
    changed = replace(options, **OTHERS.get(other, {}))
    if other in ("donor", "anchor"):
        models[other == "donor"] = tiny_llama(7)
    if other == "data":
        data[-1] = {"input_ids": data[-1]["input_ids"].flip(0)}
    groups = AlignConfig() if other == "groups" else match
    fit(models[0], models[1], data, groups, changed, lambda done, *_: seen.append(done))
    assert seen[0] == 1


def test_the_state_of_the_same_fit_is_taken(tmp_path: Path):
    """Another limit of time, or checkpointing, is the same fit."""
    models, data = [tiny_llama(i) for i in range(2)], token_batches()
    options = FitConfig(steps=4, start="identity", state=tmp_path / "state")
    with pytest.raises(KeyboardInterrupt):
        fit(models[0], models[1], data, options=options, watch=stop_at(2))
    seen: list[int] = []
    again = replace(options, minutes=5.0, checkpointing=True)
    fit(models[0], models[1], data, options=again, watch=lambda done, *_: seen.append(done))
    assert seen == [3, 4]


def test_short_fits_write_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    options = FitConfig(steps=4, start="identity", state=tmp_path / "state")
    with pytest.raises(KeyboardInterrupt):
        fit(tiny_llama(0), tiny_llama(1), token_batches(), options=options, watch=stop_at(2))
    assert not (tmp_path / "state").exists()


def test_the_state_may_lie_in_a_new_folder_and_in_none_of_others(tmp_path: Path):
    models, options = (tiny_llama(0), tiny_llama(1)), FitConfig(steps=1, start="identity")
    assert fit(*models, token_batches(), options=replace(options, state=tmp_path / "new" / "state")).alignments
    (tmp_path / "diary").touch()
    with pytest.raises(RotationMergeError, match="rotation-merge did not write it"):
        fit(*models, token_batches(), options=replace(options, state=tmp_path))
