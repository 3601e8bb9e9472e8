"""Changes that samples solve, scale, choose and judge: by the command, in recipes and in Python; what is written is
what was judged; runs that were stopped go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import run
from click.testing import Result
from plugin_support import load, make, merged, mergekit_yaml, one_error, recipe_for, state, twin, write_state
from recipe_models import stand_in
from safetensors.torch import load_file
from test_carried_adapters import carry
from torch import Tensor

import rotation_merge as rm
from rotation_merge.averaging.wudi import added_by_wudi
from rotation_merge.carrying import sampled
from rotation_merge.carrying.config import MERGED, PLAIN
from rotation_merge.carrying.judge import HeldOutSamples, TransferSamples
from rotation_merge.carrying.sampled import ChangeCandidate
from rotation_merge.matching.activations import Activations
from rotation_merge.run.evaluate import score

Models = dict[str, Path]

MODELS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "qwen2": {"tie_word_embeddings": False}}
"""The last one has biases in some of its modules."""
STOPPED_AT = 6
"""Steps after which a run is stopped: three rates of one step, then four of training."""


def texts(folder: Path, rows: list[list[int]] | None = None, count: int = 32) -> Path:
    """A file of token ids."""
    rows = rows or [[(7 * i + j * j) % 40 for j in range(10)] for i in range(count)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    return folder / "texts.jsonl"


def noisy(model: Path, where: Path, size: float, seed: int = 2) -> Path:
    """A model with all of its weights changed."""
    draw = torch.Generator().manual_seed(seed)
    return write_state(
        {n: t + size * torch.randn(t.shape, generator=draw) for n, t in state(model).items()}, model, where
    )


def lift_of(out: Path) -> dict[str, Any]:
    lift: dict[str, Any] = json.loads((out / "rotation_merge.json").read_text())["lift"]
    return lift


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    """By name: a base, a fine-tune that changes all of it a lot, and the base in other coordinates."""
    pairs = {}
    for name, changes in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        old = make(name if name == "qwen2" else "llama", folder / "old", **changes)
        tuned = noisy(old, folder / "tuned", 0.3)
        pairs[name] = {"old": old, "new": twin(old, folder / "new"), "tuned": tuned}
    return pairs


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Stand-ins for two bases, a LoRA and a fine-tune of the first, and texts."""
    folder = tmp_path_factory.mktemp("far")
    names = {"old": "old", "new": "new", "lora": "my-lora", "tuned": "tuned"}
    return {"data": texts(folder), **{key: stand_in(f"org/{name}", folder) for key, name in names.items()}}


def between(pair: Models) -> tuple[object, ...]:
    return "--from", pair["old"], "--to", pair["new"]


# --- what is judged is what is written --------------------------------------------------------------------------------


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[TransferSamples]:
    """The samples that were read."""
    read, used = sampled.read_parts, list[TransferSamples]()

    def reading(*arguments: Any) -> TransferSamples:
        used.append(read(*arguments))
        return used[-1]

    monkeypatch.setattr(sampled, "read_parts", reading)
    return used


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ("--scale", "auto", "--lora", 16)),
        ("llama", ("--carry", "refit", "--scale", 1, "--lora", 2)),
        ("llama", ("--scale", "auto", "--dtype", "bfloat16")),
        ("llama", ("--carry", "refit", "--scale", 1, "--dtype", "bfloat16")),
        ("tied", ("--carry", "refit", "--scale", 1, "--lora", 2, "--untie")),
        ("tied", ("--scale", "auto", "--lora", 8)),
        ("tied", ("--scale", "auto")),
        ("qwen2", ("--steps", 2, "--scale", 1, "--lora", 2)),
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

    def loss(held_out: HeldOutSamples, model: Any) -> tuple[float, float]:
        return score(model, held_out.tuned).loss, 0.0  # whatever it costs the new base, something is carried

    monkeypatch.setattr(HeldOutSamples, "losses", loss)
    pair, out = models[name], tmp_path / "out"
    groups = ("--heads", "permutation", "--residual", "none", "--samples", 32)
    carry(pair["tuned"], *between(pair), out, *options, *groups)
    written = load(f"{pair['new']}+{out}" if "--lora" in options else str(out))
    if name == "tied" and not {"--lora", "--untie"} & set(options):
        assert "lm_head.weight" not in state(out)  # at a scale of its own it would not be the embedding
    lift = lift_of(out)
    assert lift["carried"] != lift["new"]
    with torch.no_grad():
        assert score(written, samples[0].judge.tuned).loss == pytest.approx(lift["carried"][0], abs=2e-5)


@pytest.mark.slow
def test_each_change_is_cut_to_a_rank_once(
    models: dict[str, Models], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, shapes, svd = models["llama"], list[tuple[int, ...]](), torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda x, **options: (shapes.append(tuple(x.shape)), svd(x, **options))[1])
    still = (word for name in ("--residual", "--heads", "--attention", "--ffn") for word in (name, "none"))
    options = ("--scale", "auto", "--lora", 2, "--samples", 32)
    carry(pair["tuned"], *between(pair), tmp_path / "out", *still, *options)
    vocabulary = [shape for shape in shapes if max(shape) == len(state(pair["old"])["lm_head.weight"])]
    assert len(vocabulary) == 2 * 2  # embedding and head; moved, and as it is


@pytest.mark.parametrize("options", [(), ("--scale", "auto"), ("--carry", "refit")])
def test_a_head_of_its_own_has_no_place_in_a_tied_base(
    options: tuple[str, ...], models: dict[str, Models], tmp_path: Path
) -> None:
    apart, tied = models["llama"], models["tied"]
    bases = ("--from", apart["old"], "--to", tied["new"], "--residual", "none", "--force")
    done = run("carry", apart["tuned"], *bases, tmp_path / "out", *options)
    assert "its change has no place; add 'untie'" in one_error(done.output)
    assert not (tmp_path / "out").exists()


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
@pytest.mark.parametrize("options", [(), ("--lora", 2), ("--residual", "rotation")])
@pytest.mark.parametrize("method", [("--scale", "auto"), ("--carry", "refit")])
def test_where_nothing_is_better_the_new_base_is_written(
    method: tuple[str, ...], options: tuple[object, ...], models: dict[str, Models], tmp_path: Path
) -> None:
    """Samples on which the fine-tune is worse: report and card say that nothing was carried."""
    pair, out = models["llama"], tmp_path / "out"
    ids = load(str(pair["old"])).generate(torch.arange(32)[:, None], do_sample=True, max_length=10, min_length=10)
    data = ("--residual", "none", "--data", texts(tmp_path, ids.tolist()))
    carry(pair["tuned"], *between(pair), out, *method, *data, *options)
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
    seen, record, pair = set[tuple[int, ...]](), Activations.of, models["llama"]

    def recording(model: Any, batches: list[dict[str, Tensor]], most: int) -> Activations:
        seen.update(rows_of(batches))
        return record(model, batches, most)

    monkeypatch.setattr(Activations, "of", recording)
    options = ("--carry", "refit", "--scale", 1, "--match-on", "both", "--samples", 33)
    said = carry(pair["tuned"], *between(pair), *options, tmp_path / "out", "--data", texts(tmp_path, count=33))
    assert "matched on weights and activations" in said
    parts = samples[0]
    solved, chosen, judged = (rows_of(each.batches) for each in (parts.solved, parts.choice.tuned, parts.judge.tuned))
    assert judged
    assert not judged & (solved | chosen | seen)
    assert len(seen) == len(solved) == 17


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
    pair |= {
        each: noisy(pair["old"], tmp_path / each, by, seed) for each, by, seed in (("new", 0.1, 2), ("tuned", 0.02, 3))
    }
    options = ("--data", texts(tmp_path), "--samples", 32, "--scale", "auto")
    carry(pair["tuned"], tmp_path / "out", *between(pair), *options)
    before, new, tuned = (state(pair[each]) for each in ("old", "new", "tuned"))
    for tensor, result in state(tmp_path / "out").items():
        expected = plain = new[tensor] + tuned[tensor] - before[tensor]
        if name == MERGED and tensor.endswith(maps):
            changes = ((each[tensor] - before[tensor]).double() for each in (new, tuned))
            expected = (new[tensor] + added_by_wudi(*changes)).float()
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
        ({"carry": "refit", "carry_scale": 1.0}, ("--carry", "refit", "--scale", 1)),
        ({"carry": "distil", "carry_scale": 1.0, "steps": 2}, ("--steps", 2, "--scale", 1)),
        ({"carry_scale": "auto"}, ("--scale", "auto")),
    ],
    ids=["refit", "distil", "auto"],
)
def test_recipe_and_command_agree(
    parameters: dict[str, Any], flags: tuple[object, ...], far: Models, tmp_path: Path
) -> None:
    """The report of the recipe has the lift of each donor, as those of the command and of the Python call have it."""
    ours = merged(recipe(far, data=str(far["data"]), samples=32, **parameters), tmp_path / "merged")
    options = ("--residual", "none", "--heads", "permutation", "--data", far["data"], "--samples", 32)
    carry(far["tuned"], *between(far), *options, tmp_path / "out", *flags)
    assert "Loss on the judging samples" in (tmp_path / "merged" / "rotation_merge.json").read_text()
    torch.testing.assert_close(ours, state(tmp_path / "out"), atol=1e-5, rtol=1e-4)
    lift = lift_of(tmp_path / "merged")[str(far["tuned"])]
    assert lift["carried"] == pytest.approx(lift_of(tmp_path / "out")["carried"], abs=1e-4)
    if parameters.get("carry") == "refit":
        assert lift["method"] == "refit"
        call: dict[str, Any] = {"data": str(far["data"]), "samples": 32, "method": "refit", "scale": 1.0}
        for rank in (0, 2):
            models = (far[name] for name in ("tuned", "old", "new"))
            carried = rm.transfer(*models, residual="none", heads="permutation", rank=rank, **call)
            assert carried.report is not None
            assert carried.report.lift is not None
            assert carried.report.lift["method"] == "refit"
            assert "ecovered lift" in carried.notes[-1]
            assert rank or carried.report.lift["carried"] == pytest.approx(lift["carried"], abs=1e-4)


@pytest.mark.slow
def test_a_scale_multiplies_the_change(far: Models, tmp_path: Path) -> None:
    whole, half = (merged(recipe(far, carry_scale=scale), tmp_path / str(scale)) for scale in (1.0, 0.5))
    new = state(far["new"])
    torch.testing.assert_close(half, {name: (new[name] + whole[name]) / 2 for name in new}, atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(whole[name], new[name]) for name in new)


@pytest.mark.slow
def test_command(far: Models, tmp_path: Path) -> None:
    """An adapter stays one of its rank, a model a model; report and card say what arrived."""
    options = (*between(far), "--samples", 32)
    assert "the new base's own text" in carry(far["lora"], *options, "--carry", "refit", tmp_path / "one")
    assert (tmp_path / "one" / "adapter_model.safetensors").exists()
    (far["tuned"] / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    said = carry(far["tuned"], *options, "--carry", "refit", tmp_path / "two", "--scale", "0.5")
    assert all(words in said for words in ("at scale 0.5", "relative distance"))
    lift = lift_of(tmp_path / "two")
    assert (lift["method"], list(lift["others"])) == ("refit", ["plain addition"])
    assert "ecovered lift" in carry(far["tuned"], *options, "--scale", "auto", tmp_path / "three")
    for out in ("two", "three"):
        assert "| cc-by-nc-4.0 |" in (tmp_path / out / "README.md").read_text(), out
        assert (tmp_path / out / "model.safetensors").exists()
    data = ("--carry", "refit", "--scale", 1, "--lora", 2, "--match-on", "weights", "--data", far["data"])
    carry(far["tuned"], *options, tmp_path / "lora", *data)
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["r"] == 2


# --- distilling, and runs that were stopped ---------------------------------------------------------------------------


def distilled(out: Path, work: Path, far: Models, *options: object) -> Result:
    given = ("--data", far["data"], "--samples", 32, "--steps", 4, "--scale", 1)
    return run("carry", work, *between(far), out, *given, *options)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Stops training at a step; states are written at once. Gives the list of steps."""
    monkeypatch.setattr("rotation_merge.run.ledger.SECONDS", 0.0)

    def stopped(at: int) -> list[int]:
        train, steps = torch.optim.AdamW.step, list[int]()

        def step(self: torch.optim.AdamW, *arguments: Any) -> Any:
            steps.append(1)
            if len(steps) == at:
                raise KeyboardInterrupt
            return train(self, *arguments)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)
        return steps

    return stopped


@pytest.mark.slow
def test_distilling_an_adapter(far: Models, tmp_path: Path) -> None:
    done = distilled(tmp_path / "lora", far["lora"], far)
    assert done.exit_code == 0, done.output
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all(x.shape[0] == 2 for name, x in factors.items() if "lora_A" in name)
    assert any("down_proj" in name for name in factors)


@pytest.mark.slow
def test_distilling_goes_on_where_it_was_stopped(far: Models, tmp_path: Path, stop: Callable[[int], list[int]]) -> None:
    done = distilled(tmp_path / "whole", far["tuned"], far)
    assert done.exit_code == 0, done.output
    assert "Distilled for 4 steps" in done.output
    assert "**trained**" in (tmp_path / "whole" / "README.md").read_text()
    steps = stop(STOPPED_AT)
    assert distilled(tmp_path / "again", far["tuned"], far).exit_code != 0
    assert (tmp_path / "again.unfinished" / "answers.pt").exists()
    assert " at 0x" not in (tmp_path / "again.unfinished" / "run.txt").read_text()  # another process knows it, too
    again = distilled(tmp_path / "again", far["tuned"], far)
    assert again.exit_code == 0, again.output
    assert len(steps) < 2 * STOPPED_AT
    assert not (tmp_path / "again.unfinished").exists()
    torch.testing.assert_close(state(tmp_path / "again"), state(tmp_path / "whole"), atol=0, rtol=0)


@pytest.mark.slow
def test_interrupted_work_on_other_samples_is_not_continued(
    far: Models, tmp_path: Path, stop: Callable[[int], list[int]]
) -> None:
    """Also if they have the name of those before."""
    rows = [json.loads(line)["input_ids"] for line in far["data"].read_text().splitlines()]
    known = {**far, "data": texts(tmp_path, rows)}
    stop(1)
    assert distilled(tmp_path / "out", far["tuned"], known).exit_code != 0
    assert (tmp_path / "out.unfinished" / "answers.pt").exists()
    texts(tmp_path, [row[::-1] for row in rows])
    for out in ("out", "whole"):
        assert distilled(tmp_path / out, far["tuned"], known).exit_code == 0
    torch.testing.assert_close(state(tmp_path / "out"), state(tmp_path / "whole"), atol=0, rtol=0)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--carry", "refit", "--steps", 5), "carry by distil"),
        (("--data", "texts.txt"), "--scale auto"),
        (("--scale", "much"), "auto, a number"),
        (("--scale", "nan"), "auto, a number"),
        (("--carry", "refit", "--data", "nowhere.txt"), "nowhere.txt"),
        (("--carry", "refit", "--match-on", "both", "--alignment", "file"), "--match-on has no effect"),
        (("--heads", "permutation", "--alignment", "file"), "--heads has no effect"),
    ],
)
def test_bad_options(options: tuple[str, ...], words: str, far: Models, tmp_path: Path) -> None:
    done = run("carry", far["tuned"], *between(far), tmp_path / "out", *options)
    assert done.exit_code == 2
    assert words in one_error(done.output)
    assert not (tmp_path / "out").exists()


def test_recipes_and_python_refuse_the_same(far: Models, tmp_path: Path) -> None:
    without_effect, no_origin = recipe(far, carry="refit", steps=4), recipe(far, carry="refit")
    del no_origin["models"][0]["parameters"]["finetuned_from"]
    words = "carrying by refit takes no steps"
    for document, said in ((without_effect, words), (no_origin, "finetuned_from")):
        done = mergekit_yaml(document, tmp_path / "out")
        assert done.exit_code == 2
        assert re.search(said, one_error(done.output))
        assert not (tmp_path / "out").exists()
    with pytest.raises(rm.RotationMergeError, match=words):
        rm.transfer(far["tuned"], far["old"], far["new"], method="refit", steps=4)


@pytest.mark.slow
def test_samples_without_labels_say_what_to_do(tmp_path: Path) -> None:
    old, new, tuned = (make("vit", tmp_path / name, seed) for seed, name in enumerate(("old", "new", "tuned")))
    config = json.loads((old / "config.json").read_text())
    pixels = np.zeros((32, config["num_channels"], config["image_size"], config["image_size"]), dtype=np.float32)
    np.savez(tmp_path / "images.npz", pixel_values=pixels)
    options = ("--from", old, "--to", new, "--carry", "refit", "--data", tmp_path / "images.npz", "--samples", 32)
    done = run("carry", tuned, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert "carry by weights alone" in done.output
    assert not (tmp_path / "out").exists()
