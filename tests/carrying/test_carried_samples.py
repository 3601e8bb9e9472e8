"""Changes that samples solve, scale, choose and judge: by the command, in recipes and in Python; what is written is
what was judged; runs that were stopped go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import carry, lift_of, noisy, texts
from cli_support import run, stop_training
from click.testing import Result
from plugin_support import load, make, merged, recipe_for, state, twin, write_state
from recipe_models import stand_in
from safetensors.torch import load_file
from torch import Tensor

import rotation_merge as rm
from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.wudi import BESIDE_RIDGE, WudiBeside
from rotation_merge.carrying import sampled
from rotation_merge.carrying.config import MERGED, PLAIN
from rotation_merge.carrying.judge import HeldOutSamples, TransferSamples
from rotation_merge.carrying.sampled import ChangeCandidate
from rotation_merge.matching.match_on import Activations
from rotation_merge.run.evaluate import Scores, score

Models = dict[str, Path]
MODELS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "qwen2": {"tie_word_embeddings": False}}
"""The last one has biases in some of its modules."""
STOPPED_AT = 6
"""Steps after which a run is stopped: three rates of one step, then four of training."""
LORA, REFIT, AUTO = ("--lora", 2), ("--carry", "refit", "--scale", 1), ("--scale", "auto")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    """By name: a base, a fine-tune that changes all of it a lot, and the base in other coordinates."""
    pairs = {}
    for name, changes in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        old = make(name if name == "qwen2" else "llama", folder / "old", **changes)
        pairs[name] = {"old": old, "new": twin(old, folder / "new"), "tuned": noisy(old, folder / "tuned", 0.3)}
    return pairs


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Stand-ins for two bases, a LoRA and a fine-tune of the first, and texts."""
    folder = tmp_path_factory.mktemp("far")
    names = {"old": "old", "new": "new", "lora": "my-lora", "tuned": "tuned"}
    return {"data": texts(folder), **{key: stand_in(f"org/{name}", folder) for key, name in names.items()}}


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[TransferSamples]:
    """The samples that were read."""
    read, used = sampled.read_parts, list[TransferSamples]()

    def reading(*arguments: Any) -> TransferSamples:
        used.append(read(*arguments))
        return used[-1]

    monkeypatch.setattr(sampled, "read_parts", reading)
    return used


def between(pair: Models) -> tuple[object, ...]:
    return "--from", pair["old"], "--to", pair["new"]


# --- what is judged is what is written --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", (*AUTO, "--lora", 16)),
        ("llama", (*AUTO, "--dtype", "bfloat16")),
        ("llama", (*REFIT, "--dtype", "bfloat16")),
        ("tied", (*REFIT, *LORA, "--untie")),
        ("tied", AUTO),
        ("qwen2", ("--steps", 2, "--scale", 1, *LORA)),
    ],
)
def test_the_reported_loss_is_that_of_what_is_written(
    name: str,
    options: tuple[object, ...],
    models: dict[str, Models],
    samples: list[TransferSamples],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut to a rank, rounded, without what an adapter lacks."""

    def scores(held_out: HeldOutSamples, model: Any) -> tuple[Scores, Scores]:
        return score(model, held_out.tuned), Scores(0.0, {}, [])  # whatever it costs the new base, something is carried

    monkeypatch.setattr(HeldOutSamples, "scores", scores)
    pair, out = models[name], tmp_path / "out"
    groups = ("--heads", "permutation", "--residual", "none", "--samples", 32)
    output = carry(pair["tuned"], *between(pair), out, *options, *groups)
    if options == (*AUTO, "--lora", 16):
        assert "keeps" in output
        assert "keeps 100" not in output  # of the whole change, before it was judged
    written = load(f"{pair['new']}+{out}" if "--lora" in options else str(out))
    if LORA[1] in options:
        assert json.loads((out / "adapter_config.json").read_text())["r"] == LORA[1]
    if options == AUTO:
        assert "lm_head.weight" not in state(out)  # at a scale of its own it would not be the embedding
    lift = lift_of(out)
    assert lift["carried"] != lift["new"]
    assert min(lift["margin"], lift["margin_at_home"]) > 0
    with torch.no_grad():
        assert score(written, samples[0].judge.tuned).loss == pytest.approx(lift["carried"][0], abs=2e-5)


def test_a_change_below_the_precision_of_its_base_can_be_stored(models: dict[str, Models], tmp_path: Path) -> None:
    """It is rounded once, to the dtype that was asked for."""
    old, tuned = (state(models["llama"][name]) for name in ("old", "tuned"))
    halves = {name: tensor.bfloat16() for name, tensor in old.items()}
    small = {name: tensor.float() + 1e-4 * (tuned[name] - old[name]) for name, tensor in halves.items()}
    for name, tensors in {"base": halves, "tuned": small}.items():
        write_state(tensors, models["llama"]["old"], tmp_path / name)
    bases = ("--from", tmp_path / "base", "--to", tmp_path / "base", "--residual", "none", "--force")
    carry(tmp_path / "tuned", *bases, tmp_path / "out", "--dtype", "float32")
    torch.testing.assert_close(state(tmp_path / "out"), small, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [AUTO, (*AUTO, *LORA), ("--carry", "refit", "--residual", "rotation")])
def test_where_nothing_is_better_the_new_base_is_written(
    options: tuple[object, ...], models: dict[str, Models], tmp_path: Path
) -> None:
    """Samples on which the fine-tune is worse: report and card say that nothing was carried."""
    pair, out = models["llama"], tmp_path / "out"
    ids = load(str(pair["old"])).generate(torch.arange(32)[:, None], do_sample=True, max_length=10, min_length=10)
    data = ("--residual", "none", "--data", texts(tmp_path, ids.tolist()))
    carry(pair["tuned"], *between(pair), out, *data, *options)
    lift = lift_of(out)
    assert (lift["method"], lift["carried"]) == ("none", lift["new"])
    assert "Nothing was carried" in (out / "README.md").read_text()
    written = load(f"{pair['new']}+{out}" if "--lora" in options else str(out)).state_dict()
    for name, tensor in load(str(pair["new"])).state_dict().items():
        assert torch.equal(written[name], tensor), name


def rows_of(batches: list[dict[str, Tensor]]) -> set[tuple[int, ...]]:
    return {tuple(row) for batch in batches for row in batch["input_ids"].tolist()}


@pytest.mark.slow
def test_judging_samples_are_in_no_other_use(
    models: dict[str, Models], samples: list[TransferSamples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is matched, solved or chosen on them."""
    matched, record, pair = set[tuple[int, ...]](), Activations.of, models["llama"]

    def recording(model: Any, batches: list[dict[str, Tensor]], *more: Any) -> Activations:
        matched.update(rows_of(batches))
        return record(model, batches, *more)

    monkeypatch.setattr(Activations, "of", recording)
    options = (*REFIT, "--match-on", "both", "--residual", "none", "--samples", 33)
    output = carry(pair["tuned"], *between(pair), *options, tmp_path / "out", "--data", texts(tmp_path, count=33))
    assert "matched on weights and activations" in output
    ids = torch.tensor([json.loads(line)["input_ids"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()])
    in_memory = [{"input_ids": rows} for rows in ids.split(16)]

    def check(parts: TransferSamples) -> None:
        uses = (parts.solved, parts.choice.tuned, parts.judge.tuned)
        solved, chosen, judged = (rows_of(each.batches) for each in uses)
        assert judged
        assert not judged & (solved | chosen | matched)
        assert len(matched) == len(solved) == 17

    check(samples[0])
    matched.clear()
    models_of = (str(pair[name]) for name in ("tuned", "old", "new"))
    call: dict[str, Any] = {"method": "refit", "scale": 1.0, "match_on": "both", "residual": "none"}
    carried = rm.transfer(*models_of, samples=in_memory, **call)
    check(samples[1])
    assert carried.report.data[-1]["source"] == "samples in memory"
    torch.testing.assert_close(carried.state_dict(), state(tmp_path / "out"), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), [(PLAIN, False), (MERGED, False), (MERGED, True)])
def test_what_samples_chose_is_written(name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights, too, where another change is written than the one that the method moved."""
    maps = ("proj.weight", "embed_tokens.weight") if tied else ("proj.weight",)

    def chosen(usable: list[ChangeCandidate], *_: Any) -> ChangeCandidate:
        return next(each for each in usable if each.method == name)

    monkeypatch.setattr("rotation_merge.carrying.sampled.best_of", chosen)
    monkeypatch.setattr("rotation_merge.carrying.sampled.SCALES", (1.0,))
    pair = {"old": make("llama", tmp_path / "old", tie_word_embeddings=tied)}
    pair |= {"new": noisy(pair["old"], tmp_path / "new", 0.1), "tuned": noisy(pair["old"], tmp_path / "tuned", 0.02, 3)}
    carry(pair["tuned"], tmp_path / "out", *between(pair), "--data", texts(tmp_path), "--samples", 32, *AUTO)
    before, new, tuned = (state(pair[each]) for each in ("old", "new", "tuned"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] == tied  # nothing need turn between bases that share their coordinates
    for tensor, result in state(tmp_path / "out").items():
        expected = plain = new[tensor] + tuned[tensor] - before[tensor]
        if name == MERGED and tensor.endswith(maps):
            changes = [SlicedMatrix.of((each[tensor] - before[tensor]).double()) for each in (new, tuned)]
            both = WudiBeside().change(changes, [1.0, 1.0], {"ridge": BESIDE_RIDGE})
            expected = (before[tensor] + both.whole()).float()
            assert not torch.allclose(result, plain, atol=1e-4)
        if name == PLAIN or tensor.endswith(maps):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


# --- recipe, command and Python ---------------------------------------------------------------------------------------


def recipe(pair: Models, **parameters: Any) -> dict[str, Any]:
    """The change of the fine-tune, carried to the new base."""
    document = recipe_for("task_arithmetic", pair["new"], pair["tuned"])
    document["models"] = document["models"][1:]
    document["models"][0]["parameters"] = {"weight": 1.0, "finetuned_from": str(pair["old"]), **parameters}
    return document


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "flags"),
    [
        ({"carry": "refit", "carry_scale": 1.0}, REFIT),
        ({"carry": "distil", "carry_scale": 1.0, "steps": 2}, ("--steps", 2, "--scale", 1)),
        ({"carry_scale": "auto"}, AUTO),
    ],
    ids=["refit", "distil", "auto"],
)
def test_recipe_and_command_agree(
    parameters: dict[str, Any], flags: tuple[object, ...], far: Models, tmp_path: Path
) -> None:
    """The report of the recipe has the lift of each donor, as those of the command and of the Python call have it."""
    result = merged(recipe(far, data=str(far["data"]), samples=32, **parameters), tmp_path / "merged")
    options = ("--residual", "none", "--heads", "permutation", "--data", far["data"], "--samples", 32)
    carry(far["tuned"], *between(far), *options, tmp_path / "out", *flags)
    assert "Loss on the judging samples" in (tmp_path / "merged" / "rotation_merge.json").read_text()
    torch.testing.assert_close(result, state(tmp_path / "out"), atol=1e-5, rtol=1e-4)
    lift = lift_of(tmp_path / "merged")[str(far["tuned"])]
    assert lift["carried"] == pytest.approx(lift_of(tmp_path / "out")["carried"], abs=1e-4)
    if parameters.get("carry") == "refit":
        call: dict[str, Any] = {"data": str(far["data"]), "samples": 32, "method": "refit", "scale": 1.0}
        models = (far[name] for name in ("tuned", "old", "new"))
        carried = rm.transfer(*models, residual="none", heads="permutation", **call)
        assert "ecovered lift" in carried.notes[-1]
        assert carried.report.lift["method"] == lift["method"] == "refit"
        assert carried.report.lift["carried"] == pytest.approx(lift["carried"], abs=1e-4)
        whole, half = (merged(recipe(far, carry_scale=scale), tmp_path / str(scale)) for scale in (1.0, 0.5))
        new = state(far["new"])
        expected = {name: (new[name] + whole[name]) / 2 for name in new}
        torch.testing.assert_close(half, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_command(far: Models, tmp_path: Path) -> None:
    """An adapter stays one of its rank, a model a model; report and card say what arrived."""
    options = (*between(far), "--samples", 32)
    assert "the new base's own text" in carry(far["lora"], *options, "--carry", "refit", tmp_path / "one")
    assert (tmp_path / "one" / "adapter_model.safetensors").exists()
    (far["tuned"] / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    output = carry(far["tuned"], *options, "--carry", "refit", tmp_path / "two", "--scale", "0.5")
    assert all(words in output for words in ("at scale 0.5", "relative distance"))
    lift = lift_of(tmp_path / "two")
    assert (lift["method"], list(lift["others"])) == ("refit", ["plain addition"])
    assert "| cc-by-nc-4.0 |" in (tmp_path / "two" / "README.md").read_text()
    carry(far["lora"], *options, tmp_path / "distilled", "--data", far["data"], "--steps", 2, "--scale", 1)
    factors = load_file(tmp_path / "distilled" / "adapter_model.safetensors")
    assert {x.shape[0] for name, x in factors.items() if "lora_A" in name} == {2}
    assert any("down_proj" in name for name in factors)


def distilled(out: Path, far: Models, data: Path | None = None) -> Result:
    options = ("--data", data or far["data"], "--samples", 32, "--steps", 4, "--scale", 1)
    return run("carry", far["tuned"], *between(far), out, *options)


@pytest.mark.slow
def test_distilling_goes_on_where_it_was_stopped(far: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are written at once; unfinished work on other samples of the same name is not continued."""
    monkeypatch.setattr("rotation_merge.run.ledger.SECONDS", 0.0)
    done = distilled(tmp_path / "whole", far)
    assert done.exit_code == 0, done.output
    assert "Distilled for 4 steps" in done.output
    assert "**trained**" in (tmp_path / "whole" / "README.md").read_text()
    steps, unfinished = stop_training(monkeypatch, STOPPED_AT), tmp_path / "again.unfinished"
    rows = [json.loads(line)["input_ids"] for line in far["data"].read_text().splitlines()]
    same = texts(tmp_path, rows)
    assert distilled(tmp_path / "again", far, same).exit_code != 0
    assert list(unfinished.glob("answers-*.pt"))
    assert " at 0x" not in (unfinished / "run.txt").read_text()  # another process knows it, too
    assert distilled(tmp_path / "again", far, same).exit_code == 0
    assert len(steps) < 2 * STOPPED_AT
    assert not unfinished.exists()
    torch.testing.assert_close(state(tmp_path / "again"), state(tmp_path / "whole"), atol=0, rtol=0)
    steps.clear()
    assert distilled(tmp_path / "out", far, same).exit_code != 0
    texts(tmp_path, [row[::-1] for row in rows])
    for out in ("out", "anew"):
        assert distilled(tmp_path / out, far, same).exit_code == 0
    torch.testing.assert_close(state(tmp_path / "out"), state(tmp_path / "anew"), atol=0, rtol=0)
