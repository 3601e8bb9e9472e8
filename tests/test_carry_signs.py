"""Of a carried change those entries stay that most samples' gradients agree with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import run
from plugin_support import make, state
from recipe_models import stand_in

from rotation_merge.averaging.carry_signs import agreeing, votes
from rotation_merge.samples.functions import load


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    file = tmp_path_factory.mktemp("signs") / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


def test_votes_are_signs_of_steps_that_make_each_example_likelier(tmp_path: Path) -> None:
    model = load(str(make("llama", tmp_path / "model")))
    rows = torch.arange(24).view(3, 8) % 7
    found = votes(model, [{"input_ids": row[None], "labels": row[None]} for row in rows], "next token")
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = torch.zeros_like(found[name])
    for row in rows:  # transformers' own loss
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        wanted -= model.get_parameter(name).grad.sign()
    assert torch.equal(found[name], wanted)
    assert int(wanted.abs().max()) == len(rows)


def test_what_is_kept_is_what_most_want() -> None:
    change = {"w": torch.tensor([0.5, -0.5, 0.25, 0.0, -1.0])}
    kept, share = agreeing(change, {"w": torch.tensor([3.0, 1.0, 0.0, 2.0, -1.0])})
    assert kept["w"].tolist() == [0.5, 0.0, 0.0, 0.0, -1.0]
    assert share == 0.5


def test_the_new_base_changes_only_where_weights_alone_would_change_it(texts: str, tmp_path: Path) -> None:
    models = {name: stand_in(f"org/{name}", tmp_path) for name in ("old", "new", "tuned")}
    pair = ("--from", models["old"], "--to", models["new"], "--heads", "permutation", "--scale", 1)
    assert run("carry", models["tuned"], tmp_path / "weights", *pair).exit_code == 0
    samples = ("--data", texts, "--samples", 32)
    done = run("carry", models["tuned"], tmp_path / "signs", *pair, "--carry", "signs", *samples)
    assert done.exit_code == 0, done.output
    assert "go where most of" in done.output
    new, whole, some = (state(path) for path in (models["new"], tmp_path / "weights", tmp_path / "signs"))
    changed = kept = 0
    for name, tensor in some.items():
        stays = tensor == new[name]
        near = torch.isclose(tensor, whole[name], atol=1e-6, rtol=1e-4)
        assert bool((stays | near).all()), name
        changed += int((~torch.isclose(whole[name], new[name], atol=1e-6)).sum())
        kept += int((~stays).sum())
    assert 0.2 * changed < kept < 0.8 * changed
    refused = run("carry", models["tuned"], tmp_path / "lora", *pair, "--carry", "signs", *samples, "--lora", 4)
    assert refused.exit_code == 2
    assert "no adapter of low rank can" in refused.output
    assert not (tmp_path / "lora").exists()


def test_samples_without_labels_say_what_to_do(tmp_path: Path) -> None:
    models = [make("vit", tmp_path / name, seed) for seed, name in enumerate(("old", "new", "tuned"))]
    pixels = np.zeros((32, *shape_of(models[0])), dtype=np.float32)
    np.savez(tmp_path / "images.npz", pixel_values=pixels)
    asked = ("--from", models[0], "--to", models[1], "--carry", "signs", "--data", tmp_path / "images.npz")
    done = run("carry", models[2], tmp_path / "out", *asked, "--samples", 32)
    assert done.exit_code == 2
    assert "carry by weights alone" in done.output
    assert not (tmp_path / "out").exists()


def shape_of(model: Path) -> tuple[int, int, int]:
    config = json.loads((model / "config.json").read_text())
    return config["num_channels"], config["image_size"], config["image_size"]
