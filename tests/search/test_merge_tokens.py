"""`rotation-merge merge` of models whose token ids differ, or that divide text differently: each is judged as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, parsed, run
from plugin_support import state, write_state
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rotation_merge.search.candidates import Planner

ENGLISH, C = (str(CHECKPOINTS / f"llama-0-{domain}") for domain in ("english", "c"))
FLAGS = ("--samples", "24", "--length", "48", "--batch-size", "4", "--anyway")
TEXTS = ("--data", "demo:english", "--data", "demo:c")
MOVED = 200


def permuted(model: str, folder: Path) -> Path:
    """The same function under other token ids."""
    rows = torch.randperm(MOVED, generator=torch.Generator().manual_seed(1))
    tensors = state(Path(model))
    order = torch.cat([rows, torch.arange(MOVED, len(tensors["model.embed_tokens.weight"]))])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][order].contiguous()
    write_state(tensors, Path(model), folder)
    content = json.loads((Path(model) / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    new = {int(old): number for number, old in enumerate(order.tolist())}
    content["model"]["vocab"] = {token: new[number] for token, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text((Path(model) / "tokenizer_config.json").read_text())
    return folder


def dividing_otherwise(model: str, folder: Path) -> Path:
    """The same model, which reads `th` as one token: that of a byte that no text has."""
    write_state(state(Path(model)), Path(model), folder)
    content = json.loads((Path(model) / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    unused = next(token for token, number in vocabulary.items() if number == 254)
    vocabulary["th"] = vocabulary.pop(unused)
    content["model"]["merges"] = [["t", "h"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((Path(model) / "tokenizer_config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return permuted(C, tmp_path_factory.mktemp("tokens") / "other")


def merge(*arguments: object) -> tuple[dict[str, Any], str]:
    done = run("merge", *arguments, *FLAGS, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def scores(found: dict[str, Any]) -> list[float]:
    return [figures["score"] for figures in (*found["parents"].values(), found["ensemble"], found["plain"])]


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plain merge of the two with the same ids."""
    with pytest.MonkeyPatch.context() as patch:
        real = Planner.candidates
        patch.setattr(Planner, "candidates", lambda self: real(self)[:1])
        return merge(ENGLISH, C, tmp_path_factory.mktemp("same") / "out", *TEXTS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("data", [TEXTS, ("--data", "self")])
def test_permuted_ids_change_nothing(data: tuple[str, ...], other: Path, same: dict[str, Any], tmp_path: Path) -> None:
    """Parents, ensemble and plain merge are worth what they are worth with the same ids."""
    found, said = merge(ENGLISH, other, tmp_path / "out", *data)
    if data == TEXTS:
        assert scores(found) == pytest.approx(scores(same), abs=1e-4)
    assert max(scores(found)) < 2.5, "wrong ids give more than four"
    assert "token ids differ: samples and merges match them by token" in said
    assert {tried["name"] for tried in found["tried"]} == {"plain", "regmean"}
    assert "the models' token ids differ" in found["left_out"]["refits"]
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert recipe["tokenizer"] == {"source": "base"}
    text = "int main(void)"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(ENGLISH)(text)


@pytest.mark.slow
def test_a_copy_under_other_ids_is_its_model(other: Path, tmp_path: Path) -> None:
    found, _ = merge(C, other, tmp_path / "out", "--data", "demo:c", "--budget", "1s")
    parents = [figures["score"] for figures in found["parents"].values()]
    assert parents[0] == pytest.approx(parents[1], abs=1e-5)
    assert found["plain"]["score"] == pytest.approx(parents[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["demo:english", "self"])
def test_models_that_divide_text_differently_are_judged_by_byte(data: str, tmp_path: Path) -> None:
    other = dividing_otherwise(C, tmp_path / "other")
    found, said = merge(ENGLISH, other, tmp_path / "out", "--data", data, "--budget", "1s")
    assert found["unit"] == "loss (nats a byte)"
    assert found["ensemble"] is None
    assert found["best"]["accuracy"] is None
    assert "losses are nats a byte, and there is no ensemble" in said
    parents = [figures["score"] for figures in found["parents"].values()]
    assert 0 < min(parents) < max(parents) < 6
    bytes_alone = parsed("evaluate", ENGLISH, "--data", "demo:english", "--limit", "64")[0]["loss"]
    if data == "demo:english":  # whose tokens are bytes
        assert parents[0] == pytest.approx(bytes_alone, rel=0.3)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nats a byte" in card
    assert "ensemble of all" not in card
