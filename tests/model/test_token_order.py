"""Tokens at other ids in vocabularies of one size: what averages by id is refused, every other path says so, and
streams are matched on what is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of
from plugin_support import error_of_merge, load, lora, merged, with_tokenizer, write_recipe
from residual_support import Checkpoint, checkpoint, recipe, twin
from torch import Tensor

import rotation_merge as rm

WARNED, REMEDY = "have other ids than in", "tokenizer: {source: base}"
BY_TOKENS = {"tokenizer": {"source": "base"}}
VOCABULARIES = ("model.embed_tokens.weight", "lm_head.weight")
Models = tuple[Checkpoint, Checkpoint, Tensor]


def reordered(model: Checkpoint, rows: Tensor, folder: Path) -> Checkpoint:
    tensors = model.state
    return model.write(tensors | {name: tensors[name][rows].contiguous() for name in VOCABULARIES}, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An anchor, a twin of it in another stream whose tokens have other ids, and those ids."""
    folder = tmp_path_factory.mktemp("tokens")
    anchor = checkpoint("llama", "llama", folder / "anchor")
    rows = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    donor = reordered(twin(anchor, folder / "moved", "rotation"), rows, folder / "donor")
    words = [f"w{i}" for i in range(50)]
    with_tokenizer(words, anchor.path)
    with_tokenizer([words[i] for i in rows], donor.path)
    return anchor, donor, rows


def shown(*command: Any, code: int = 0) -> str:
    """The words of a command's output."""
    return " ".join(output_of(*command, code=code).split())


def sliced(plain: dict[str, Any], anchor: Checkpoint, donor: Checkpoint, at: int) -> dict[str, Any]:
    """The recipe with three layers, the donor's in one of them only; the last one takes the head along."""
    sources = [[anchor, donor] if i == at else [anchor] for i in range(3)]
    layers = [[{**plain["models"][0], "model": str(m.path), "layer_range": [1, 2]} for m in piece] for piece in sources]
    return {**{k: v for k, v in plain.items() if k != "models"}, "slices": [{"sources": piece} for piece in layers]}


@pytest.mark.slow
def test_averages_by_id_are_refused(models: Models, tmp_path: Path) -> None:
    """By `check` and by every way to run a recipe; what takes no row of the donor's, or goes by tokens, is not."""
    anchor, donor, _ = models
    plain, file, out = recipe(anchor, donor, residual="none"), tmp_path / "recipe.yml", tmp_path / "refused"
    last, middle = (sliced(plain, anchor, donor, at) for at in (2, 1))
    parameters = plain["parameters"]
    for refused in (plain, last, {**plain, "parameters": {**parameters, "residual": "rotation"}}):
        errors = [shown("check", write_recipe(refused, file), code=1)]
        errors += [error_of_merge(refused, out, *flags) for flags in ((), (UNSAFE,))]
        assert all(WARNED in error and REMEDY in error for error in errors)
    without_rows = {**plain, "parameters": {**parameters, "exclude": "embed_tokens,lm_head"}}
    for allowed in ({**plain, **BY_TOKENS}, without_rows, middle):
        assert WARNED not in shown("check", write_recipe(allowed, file))


UNSAFE = "--unsafe-truncate-embeddings"


@pytest.mark.slow
def test_every_other_path_warns(models: Models, tmp_path: Path) -> None:
    anchor, donor, _ = models
    plain, out = recipe(anchor, donor, residual="none"), tmp_path / "aligned"
    align = ("align", anchor.path, donor.path)
    inspect = ("inspect", write_recipe(plain, tmp_path / "recipe.yml"))
    for command in (inspect, align, (*align, out, "--no-verify")):
        assert WARNED in shown(*command), command
    for name in ("README.md", "rotation_merge.json"):
        assert WARNED in (out / name).read_text(), name
    assert WARNED not in shown("inspect", write_recipe({**plain, **BY_TOKENS}, tmp_path / "recipe.yml"))


@pytest.mark.slow
def test_streams_are_matched_on_shared_tokens(models: Models, tmp_path: Path) -> None:
    """The twin comes into the anchor's coordinates, its own tokens where they were, by command, Python and recipe."""
    anchor, donor, rows = models
    align, options = ("align", anchor.path, donor.path), ("--residual", "rotation", "--heads", "permutation")
    assert "share 50 tokens" in shown(*align, tmp_path / "out", *options)
    alignment = rm.align(anchor.path, donor.path, residual="rotation", heads="permutation")
    notes = " ".join(alignment.report.notes)
    assert "share 50 tokens" in notes
    assert WARNED in notes
    written, moved = Checkpoint(anchor.case, tmp_path / "out").state, alignment.apply(donor.path).state_dict()
    assert all(torch.equal(moved[name], tensor) for name, tensor in written.items())
    folded = rm.Alignment.random(str(anchor.path), residual="rotation").apply_anchor(str(anchor.path)).state_dict()
    for name, tensor in written.items():
        expected = folded[name][rows] if name in VOCABULARIES else folded[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4)
    assert "(100% less)" in shown(*align, *options)
    for name, tensor in merged(recipe(anchor, donor, residual="rotation") | BY_TOKENS, tmp_path / "merged").items():
        torch.testing.assert_close(tensor, folded[name], rtol=1e-3, atol=1e-4)


def test_averages_of_our_own_go_by_tokens_or_say_that_they_cannot(models: Models, tmp_path: Path) -> None:
    """Plans of the stream come from the tokens that both have; diagonals of rows, and activations, are refused."""
    anchor, donor, rows = models
    still = {"attention": "none", "heads": "none", "scaling": False}
    moved = reordered(twin(anchor, tmp_path / "moved", "permutation", ffn="permutation", **still), rows, tmp_path / "o")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (moved.path / file).write_bytes((donor.path / file).read_bytes())
    plain = recipe(anchor, moved, residual="none") | BY_TOKENS
    plain["parameters"] |= {**still, "ffn": "none", "delegate": "ot_fusion", "plan": "hard"}
    for name, tensor in merged(plain, tmp_path / "fused").items():
        torch.testing.assert_close(tensor, anchor.state[name].float(), rtol=1e-3, atol=1e-4)
    refused = {"without 'data'": {**plain["parameters"], "data": "self"}, "regmean": still | {"delegate": "fisher"}}
    for remedy, parameters in refused.items():
        error = error_of_merge({**plain, "parameters": parameters}, tmp_path / "refused")
        assert "its tokens are not those of" in error
        assert remedy in error


@pytest.mark.slow
def test_an_adapter_is_carried_by_its_tokens(models: Models, tmp_path: Path) -> None:
    """Embedding and head included; nothing is said of ids, and that samples cannot measure it is."""
    anchor, donor, rows = models
    lora(tmp_path / "lora", donor.path, target_modules=["embed_tokens", "lm_head", "q_proj", "down_proj"])
    bases = ("--from", donor.path, "--to", anchor.path)
    output = shown("carry", tmp_path / "lora", *bases, "--heads", "permutation", tmp_path / "out")
    assert WARNED not in output
    assert "other token ids" in output
    ids = torch.arange(20)[None]
    with torch.no_grad():
        tuned = load(f"{donor.path}+{tmp_path / 'lora'}")(input_ids=ids).logits
        carried = load(f"{anchor.path}+{tmp_path / 'out'}")(input_ids=rows[ids]).logits
        plain = load(str(donor.path))(input_ids=ids).logits
    assert float((plain - tuned).abs().max()) > 0.1
    torch.testing.assert_close(carried[..., rows], tuned, rtol=1e-3, atol=1e-2)
