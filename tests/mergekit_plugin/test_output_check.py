"""What a merge writes is looked at when it is written: ours always, other methods' where the environment asks."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from faults_support import edit, read, rewrite, state, whole
from transformers import AutoTokenizer, LlamaForCausalLM

from rotation_merge.mergekit_plugin.run import merge_recipe
from rotation_merge.report.integrity import check_folder

Parents = tuple[Path, Path]


@pytest.fixture
def parents(tmp_path: Path) -> Parents:
    """A base and a fine-tune of it, with everything that belongs beside weights."""
    base = whole("llama", tmp_path / "base")
    tuned = Path(shutil.copytree(base, tmp_path / "tuned"))
    rewrite(tuned, {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in state(tuned).items()})
    return base, tuned


def merged(parents: Parents, out: Path, method: str = "rotation_merge", **keys: Any) -> Path:
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in parents]
    recipe = {"merge_method": method, "models": models, "dtype": "float32", **keys}
    if method == "rotation_merge":
        recipe |= {"base_model": str(parents[0]), "parameters": {"delegate": "linear"}}
    merge_recipe(yaml.safe_dump(recipe), str(out), tokenizer=True)
    return out


def notes(out: Path) -> str:
    return "\n".join(read(out / "rotation_merge.json")["notes"])


def test_small_files_come_along(parents: Parents, tmp_path: Path) -> None:
    """Those that mergekit leaves behind where it writes a tokenizer of its own, too."""
    (parents[0] / "processor_config.json").write_text("{}")
    out = merged(parents, tmp_path / "out", tokenizer={"source": "union"})
    assert {"processor_config.json", "generation_config.json", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
    assert "processor_config.json" in notes(out)
    assert check_folder(str(out), list(map(str, parents))) == []


def test_added_tokens_and_other_positions(parents: Parents, tmp_path: Path) -> None:
    """A union of vocabularies, of unlike RoPE and context lengths: it loads, and the card says whose is what."""
    base, tuned = parents
    vocabulary = read(tuned / "tokenizer.json")
    tensors, rows = state(tuned), read(tuned / "config.json")["vocab_size"]
    vocabulary["model"]["vocab"] |= {"<tool>": rows, "<think>": rows + 1}
    (tuned / "tokenizer.json").write_text(json.dumps(vocabulary))
    wider = {n: torch.cat([t, torch.ones(2, t.shape[1])]) for n, t in tensors.items() if t.shape[0] == rows}
    rewrite(tuned, {**tensors, **wider})
    rope = {**read(tuned / "config.json")["rope_parameters"], "rope_theta": 500000.0}
    edit(tuned, vocab_size=rows + 2, rope_parameters=rope, max_position_embeddings=4096)
    out = merged(parents, tmp_path / "out", tokenizer={"source": "union"})
    said = notes(out)
    for words in (
        "2 tokens that only",
        "<tool>",
        "'max_position_embeddings' is 4096",
        "rope_theta",
        "uses the anchor's positions",
    ):
        assert words in said, words
        assert words.strip("<>") in (out / "README.md").read_text()
    model = LlamaForCausalLM.from_pretrained(out)
    assert model.config.max_position_embeddings == read(base / "config.json")["max_position_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    row = model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("<tool>")]
    torch.testing.assert_close(row, torch.ones_like(row))
    assert check_folder(str(out), list(map(str, parents))) == []


def test_what_a_parent_has_wrong_is_said(parents: Parents, tmp_path: Path) -> None:
    edit(parents[0], "generation_config.json", eos_token_id=128009)
    out = merged(parents, tmp_path / "out")
    assert "special id beyond the vocabulary" in notes(out)
    assert "as in a parent" in notes(out)
    assert "special id beyond the vocabulary" in (out / "README.md").read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_other_methods_where_the_environment_asks(
    asked: bool, parents: Parents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if asked:
        monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    for parent in parents:  # without base_model, mergekit takes the config of either
        edit(parent, bos_token_id=151999)
    with caplog.at_level(logging.INFO):
        out = merged(parents, tmp_path / "out", "linear")
    assert ("special id beyond the vocabulary" in caplog.text) == asked
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 151999
