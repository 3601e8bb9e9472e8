"""Refit through mergekit: twins, weights, starts, samples held out, heads and experts, files of maps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import from_file, merged
from residual_support import Checkpoint, checkpoint, recipe, report, twin
from scipy.stats import t
from test_refit import farthest
from test_task_vectors import of
from test_task_vectors import three as three
from tiny_models import ALL
from torch import Tensor
from transformers import AutoModelForCausalLM

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("refit") / "anchor")


def refit_recipe(*models: Checkpoint, residual: str = "none", **parameters: Any) -> dict[str, Any]:
    return recipe(*models, residual=residual, **{"delegate": "refit", "samples": 4, **parameters})


def weighted(document: dict[str, Any], *weights: float) -> dict[str, Any]:
    for weight, entry in zip(weights, document["models"], strict=True):
        entry["parameters"]["weight"] = weight
    return document


def notes_of(out: Path) -> str:
    return "\n".join(report(out)["notes"])


def texts(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def random_rows(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
def test_twins_give_the_anchor(llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin in other coordinates, on text that both write; and one that a file of maps moves, on texts of a file."""
    monkeypatch.chdir(tmp_path)
    moved, expected = twin(llama, tmp_path / "twin", "rotation"), llama.folded()
    document = refit_recipe(llama, moved, residual="rotation")
    result = merged(document, tmp_path / "out")
    assert farthest(result, expected) <= 2e-5
    assert result.keys() == expected.keys()
    assert all(words in notes_of(tmp_path / "out") for words in ("Refit solved 15 linear maps", "own model"))
    options = ("--alignment", "file.safetensors", "--heads", "permutation", "--residual", "rotation")
    assert run("align", llama.path, moved.path, *options).exit_code == 0
    document = from_file(document, Path("file.safetensors"))
    document["parameters"] |= {"samples": 3, "data": str(texts(Path("t.jsonl"), random_rows(3, 9)))}
    assert farthest(merged(document, tmp_path / "again"), expected) <= 1e-3


@pytest.mark.slow
def test_weights_are_shares_of_samples_or_of_answers(llama: Checkpoint, tmp_path: Path) -> None:
    """A model of twice the weight is one whose own samples count twice; answers of all are on a line; a model without
    weight writes nothing. The same bytes again."""
    donor = checkpoint("llama", "llama", tmp_path / "donor", seed=4)
    rows = [random_rows(4, 8, seed) for seed in range(2)]
    names = zip(("first", "second", "twice"), (*rows, rows[1] * 2), strict=True)
    first, second, twice = (texts(tmp_path / f"{name}.jsonl", content) for name, content in names)

    def solved(share: float, data: Path, targets: str) -> State:
        document = refit_recipe(llama, donor, targets=targets, start="anchor", samples=8)
        for source, entry in zip((first, data), weighted(document, 1 - share, share)["models"], strict=True):
            entry["parameters"]["data"] = str(source)
        return merged(document, tmp_path / f"{targets}-{share}-{data.stem}")

    torch.testing.assert_close(solved(2 / 3, second, "own"), solved(0.5, twice, "own"), rtol=1e-3, atol=1e-4)
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b, c = (solved(share, second, "mean")[name] for share in (0.25, 0.5, 0.75))
    assert float((c - a).norm()) > 0.1
    torch.testing.assert_close(c - b, b - a, rtol=0, atol=1e-4)
    document = {**weighted(refit_recipe(llama, donor, targets="mean"), 0.0, 1.0), "dtype": "bfloat16"}
    once, again = (merged(document, tmp_path / name) for name in ("once", "again"))
    assert {tensor.dtype for tensor in once.values()} == {torch.bfloat16}
    assert f"`{llama.path}` self" not in notes_of(tmp_path / "once")
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("targets", ["own", "mean"])
def test_a_chosen_ridge_does_what_it_does_when_it_is_given(
    targets: str, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only one is tried; samples that it is chosen on are solved on, too. With three samples none is."""
    donor = checkpoint("llama", "llama", tmp_path / "donor", seed=4)

    def solved(count: int, ridge: float | str = "auto") -> State:
        document = refit_recipe(llama, donor, targets=targets, ridge=ridge)
        for seed, entry in enumerate(document["models"]):
            entry["parameters"]["data"] = str(texts(tmp_path / f"{seed}.jsonl", random_rows(count, 8, seed)))
        return merged(document, tmp_path / f"{count}-{ridge}")

    few, fixed = solved(3), solved(3, 0.01)
    assert all(torch.equal(few[name], fixed[name]) for name in few)
    given = solved(9, 0.03)
    assert farthest(solved(9, 0.3), given) > 1e-2
    monkeypatch.setattr("rotation_merge.averaging.ridge.RIDGES", (0.03,))
    torch.testing.assert_close(solved(9), given, rtol=1e-3, atol=1e-4)
    assert "(ridge 0.03, from the average" in notes_of(tmp_path / "9-auto")


@pytest.mark.slow
def test_what_is_not_solved_is_said(llama: Checkpoint, tmp_path: Path) -> None:
    """Excluded tensors are the anchor's; a tied head keeps the average, experts and routers are named; ViTs answer to
    synthetic images, one pool."""

    def pair(family: str, name: str) -> list[Checkpoint]:
        return [checkpoint(family, name, tmp_path / f"{name}-{seed}", seed=seed) for seed in (0, 4)]

    donor = checkpoint("llama", "llama", tmp_path / "donor", seed=4)
    result = merged(refit_recipe(llama, donor, exclude="lm_head, layers.1.", start="anchor"), tmp_path / "out")
    still = {name for name in llama.state if "proj" not in name or "layers.1." in name}
    assert {name for name, tensor in llama.state.items() if torch.equal(result[name], tensor)} == still
    tied, untied = (
        merged(refit_recipe(*pair("llama", "qwen2"), **options), tmp_path / str(len(options)))
        for options in ({}, {"untie": True})
    )
    assert "lm_head.weight" not in tied
    assert "tied" in notes_of(tmp_path / "0")
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])
    assert torch.equal(untied["model.embed_tokens.weight"], tied["model.embed_tokens.weight"])
    merged(refit_recipe(*pair("mixtral", "untied")), tmp_path / "experts")
    notes = notes_of(tmp_path / "experts")
    assert all(words in notes for words in ("experts and routers", "block_sparse_moe.gate.weight"))
    images = pair("vit", "classifier")
    assert merged(refit_recipe(*images), tmp_path / "images").keys() == images[0].state.keys()
    assert all(words in notes_of(tmp_path / "images") for words in ("synthetic", "mean of all models' answers"))


# --- starts, and samples held out -------------------------------------------------------------------------------------


def on_texts(models: list[Checkpoint], file: Path, **parameters: Any) -> dict[str, Any]:
    """A refit of fine-tunes on 24 texts of a file."""
    return of(models, "refit", weight=1.0, data=str(file), samples=24, **parameters)


@pytest.fixture(scope="module")
def forty_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row for i in range(40) for row in random_rows(1, 12, 9 + i)]
    return texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", rows)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["wudi", "calibrated_tsv", "average"])
def test_a_ridge_that_lets_nothing_move_gives_the_start(
    start: str, three: list[Checkpoint], forty_texts: Path, tmp_path: Path
) -> None:
    """As the delegate of that name, which a recipe may name instead, with its own scale; of the average, scaled."""
    calibration = {"calibrate": "svc"} if start.startswith("calibrated_") else {}
    ours = merged(on_texts(three, forty_texts, ridge=1e12, start=start, **{"lambda": 0.7}), tmp_path / "refit")
    if start == "average":
        base, mean = three[0].state, merged(of(three, "linear", weight=1.0), tmp_path / "linear")
        expected = {name: base[name] + 0.7 * (mean[name] - base[name]) for name in base}
    else:
        delegate = start.removeprefix("calibrated_")
        expected = merged(of(three, delegate, **{"lambda": 0.7}, **calibration), tmp_path / "delegate")
    for name in (name for name in expected if "proj" in name):
        torch.testing.assert_close(ours[name], expected[name], atol=1e-5, rtol=1e-4)


def losses_of(path: Path, file: Path, rows: slice) -> Tensor:
    """Of each text."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([json.loads(line)["input_ids"] for line in file.read_text().splitlines()])[rows]
    with torch.no_grad():
        return torch.stack([model(row, labels=row).loss for row in ids.split(1)]).double()


@pytest.mark.slow
def test_samples_held_out_are_the_next_of_the_file(
    three: list[Checkpoint], forty_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses that the report names are those of the merges on them, however many logits these have."""
    monkeypatch.setattr("rotation_merge.run.evaluate.MOST_LOGITS", 100)
    merged(on_texts(three, forty_texts), tmp_path / "refit")
    merged(of(three, "linear", weight=1.0), tmp_path / "linear")
    before, after = (losses_of(tmp_path / name, forty_texts, slice(24, 32)) for name in ("linear", "refit"))
    change = after - before
    margin = t.ppf(0.975, 7) * float(change.std()) / 8**0.5
    words = f"was {before.mean():.4f} before the refit and {after.mean():.4f} after it"
    assert f"{words} (a difference of {change.mean():.4f} ± {margin:.2g})" in notes_of(tmp_path / "refit")


@pytest.mark.parametrize(("samples", "held_out", "ridge"), [(24, 24, 0.01), (24, 24, 1e12), (6, None, 0.01)])
def test_texts_that_models_write_judge_a_refit_too(
    samples: int, held_out: int | None, ridge: float, three: list[Checkpoint], tmp_path: Path
) -> None:
    """Each of three writes a third more than it is solved on, eight at least; of few there is nothing to judge by. A
    gain within its margin is not called one."""
    merged(of(three, "refit", weight=1.0, data="self", samples=samples, ridge=ridge), tmp_path / "refit")
    pattern = r"On (\d+) held-out samples the loss was .* \(a difference of (\S+) ± ([^)]+)\)(; [^.]*)?\."
    found = re.findall(pattern, notes_of(tmp_path / "refit"))
    assert [count for count, *_ in found] == ([] if held_out is None else [str(held_out)])
    for _, difference, margin, words in found:
        gain = -float(difference)
        assert (words == "; no clear gain") == (0 <= gain <= float(margin))
        assert words or gain > float(margin)


@pytest.mark.slow
def test_a_refit_that_is_worse_is_not_written(three: list[Checkpoint], tmp_path: Path) -> None:
    """What it started from is. Two words, again and again, are all that the refit sees; what the average itself would
    write judges it, so that every change is for the worse."""
    plain = merged(of(three, "linear", weight=1.0, dtype="bfloat16"), tmp_path / "linear")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "linear", dtype=torch.float32)
    rows = torch.arange(3, 19)[:, None]
    with torch.no_grad():
        while rows.shape[1] < 12:
            rows = torch.cat([rows, average(rows).logits[:, -1:].argmax(-1)], 1)
    file = texts(tmp_path / "texts.jsonl", [[3, 4] * 6] * 24 + rows.tolist())
    result = merged(on_texts(three, file, ridge=1e-9, dtype="bfloat16"), tmp_path / "refit")
    torch.testing.assert_close(result, plain, atol=1e-4, rtol=0.02)
    assert "that is worse, so the average was written" in notes_of(tmp_path / "refit")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoders_with_decoders_on_records_with_labels(family: str, tmp_path: Path) -> None:
    """What a decoder reads comes from its labels; names that the model has beside its file's are no matter."""
    case = next(case for case in ALL if case.family == family)
    models = [checkpoint(family, case.name, tmp_path / str(seed), seed) for seed in (0, 1)]
    row = {"input_ids": [3, 4, 5, 6, 7], "labels": [8, 9, 10]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    document = refit_recipe(*models, data=str(tmp_path / "rows.jsonl"))
    assert merged(document, tmp_path / "out").keys() == models[0].state.keys()
