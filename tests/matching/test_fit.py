"""Learned matching: elements stay in their groups, functions are kept, nothing gets worse, files reach mergekit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from cli_support import CHECKPOINTS
from cli_support import app as command
from click.testing import CliRunner
from rounding import assert_equal_up_to_rounding
from safetensors import safe_open
from transformers import AutoModelForImageClassification, LlamaConfig, LlamaForCausalLM

from rotation_merge import AlignConfig, FitConfig, RotationMergeError, fit
from rotation_merge.matching.engine import Path as ModelPath
from rotation_merge.matching.engine import checkpointed, renamed
from rotation_merge.matching.fit import LearnedTransforms, identities
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.match_on import activation_matcher
from rotation_merge.matching.objective import mix
from rotation_merge.model.source import transform_state
from rotation_merge.run.demo import digits
from rotation_merge.run.functions import architecture_of
from rotation_merge.symmetry import HeadTransform, Monomial, NeuronTransform, Orthogonal, StreamTransform


@pytest.fixture(scope="module")
def vits():
    return [
        AutoModelForImageClassification.from_pretrained(CHECKPOINTS / n, dtype=torch.float32)
        for n in ("vit-0", "vit-1")
    ]


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


def test_learning_lowers_the_loss_between_the_models(learned):
    assert learned.report.after < 0.7 * learned.report.before
    assert learned.report.after < 0.7 * learned.report.unaligned
    assert learned.report.barrier_after < learned.report.barrier_before


def test_the_donors_function_is_kept(vits, learned):
    _, _, pixels, _ = digits()
    path = ModelPath.between(
        vits[0],
        learned.architecture,
        vits[0].state_dict(),
        [vits[1].state_dict()],
        learned.alignments[0].folded,
        torch.device("cpu"),
    )
    for share, parent in ((0.0, vits[0]), (1.0, vits[1])):
        weights = path.weights([learned.alignments[0].transforms], torch.tensor([1 - share, share]))
        with torch.no_grad():
            moved = path.outputs(weights, {"pixel_values": pixels[:64]}).logits
            expected = parent(pixel_values=pixels[:64]).logits
        assert (moved - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_learned_elements_are_inside_their_groups(learned):
    seen = 0
    for transform in learned.alignments[0].transforms.values():
        if isinstance(transform, StreamTransform) and isinstance(transform.element, Orthogonal):
            matrix = transform.element.matrix[0]
            torch.testing.assert_close(
                matrix @ matrix.T, torch.eye(len(matrix), dtype=matrix.dtype), atol=1e-12, rtol=0
            )
            ones = torch.ones(len(matrix), dtype=matrix.dtype)
            torch.testing.assert_close(matrix @ ones, ones, atol=1e-12, rtol=0)
            seen += 1
        if isinstance(transform, HeadTransform):
            for element in (transform.qk, transform.vo):
                matrix = element.matrix  # type: ignore[attr-defined]
                eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
                torch.testing.assert_close(matrix @ matrix.mT, eye, atol=1e-12, rtol=0)
                seen += 1
    assert seen > 3


def test_a_fit_is_deterministic_and_resumes_where_it_was(tmp_path: Path):
    models, data = [tiny_llama(seed) for seed in (0, 1)], token_batches(8)
    once = fit(*models, data, options=FitConfig(steps=12, start="matched"))
    state = tmp_path / "state"

    def stop(done: int, total: int, figures: dict[str, float]) -> None:
        if done == 6:
            raise KeyboardInterrupt

    options = FitConfig(steps=12, start="matched", state=state)
    with pytest.raises(KeyboardInterrupt):
        fit(*models, data, options=options, watch=stop)
    assert state.exists()
    again = fit(*models, data, options=options)
    assert not state.exists()
    assert [row[2] for row in again.report.history] == [row[2] for row in once.report.history]
    for name, transform in once.alignments[0].transforms.items():
        for key, tensor in transform.tensors().items():
            assert torch.equal(tensor, again.alignments[0].transforms[name].tensors()[key])


def test_a_damaged_state_is_refused(vits, tmp_path: Path):
    state = tmp_path / "state"
    state.write_bytes(b"nonsense")
    with pytest.raises(RotationMergeError, match="delete it"):
        fit(vits[0], vits[1], batches(64, labels=True), options=FitConfig(steps=2, start="matched", state=state))


def test_never_worse_than_the_start_and_says_when_nothing_was_found():
    anchor = tiny_llama(0)
    donor = tiny_llama(0)
    result = fit(anchor, donor, token_batches(), options=FitConfig(steps=6))
    assert result.report.after <= result.report.before
    assert "gains nothing" in result.report.verdict()


def test_a_start_matched_on_samples(vits):
    """Of the samples that are learned from; the start is another one than that of weights."""
    match, scores = AlignConfig(heads="permutation", residual="rotation"), {}
    for how in ("weights", "both"):
        options = FitConfig(steps=1, start="matched", match_on=how)
        found = fit(vits[0], vits[1], batches(96, labels=True), match, options, matcher=activation_matcher("digits"))
        scores[how] = found.report.before
    assert scores["weights"] != scores["both"] < found.report.unaligned
    with pytest.raises(RotationMergeError, match="rotation-merge fit"):
        fit(vits[0], vits[1], batches(64, labels=True), match, options)


@pytest.mark.parametrize("tied", [False, True])
def test_three_models_are_learned_jointly(tied: bool):
    models = [tiny_llama(seed, tie_word_embeddings=tied) for seed in (0, 1, 2)]
    match = AlignConfig(heads="permutation", residual="signed_permutation" if tied else "rotation")
    result = fit(models[0], models[1:], token_batches(), match, FitConfig(steps=8, objective="distill"))
    assert len(result.alignments) == 2
    assert result.report.after <= result.report.before


def test_permutations_are_learned_only_when_asked(vits):
    architecture = architecture_of(vits[0])
    start = random_gauge(architecture, AlignConfig(), torch.Generator().manual_seed(0))
    moved = []
    for permutations in (False, True):
        module = LearnedTransforms(architecture, start, permutations=permutations)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.endswith("scores"):
                    parameter.copy_(parameter.roll(1, 0))
        orders = [
            (t.element, module.start[n].element)  # type: ignore[attr-defined]
            for n, t in module.final_transforms().items()
            if isinstance(t, NeuronTransform)
        ]
        assert all(isinstance(a, Monomial) for a, _ in orders)
        moved.append(any(not torch.equal(a.permutation.index, b.permutation.index) for a, b in orders))
    assert moved == [False, True]


def test_soft_and_hardened_elements_agree(vits):
    """What is trained is what is stored: the differentiable transforms and the exact ones do the same."""
    architecture = architecture_of(vits[0])
    state = {k: v.double() for k, v in vits[0].state_dict().items()}
    start = random_gauge(architecture, AlignConfig(heads="permutation"), torch.Generator().manual_seed(1))
    module = LearnedTransforms(architecture, start, permutations=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        soft = transform_state(architecture, state, module())
    hard = transform_state(architecture, state, module.final_transforms())
    for name, tensor in hard.items():
        torch.testing.assert_close(soft[name], tensor, atol=1e-5, rtol=1e-5)
        assert not name.endswith("q_proj.weight") or not torch.equal(tensor, state[name])


def test_identities_move_nothing(vits):
    architecture = architecture_of(vits[0])
    start = random_gauge(architecture, AlignConfig(heads="permutation"), torch.Generator().manual_seed(1))
    assert all(transform.is_identity() for transform in identities(start).values())


def test_names_of_spaces_follow_the_checkpoint(vits):
    own = architecture_of(vits[0])
    config = {**vits[0].config.to_dict(), "architectures": ["ViTForImageClassification"]}
    from rotation_merge.architecture import resolve

    with safe_open(CHECKPOINTS / "vit-0" / "model.safetensors", framework="pt") as file:
        wanted = resolve(config, list(file.keys()), "vit-0")
    start = random_gauge(own, AlignConfig(), torch.Generator().manual_seed(0))
    names = {space.name for block in wanted.blocks for space in block.spaces.values()}
    assert set(renamed(start, own, wanted)) == names


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
    with pytest.raises(RotationMergeError, match="only in one"):
        fit(vits[0], tiny_llama(0), batches(64, labels=False))
    with pytest.raises(RotationMergeError, match="two batches"):
        fit(vits[0], vits[1], batches(32, labels=False))


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


def test_the_groups_are_the_largest_if_none_are_named(learned):
    assert "rotation" in learned.match.residual


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


def test_from_recipe_to_merged_model_through_the_commands(tmp_path: Path):
    from mergekit.scripts.run_yaml import main

    anchor, donor = CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1"
    file = tmp_path / "learned.safetensors"
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        RECIPE.format(anchor=anchor, donor=donor, alignment="", options=", heads: permutation, residual: rotation")
    )
    runner = CliRunner()
    fitted = runner.invoke(
        command,
        ["fit", str(recipe), "--data", "demo:digits", "--limit", "256", "--alignment", str(file), "--steps", "40"],
    )
    assert fitted.exit_code == 0, fitted.output
    assert file.exists()
    recipe.write_text(RECIPE.format(anchor=anchor, donor=donor, alignment=f", alignment: {file}", options=""))
    merged = runner.invoke(main, [str(recipe), str(tmp_path / "out"), "--quiet"])
    assert merged.exit_code == 0, merged.output
    told = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("nothing was matched. It was learned: held-out loss" in note for note in told["notes"])
    assert [tuple(one.values()) for one in told["data"]] == [(f"learning how {donor} is aligned", "demo:digits", 256)]
    _, _, pixels, classes = digits()
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        accuracy = (model(pixel_values=pixels).logits.argmax(-1) == classes).float().mean()
    assert accuracy > 0.6


def test_mixes_are_convex_combinations():
    first, second = ({"x": x * torch.ones(n, 2), "y": y * torch.ones(n, 1)} for n, x, y in ((4, 0, 5), (3, 4, 2)))
    mixed = mix(first, second, torch.Generator().manual_seed(0))
    share = mixed["x"][:, :1] / 4
    assert mixed["x"].shape == (3, 2)
    assert bool(((share > 0) & (share < 1)).all())
    assert torch.equal(mixed["x"][:, 0], mixed["x"][:, 1])
    torch.testing.assert_close(mixed["y"], (1 - share) * 5 + share * 2)


FIRST = {case.family: case for case in reversed(tiny_models.ALL)}


@pytest.mark.parametrize("family", FIRST)
def test_checkpointing_drops_nothing(family: str):
    """Every family, each of its dropouts at one half: a checkpointed copy computes what the model computes."""
    case = FIRST[family]
    model = tiny_models.make(case)
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.5)
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.5
    if not model.supports_gradient_checkpointing:
        return
    copied = checkpointed(model)
    assert any(getattr(m, "gradient_checkpointing", False) and m.training for m in copied.modules())
    given = tiny_models.inputs(case, model)
    assert_equal_up_to_rounding(tiny_models.outputs(copied, given), tiny_models.outputs(model, given))
    assert any(m.training for m in copied.modules())
    assert not any(m.training for m in model.modules())


def test_gradients_under_checkpointing():
    """Layers are run again as gradients flow back: with the weights of the path, not with the model's own."""
    models, batch = [tiny_llama(i) for i in range(2)], token_batches(1)[0]
    architecture = architecture_of(models[0], untie=True)
    states = [dict(model.state_dict()) for model in models]
    found = []
    for model in (models[0], checkpointed(models[0])):
        path = ModelPath.between(model, architecture, states[0], states[1:], (), torch.device("cpu"))
        share = torch.tensor([0.3, 0.7], requires_grad=True)
        weights = path.weights([{}], share)
        with path.holding(weights):
            path.outputs(weights, batch).logits.square().sum().backward()
        found.append(share.grad)
    torch.testing.assert_close(found[1], found[0])
    fit(models[0], models[1], token_batches(), options=FitConfig(steps=2, checkpointing=True))


OTHERS = {
    "seed": {"seed": 1},
    "rate": {"learning_rate": 0.01},
    "objective": {"objective": "distill"},
    "steps": {"steps": 3},
}


@pytest.mark.parametrize("other", [*OTHERS, "donor", "anchor", "data", "groups"])
def test_the_state_of_another_fit_is_refused(other: str, tmp_path: Path):
    """Whatever differs; and it is left as it is, so that its own fit may go on."""
    models, data = [tiny_llama(i) for i in range(2)], token_batches()
    options = FitConfig(steps=2, start="identity", state=tmp_path / "state")
    match = AlignConfig(heads="permutation")

    def stop(done: int, total: int, figures: dict[str, float]) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(models[0], models[1], data, match, options, stop)
    held = (tmp_path / "state").read_bytes()
    changed = replace(options, **OTHERS.get(other, {}))
    if other in ("donor", "anchor"):
        models[other == "donor"] = tiny_llama(7)
    if other == "data":
        data[-1] = {"input_ids": data[-1]["input_ids"].flip(0)}
    with pytest.raises(RotationMergeError, match="another fit"):
        fit(models[0], models[1], data, AlignConfig() if other == "groups" else match, changed)
    assert (tmp_path / "state").read_bytes() == held


def test_the_state_of_the_same_fit_is_taken(tmp_path: Path):
    """Another limit of time, or checkpointing, is the same fit."""
    models, data = [tiny_llama(i) for i in range(2)], token_batches()
    options = FitConfig(steps=4, start="identity", state=tmp_path / "state")

    def stop(done: int, total: int, figures: dict[str, float]) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(models[0], models[1], data, options=options, watch=stop)
    seen: list[int] = []
    again = replace(options, minutes=5.0, checkpointing=True)
    fit(models[0], models[1], data, options=again, watch=lambda done, *_: seen.append(done))
    assert seen == [3, 4]
