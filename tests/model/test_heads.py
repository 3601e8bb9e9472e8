"""One merged body under every donor's head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import run
from plugin_support import load, make, merged, mergekit_yaml, one_error, write_recipe
from residual_support import checkpoint, recipe, twin
from safetensors.torch import load_file, save_file
from tiny_models import inputs


def heads_recipe(anchor: Path, *donors: Path, **parameters: object) -> dict:
    share = 1 / (1 + len(donors))
    return {
        "merge_method": "rotation_merge",
        "base_model": str(anchor),
        "models": [{"model": str(path), "parameters": {"weight": share}} for path in (anchor, *donors)],
        "parameters": {"delegate": "linear", "heads_of": "each", **parameters},
        "dtype": "float32",
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--out-shard-size", "5K"), ("--no-safe-serialization",)])
def test_classifiers_of_different_tasks_share_a_body(options: tuple[str, ...], tmp_path: Path):
    """Whatever the body is written as: what stands under heads/ loads by itself, and is the body, each file its own."""
    anchor, *donors = (make("roberta", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3, 5))
    made, out = heads_recipe(anchor, *donors), tmp_path / "out"
    checked = run("check", write_recipe(made, tmp_path / "recipe.yml"))
    assert checked.exit_code == 0, checked.output
    done = mergekit_yaml(made, out, *options)
    assert done.exit_code == 0, done.output
    body, head = (load(str(path)).state_dict()["classifier.out_proj.weight"] for path in (out, anchor))
    assert torch.equal(body, head)
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    for donor, labels in zip(donors, (3, 5), strict=True):
        folder = out / "heads" / donor.name
        body, found, own = (load(str(path)).state_dict() for path in (out, folder, donor))
        assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in own.items()}
        for name, tensor in found.items():
            assert torch.equal(tensor, (own if name.startswith("classifier.") else body)[name])
        assert load(str(folder))(input_ids=ids).logits.shape == (2, labels)
        assert len(json.loads((folder / "config.json").read_text())["id2label"]) == labels
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        assert (len(files) > 2) == ("5K" in options)
        assert all(path.stat().st_nlink == 1 for path in files)


@pytest.mark.slow
def test_a_refit_solves_the_body_that_heads_of_other_sizes_share(tmp_path: Path):
    """The merge runs under the anchor's head, as it is written; every model answers under its own, which is solved."""
    anchor, donor = (make("roberta", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3))
    made = heads_recipe(anchor, donor, delegate="refit", targets="own")
    for number, model in enumerate(made["models"]):
        ids = torch.randint(3, 40, (6, 8), generator=torch.Generator().manual_seed(number))
        np.savez(tmp_path / f"{number}.npz", input_ids=ids.numpy())
        model["parameters"]["data"] = str(tmp_path / f"{number}.npz")
    kept = merged({**made, "parameters": {**made["parameters"], "exclude": "classifier"}}, tmp_path / "kept")
    body = merged(made, tmp_path / "out")
    assert all(torch.equal(body[name], kept[name]) for name in body)
    head = load_file(anchor / "model.safetensors")["classifier.out_proj.weight"]
    assert torch.equal(body["classifier.out_proj.weight"], head)
    answers = [
        load(str(path))(input_ids=ids).logits
        for path in (donor, *(tmp_path / name / "heads" / "3" for name in ("out", "kept")))
    ]
    assert answers[0].shape == (6, 3)
    solved, plain = (float((found - answers[0]).norm()) for found in answers[1:])
    assert solved < 0.8 * plain
    own = load_file(donor / "model.safetensors")["classifier.out_proj.weight"]
    assert torch.equal(
        load_file(tmp_path / "kept" / "heads" / "3" / "model.safetensors")["classifier.out_proj.weight"], own
    )


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["rotation", "permutation"])
def test_heads_move_with_their_donors(residual: str, tmp_path: Path):
    """A twin moved in the stream: under its head the merged body computes what the anchor does."""
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin", residual)
    made = recipe(anchor, moved, residual=residual, heads_of="each")
    merged(made, tmp_path / "out")
    assert anchor.differs(tmp_path / "out" / "heads" / "twin") < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
def test_heads_of_other_sizes_are_not_compared(mean: bool, tmp_path: Path):
    """Streams are matched on bodies: under a head of two classes more the merged one computes what the twin does."""
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    other = twin(anchor, tmp_path / "twin", "rotation")
    moved = other.path
    tensors, config = load_file(moved / "model.safetensors"), json.loads((moved / "config.json").read_text())
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = torch.cat([tensors[name], 2 * tensors[name][:2]])
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    config["id2label"] = {str(i): f"own {i}" for i in range(len(tensors["classifier.bias"]))}
    config["label2id"] = {name: int(i) for i, name in config["id2label"].items()}
    (moved / "config.json").write_text(json.dumps(config))
    made = recipe(anchor, other, residual="rotation", heads_of="each", anchor="mean" if mean else "base")
    merged(made, tmp_path / "out")
    found, wanted = (load(str(path)) for path in (tmp_path / "out" / "heads" / "twin", moved))
    given = {name: tensor.float() for name, tensor in inputs(anchor.case, wanted).items()}
    torch.testing.assert_close(found(**given).logits, wanted(**given).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_heads_do_not_follow_plans_of_the_stream(tmp_path: Path):
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin", "none", heads="none", attention="none", ffn="permutation", scaling=False)
    made = heads_recipe(anchor.path, moved.path, delegate="ot_fusion", plan="hard", attention="none", ffn="none")
    assert "add 'stream: identity'" in one_error(mergekit_yaml(made, tmp_path / "refused").output)
    assert not (tmp_path / "refused").exists()
    made["parameters"] |= {"stream": "identity", "scaling": False}
    merged(made, tmp_path / "out")
    assert anchor.differs(tmp_path / "out" / "heads" / "twin") < 1e-3


def test_vocabularies_must_stay(tmp_path: Path):
    anchor, donor = (make("roberta", tmp_path / str(n), seed=n) for n in (0, 1))
    made = heads_recipe(anchor, donor) | {"tokenizer_source": "base"}
    done = mergekit_yaml(made, tmp_path / "out")
    assert done.exit_code == 2
    assert "leave out one of the two" in one_error(done.output)
    assert not (tmp_path / "out").exists()
