"""`rotation-merge merge` refuses models whose token ids differ, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cli_support import CHECKPOINTS, run
from plugin_support import one_error, state, write_state

ENGLISH, C = (str(CHECKPOINTS / f"llama-0-{domain}") for domain in ("english", "c"))
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


def test_other_token_ids_are_refused(tmp_path: Path) -> None:
    other = permuted(C, tmp_path / "other")
    line = one_error(run("merge", ENGLISH, other, tmp_path / "out").output)
    assert "tokens have other ids than in" in line
    assert line.endswith("merge them by a recipe with 'tokenizer: {source: base}'")
    assert not (tmp_path / "out").exists()
