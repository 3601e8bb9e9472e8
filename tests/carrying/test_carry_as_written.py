"""The losses that are reported are those of what is written: cut to a rank, rounded, without what an adapter lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import load, make, one_error, state, twin, write_state

from rotation_merge.carrying import sampled
from rotation_merge.carrying.judge import HeldOutSamples, TransferSamples
from rotation_merge.matching.activations import Activations
from rotation_merge.run.evaluate import evaluate

MODELS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "qwen2": {"tie_word_embeddings": False}}
"""The last one has biases in some of its modules."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """By name: a base, a fine-tune that changes all of it a lot, and the base in other coordinates."""
    pairs = {}
    for name, changes in MODELS.items():
        folder, draw = tmp_path_factory.mktemp(name), torch.Generator().manual_seed(2)
        old = make(name if name == "qwen2" else "llama", folder / "old", **changes)
        tensors = {n: t + 0.3 * torch.randn(t.shape, generator=draw) for n, t in state(old).items()}
        pairs[name] = {
            "old": old,
            "new": twin(old, folder / "new"),
            "tuned": write_state(tensors, old, folder / "tuned"),
        }
    return pairs


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
    models: dict[str, dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, used = sampled.read_parts, list[TransferSamples]()

    def reading(*arguments: Any) -> TransferSamples:
        used.append(read(*arguments))
        return used[-1]

    def loss(samples: HeldOutSamples, model: Any) -> tuple[float, float]:
        return evaluate(model, samples.tuned)[0], 0.0  # whatever it costs the new base, something is carried

    monkeypatch.setattr(sampled, "read_parts", reading)
    monkeypatch.setattr(HeldOutSamples, "losses", loss)
    pair, out = models[name], tmp_path / "out"
    bases = ("--from", pair["old"], "--to", pair["new"], "--heads", "permutation", "--residual", "none")
    done = run("carry", pair["tuned"], *bases, out, *options, "--samples", 32)
    assert done.exit_code == 0, done.output
    written = load(f"{pair['new']}+{out}" if "--lora" in options else str(out))
    if name == "tied" and not {"--lora", "--untie"} & set(options):
        assert "lm_head.weight" not in state(out)  # at a scale of its own it would not be the embedding
    lift = json.loads((out / "rotation_merge.json").read_text())["lift"]
    assert lift["carried"] != lift["new"]
    with torch.no_grad():
        assert evaluate(written, used[0].judge.tuned)[0] == pytest.approx(lift["carried"][0], abs=2e-5)


@pytest.mark.slow
def test_each_change_is_cut_to_a_rank_once(
    models: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, shapes, svd = models["llama"], list[tuple[int, ...]](), torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda x, **options: (shapes.append(tuple(x.shape)), svd(x, **options))[1])
    bases = ("--from", pair["old"], "--to", pair["new"], "--residual", "none", "--heads", "none", "--attention", "none")
    options = ("--ffn", "none", "--scale", "auto", "--lora", 2, "--samples", 32)
    assert run("carry", pair["tuned"], *bases, tmp_path / "out", *options).exit_code == 0
    vocabulary = [shape for shape in shapes if max(shape) == len(state(pair["old"])["lm_head.weight"])]
    assert len(vocabulary) == 2 * 2  # embedding and head; moved, and as it is


@pytest.mark.parametrize("options", [(), ("--scale", "auto"), ("--carry", "refit")])
def test_a_head_of_its_own_has_no_place_in_a_tied_base(
    options: tuple[str, ...], models: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    apart, tied = models["llama"], models["tied"]
    bases = ("--from", apart["old"], "--to", tied["new"], "--residual", "none", "--force")
    done = run("carry", apart["tuned"], *bases, tmp_path / "out", *options)
    assert "its change has no place; add 'untie'" in one_error(done.output)
    assert not (tmp_path / "out").exists()


def test_a_change_below_the_precision_of_its_base_can_be_stored(
    models: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    """It is rounded once, to the dtype that was asked for."""
    old, tuned = (state(models["llama"][name]) for name in ("old", "tuned"))
    halves = {name: tensor.bfloat16() for name, tensor in old.items()}
    small = {name: tensor.float() + 1e-4 * (tuned[name] - old[name]) for name, tensor in halves.items()}
    for name, tensors in {"base": halves, "tuned": small}.items():
        write_state(tensors, models["llama"]["old"], tmp_path / name)
    bases = ("--from", tmp_path / "base", "--to", tmp_path / "base", "--residual", "none", "--force")
    done = run("carry", tmp_path / "tuned", *bases, tmp_path / "out", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    for name, tensor in state(tmp_path / "out").items():
        torch.testing.assert_close(tensor, small[name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora", 2), ("--residual", "rotation")])
@pytest.mark.parametrize("method", [("--scale", "auto"), ("--carry", "refit")])
def test_where_nothing_is_better_the_new_base_is_written(
    method: tuple[str, ...], options: tuple[object, ...], models: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    """Samples on which the fine-tune is worse: report and card say that nothing was carried."""
    pair, out = models["llama"], tmp_path / "out"
    ids = load(str(pair["old"])).generate(torch.arange(32)[:, None], do_sample=True, max_length=10, min_length=10)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids.tolist()))
    bases = ("--from", pair["old"], "--to", pair["new"], "--residual", "none")
    data = ("--data", tmp_path / "texts.jsonl")
    done = run("carry", pair["tuned"], *bases, out, *method, *data, *options)
    assert done.exit_code == 0, done.output
    lift = json.loads((out / "rotation_merge.json").read_text())["lift"]
    assert (lift["method"], lift["carried"]) == ("none", lift["new"])
    assert "Nothing was carried" in (out / "README.md").read_text()
    written = load(f"{pair['new']}+{out}" if "--lora" in options else str(out)).state_dict()
    for name, tensor in load(str(pair["new"])).state_dict().items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=0)


@pytest.mark.slow
def test_judging_samples_are_in_no_other_use(
    models: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is matched, solved or chosen on them."""
    seen, used = set[tuple[int, ...]](), list[TransferSamples]()
    record, read = Activations.of, sampled.read_parts

    def recording(model: Any, batches: list[dict[str, torch.Tensor]], most: int) -> Activations:
        seen.update(rows_of(batches))
        return record(model, batches, most)

    def reading(*arguments: Any) -> TransferSamples:
        used.append(read(*arguments))
        return used[-1]

    monkeypatch.setattr(Activations, "of", recording)
    monkeypatch.setattr(sampled, "read_parts", reading)
    rows = [[(7 * i + j * j) % 40 for j in range(10)] for i in range(33)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    pair = models["llama"]
    bases = ("--from", pair["old"], "--to", pair["new"], "--carry", "refit", "--scale", 1, "--match-on", "both")
    done = run("carry", pair["tuned"], *bases, tmp_path / "out", "--data", tmp_path / "texts.jsonl", "--samples", 33)
    assert done.exit_code == 0, done.output
    parts = used[0]
    solved, chosen, judged = (rows_of(each.batches) for each in (parts.solved, parts.choice.tuned, parts.judge.tuned))
    assert judged
    assert not judged & (solved | chosen | seen)
    assert len(seen) == len(solved) == 17


def rows_of(batches: list[dict[str, torch.Tensor]]) -> set[tuple[int, ...]]:
    return {tuple(row) for batch in batches for row in batch["input_ids"].tolist()}
