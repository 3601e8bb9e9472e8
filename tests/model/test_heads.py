"""One merged body under every donor's head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import run
from plugin_support import error_of_merge, load, make, merged, recipe_for, state, write_recipe
from residual_support import checkpoint, recipe, twin
from safetensors.torch import load_file, save_file
from tiny_models import inputs

import rotation_merge as rm


def heads_recipe(anchor: Path, *donors: Path, **parameters: object) -> dict[str, Any]:
    plain: dict[str, Any] = recipe_for("linear", anchor, *donors)
    return {**plain, "parameters": {"delegate": "linear", "heads_of": "each", **parameters}, "dtype": "float32"}


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--out-shard-size", "5K"), ("--no-safe-serialization",)])
def test_classifiers_of_different_tasks_share_a_body(options: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever the body is written as: each folder under heads/ loads by itself, and is the body, each file its own."""
    anchor, *donors = (make("roberta", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3, 5))
    plain, out = heads_recipe(anchor, *donors), tmp_path / "out"
    assert run("check", write_recipe(plain, tmp_path / "recipe.yml")).exit_code == 0
    merged(plain, out, *options)
    body, head = (load(str(path)).state_dict() for path in (out, anchor))
    assert torch.equal(body["classifier.out_proj.weight"], head["classifier.out_proj.weight"])
    for donor, labels in zip(donors, (3, 5), strict=True):
        folder = out / "heads" / donor.name
        headed, stored = (load(str(path)).state_dict() for path in (folder, donor))
        for name, tensor in headed.items():
            expected = (stored if name.startswith("classifier.") else body)[name]
            assert tensor.dtype == stored[name].dtype
            assert torch.equal(tensor, expected)
        assert load(str(folder))(input_ids=tokens(0, 2, 6)).logits.shape == (2, labels)
        assert len(json.loads((folder / "config.json").read_text())["id2label"]) == labels
        files = list(folder.glob("*.safetensors"))
        assert (len(files) > 2) == ("5K" in options)
        assert all(path.stat().st_nlink == 1 for path in files)


def test_another_body_has_none_of_the_heads(tmp_path: Path) -> None:
    """Averaged again, or moved, a model is no longer the body that stands under them; nor do heads have heads."""
    anchor, donor = (str(make("roberta", tmp_path / str(n), seed=n, num_labels=2)) for n in (0, 1))
    body = rm.average([anchor, donor], heads_of="each")
    assert list(body.heads) == list(body.to(torch.float64).heads) == ["1"]
    again = rm.average([anchor, body], heads_of="each")
    moved = rm.align(anchor, body, heads="permutation").apply(body)
    assert [view.heads for view in (rm.average([body, donor]), moved, *again.heads.values())] == [{}, {}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(("ridge", "counts"), [(0.01, (6, 6)), ("auto", (9, 3))])
def test_a_refit_solves_the_body_that_heads_of_other_sizes_share(
    ridge: float | str, counts: tuple[int, int], tmp_path: Path
) -> None:
    """The merge runs under the anchor's head, as it is written; every model answers under its own, which is solved.
    Three samples of a donor are too few to choose a ridge for its head."""
    anchor, donor = (make("roberta", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3))
    plain, weight = heads_recipe(anchor, donor, delegate="refit", targets="own"), "classifier.out_proj.weight"
    plain["parameters"]["ridge"] = ridge
    for number, model in enumerate(plain["models"]):
        np.savez(tmp_path / f"{number}.npz", input_ids=tokens(number, counts[number], 8).numpy())
        model["parameters"]["data"] = str(tmp_path / f"{number}.npz")
    excluded = merged({**plain, "parameters": {**plain["parameters"], "exclude": "classifier"}}, tmp_path / "excluded")
    body = merged(plain, tmp_path / "out")
    assert all(torch.equal(body[name], excluded[name]) for name in body)
    assert torch.equal(body[weight], state(anchor)[weight])
    heads = [tmp_path / name / "heads" / "3" for name in ("out", "excluded")]
    answer, *answers = (load(str(path))(input_ids=tokens(1, counts[1], 8)).logits for path in (donor, *heads))
    solved, stored = (float((logits - answer).norm()) for logits in answers)
    assert solved < 0.8 * stored
    assert torch.equal(state(heads[1])[weight], state(donor)[weight])


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_samples_held_out_judge_a_refit_under_every_head(right: bool, tmp_path: Path) -> None:
    """By the labels of its own task: what its model says, or what that finds least likely. Then the average is written,
    under heads that are not solved either."""
    paths = [make("roberta", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3)]
    average = merged(heads_recipe(*paths), tmp_path / "plain")
    recipe = heads_recipe(*paths, delegate="refit", targets="own", samples=120)
    for number, (path, entry) in enumerate(zip(paths, recipe["models"], strict=True)):
        ids, data = tokens(number, 160, 8), tmp_path / f"{number}.npz"
        logits = load(str(path))(input_ids=ids).logits
        np.savez(data, input_ids=ids, labels=(logits if right else -logits).argmax(-1))
        entry["parameters"] = {"weight": 0.5, "data": str(data)}
    result, folders = merged(recipe, tmp_path / "refit"), [tmp_path / name for name in ("plain", "refit")]

    def loss(merge: Path, number: int) -> float:
        with np.load(tmp_path / f"{number}.npz") as file:
            rows = {name: torch.tensor(file[name])[120:] for name in file.files}
        return float(load(str(merge / "heads" / "3" if number else merge))(**rows).loss)

    before, after = (sum(loss(folder, number) for number in range(2)) / 2 for folder in folders)
    report = (tmp_path / "refit" / "rotation_merge.json").read_text()
    found = re.findall(r"On 80 held-out samples the loss was (\S+) before the refit and (\S+) after", report)
    assert [first for first, _ in found] == [f"{before:.4f}"]
    if right:
        assert after < before
        assert found[0][1] == f"{after:.4f}"
        return
    assert float(found[0][1]) > before
    torch.testing.assert_close(result, average)
    torch.testing.assert_close(*(state(folder / "heads" / "3") for folder in reversed(folders)))


@pytest.mark.parametrize("heads_of", ["each", "base"])
def test_of_samples_without_labels_none_is_held_out(heads_of: str, tmp_path: Path) -> None:
    """A file of as many as are asked for gives what the first ones of a longer file do."""
    paths = [make("roberta", tmp_path / str(n), seed=n, num_labels=2) for n in (2, 3)]
    results = []
    for count in (24, 40):
        recipe = heads_recipe(*paths, delegate="refit", targets="own", samples=24, heads_of=heads_of)
        for number, entry in enumerate(recipe["models"]):
            data = tmp_path / f"{number} of {count}.npz"
            np.savez(data, input_ids=tokens(number, 40, 8)[:count])
            entry["parameters"] = {"weight": 0.5, "data": str(data)}
        results.append(merged(recipe, tmp_path / str(count)))
    assert all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("residual", "anchor_is", "wider"),
    [("permutation", "base", False), ("rotation", "base", True), ("rotation", "mean", True)],
)
def test_heads_move_with_their_donors(residual: str, anchor_is: str, wider: bool, tmp_path: Path) -> None:
    """Under the head of a twin in another stream, or one of two classes more, the body computes what the twin does."""
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin", residual)
    if wider:
        tensors = load_file(moved.path / "model.safetensors")
        for name in ("classifier.weight", "classifier.bias"):
            tensors[name] = torch.cat([tensors[name], 2 * tensors[name][:2]])
        save_file(tensors, moved.path / "model.safetensors", {"format": "pt"})
        labels = {str(i): f"own {i}" for i in range(len(tensors["classifier.bias"]))}
        config = moved.config | {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
        (moved.path / "config.json").write_text(json.dumps(config))
    merged(recipe(anchor, moved, residual=residual, heads_of="each", anchor=anchor_is), tmp_path / "out")
    result, expected = (load(str(path)) for path in (tmp_path / "out" / "heads" / "twin", moved.path))
    batch = {name: tensor.float() for name, tensor in inputs(anchor.case, expected).items()}
    torch.testing.assert_close(result(**batch).logits, expected(**batch).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_heads_do_not_follow_plans_of_the_stream(tmp_path: Path) -> None:
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin", "none", heads="none", attention="none", ffn="permutation", scaling=False)
    plain = heads_recipe(anchor.path, moved.path, delegate="ot_fusion", plan="hard", attention="none", ffn="none")
    assert "add 'stream: identity'" in error_of_merge(plain, tmp_path / "refused")
    plain["parameters"] |= {"stream": "identity", "scaling": False}
    merged(plain, tmp_path / "out")
    assert anchor.differs(tmp_path / "out" / "heads" / "twin") < 1e-3
