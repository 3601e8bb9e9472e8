"""Tokens at other ids in vocabularies of one size: what averages by id is refused, every other path says so, and
streams are matched on what is shared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from carry_support import make_adapter
from cli_support import parsed, run
from plugin_support import load, merged, mergekit_yaml, one_error
from residual_support import Checkpoint, checkpoint, recipe, transport, twin
from test_plugin_inputs import with_tokenizer

import rotation_merge as rm

WARNED = "have other ids than in"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, torch.Tensor]:
    """An anchor, a twin of it in another stream whose tokens have other ids, and those ids."""
    folder = tmp_path_factory.mktemp("tokens")
    anchor = checkpoint("llama", "llama", folder / "anchor")
    moved = twin(anchor, folder / "moved", "rotation")
    rows = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    tensors = moved.state
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][rows].contiguous()
    donor = moved.write(tensors, folder / "donor")
    words = [f"w{i}" for i in range(50)]
    with_tokenizer(words, anchor.path)
    with_tokenizer([words[i] for i in rows], donor.path)
    return anchor, donor, rows


REMEDY = "tokenizer: {source: base}"


def sliced(plain: dict[str, Any], anchor: Checkpoint, donor: Checkpoint, at: int) -> dict[str, Any]:
    """The recipe with three layers, the donor's in one of them only; the last one takes the head along."""
    sources = [[anchor, donor] if i == at else [anchor] for i in range(3)]
    layers = [[{**plain["models"][0], "model": str(m.path), "layer_range": [1, 2]} for m in piece] for piece in sources]
    return {**{k: v for k, v in plain.items() if k != "models"}, "slices": [{"sources": piece} for piece in layers]}


@pytest.mark.slow
def test_what_averages_by_id_is_refused(models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path) -> None:
    """By `check` and by every way to run a recipe; what takes no row of the donor's, or goes by tokens, is not."""
    anchor, donor, _ = models
    plain = recipe(anchor, donor, residual="none")
    last, middle = (sliced(plain, anchor, donor, at) for at in (2, 1))
    file = tmp_path / "recipe.yml"
    for made in (plain, last, {**plain, "parameters": {**plain["parameters"], "residual": "rotation"}}):
        file.write_text(yaml.safe_dump(made))
        done = run("check", file)
        assert done.exit_code == 1, done.output
        assert WARNED in " ".join(done.output.split())
        assert REMEDY in " ".join(done.output.split())
        for flags in ((), ("--unsafe-truncate-embeddings",)):
            said = one_error(mergekit_yaml(made, tmp_path / "refused", *flags).output)
            assert WARNED in said
            assert REMEDY in said
            assert not (tmp_path / "refused").exists()
    rows = {**plain["parameters"], "exclude": "embed_tokens,lm_head"}
    for made in ({**plain, "tokenizer": {"source": "base"}}, {**plain, "parameters": rows}, middle):
        file.write_text(yaml.safe_dump(made))
        done = run("check", file)
        assert done.exit_code == 0, done.output
        assert WARNED not in " ".join(done.output.split())


@pytest.mark.slow
def test_every_other_path_warns(models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path) -> None:
    anchor, donor, _ = models
    made, file = recipe(anchor, donor, residual="none"), tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(made))
    for asked in (("inspect", file), ("align", anchor.path, donor.path)):
        done = run(*asked)
        assert done.exit_code == 0, done.output
        assert WARNED in " ".join(done.output.split()), asked
    assert WARNED in parsed("align", anchor.path, donor.path)["warnings"][0]
    done = run("align", anchor.path, donor.path, tmp_path / "aligned", "--no-verify")
    assert WARNED in " ".join(done.output.split())
    for name in ("README.md", "rotation_merge.json"):
        assert WARNED in (tmp_path / "aligned" / name).read_text(), name
    file.write_text(yaml.safe_dump({**made, "tokenizer": {"source": "base"}}))
    assert WARNED not in " ".join(run("inspect", file).output.split())


def test_no_change_is_taken_from_a_model_of_other_ids(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """Tuned minus origin, row by row: by recipes and commands."""
    anchor, donor, _ = models
    said = one_error(mergekit_yaml(transport(anchor, (donor, anchor)), tmp_path / "out").output)
    assert WARNED in said
    assert "not a fine-tune" in said
    for way in ((), ("--lora", "2")):
        done = run("carry", donor.path, tmp_path / "out", "--from", anchor.path, "--to", anchor.path, *way)
        assert done.exit_code == 2, done.output
        assert "not a fine-tune" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_streams_are_matched_on_shared_tokens(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """The twin comes into the anchor's coordinates, its own tokens where they were, by command, Python and recipe."""
    anchor, donor, rows = models
    turned = ("--residual", "rotation", "--heads", "permutation")
    done = run("align", anchor.path, donor.path, tmp_path / "out", *turned)
    assert done.exit_code == 0, done.output
    assert "share 50 tokens" in done.output
    assert "share 50 tokens" in (tmp_path / "out" / "README.md").read_text()
    alignment = rm.align(anchor.path, donor.path, residual="rotation", heads="permutation")
    assert "share 50 tokens" in " ".join(alignment.report.notes)
    assert WARNED in " ".join(alignment.report.notes)
    found, moved = Checkpoint(anchor.case, tmp_path / "out").state, alignment.apply(donor.path).state_dict()
    assert all(torch.equal(moved[name], tensor) for name, tensor in found.items())
    wanted = rm.Alignment.random(str(anchor.path), residual="rotation").apply_anchor(str(anchor.path)).state_dict()
    for name, tensor in found.items():
        own = wanted[name][rows] if name in ("model.embed_tokens.weight", "lm_head.weight") else wanted[name]
        torch.testing.assert_close(tensor, own, rtol=1e-3, atol=1e-4)
    compared = " ".join(run("align", anchor.path, donor.path, *turned).output.split())
    assert "one model in two coordinate systems" in compared
    assert "share 50 tokens" in compared
    made = {**recipe(anchor, donor, residual="rotation"), "tokenizer": {"source": "base"}}
    for name, tensor in merged(made, tmp_path / "merged").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)


def test_averages_of_our_own_go_by_tokens_or_say_that_they_cannot(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """Plans of the stream come from the tokens that both have; diagonals of rows, and activations, are refused."""
    anchor, donor, rows = models
    still = {"attention": "none", "heads": "none", "scaling": False}
    moved = twin(anchor, tmp_path / "moved", "permutation", ffn="permutation", **still)
    tensors = moved.state
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][rows].contiguous()
    other = moved.write(tensors, tmp_path / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other.path / file).write_bytes((donor.path / file).read_bytes())
    made = {**recipe(anchor, other, residual="none"), "tokenizer": {"source": "base"}}
    made["parameters"] |= {**still, "ffn": "none", "delegate": "ot_fusion", "plan": "hard"}
    for name, tensor in merged(made, tmp_path / "fused").items():
        torch.testing.assert_close(tensor, anchor.state[name].float(), rtol=1e-3, atol=1e-4)
    own = made["parameters"]
    for asked, remedy in (({**own, "data": "self"}, "leave 'data' out"), (still | {"delegate": "fisher"}, "regmean")):
        said = one_error(mergekit_yaml({**made, "parameters": asked}, tmp_path / "refused").output)
        assert "its tokens are not those of" in said
        assert remedy in said
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_an_adapter_is_carried_by_its_tokens(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """Embedding and head included; nothing is said of ids, and that samples cannot measure it is."""
    anchor, donor, rows = models
    lora = make_adapter(anchor.architecture, donor.state, base_model_name_or_path=str(donor.path))
    lora.save_pretrained(str(tmp_path / "lora"))
    pair = ("--from", donor.path, "--to", anchor.path, "--heads", "permutation")
    done = run("carry", tmp_path / "lora", *pair, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert WARNED not in done.output
    assert "tokens at other ids" in done.output
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = load(f"{donor.path}+{tmp_path / 'lora'}")(input_ids=ids).logits
        found = load(f"{anchor.path}+{tmp_path / 'out'}")(input_ids=rows[ids]).logits
        plain = load(str(donor.path))(input_ids=ids).logits
    assert float((plain - wanted).abs().max()) > 0.1
    torch.testing.assert_close(found[..., rows], wanted, rtol=1e-3, atol=1e-2)


def test_polish_refuses_teachers_of_other_ids(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """What a teacher predicts are other tokens for the merge; Python says so as the command does."""
    anchor, donor, _ = models
    done = run("polish", anchor.path, tmp_path / "out", "--teachers", donor.path)
    said = f"{donor.path}: its tokens are not those of {anchor.path}"
    assert said in one_error(done.output)
    with pytest.raises(rm.RotationMergeError, match=re.escape(said)):
        rm.polish(anchor.path, [donor.path])
