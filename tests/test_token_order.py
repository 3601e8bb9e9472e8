"""Tokens at other ids in vocabularies of one size: every path says so, and streams are matched on what is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from carry_support import make_adapter
from cli_support import parsed, run
from plugin_support import merged, mergekit_yaml, one_error
from residual_support import Checkpoint, checkpoint, recipe, twin
from test_plugin_inputs import with_tokenizer

from rotation_merge.matching.fold import Folded
from rotation_merge.samples.functions import load

WARNED = "stand at other ids than in"


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


def test_every_path_warns(models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path) -> None:
    anchor, donor, _ = models
    made, file = recipe(anchor, donor, residual="none"), tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(made))
    for asked in (("check", file), ("inspect", file), ("compare", anchor.path, donor.path)):
        done = run(*asked)
        assert done.exit_code == 0, done.output
        assert WARNED in " ".join(done.output.split()), asked
    assert WARNED in parsed("compare", anchor.path, donor.path)["warnings"][0]
    done = run("align", anchor.path, donor.path, tmp_path / "aligned", "--no-verify")
    assert WARNED in " ".join(done.output.split())
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3")  # too little to learn from: what is questionable is said before
    done = run("fit", anchor.path, donor.path, "--alignment", tmp_path / "map.safetensors", "--data", text)
    assert WARNED in " ".join(done.output.split())
    merged(made, tmp_path / "merged")
    for written in ("aligned", "merged"):
        for name in ("README.md", "rotation_merge.json"):
            assert WARNED in (tmp_path / written / name).read_text(), (written, name)
    file.write_text(yaml.safe_dump({**made, "tokenizer": {"source": "base"}}))
    for command in ("check", "inspect"):
        assert WARNED not in " ".join(run(command, file).output.split())


def test_streams_are_matched_on_shared_tokens(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """The twin comes into the anchor's coordinates, its own tokens where they were, by command and recipe alike."""
    anchor, donor, rows = models
    turned = ("--residual", "rotation", "--heads", "permutation")
    done = run("align", anchor.path, donor.path, tmp_path / "out", *turned)
    assert done.exit_code == 0, done.output
    assert "share 50 tokens" in done.output
    assert "share 50 tokens" in (tmp_path / "out" / "README.md").read_text()
    found = Checkpoint(anchor.case, tmp_path / "out").state
    wanted = Folded(anchor.architecture, anchor.state, ("residual",))
    for name, tensor in found.items():
        own = wanted[name][rows] if name in ("model.embed_tokens.weight", "lm_head.weight") else wanted[name]
        torch.testing.assert_close(tensor, own, rtol=1e-3, atol=1e-4)
    compared = " ".join(run("compare", anchor.path, donor.path, *turned).output.split())
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
    still = {"attention": "none", "heads": "none", "rescale": False}
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


def test_an_adapter_is_carried_by_its_tokens(
    models: tuple[Checkpoint, Checkpoint, torch.Tensor], tmp_path: Path
) -> None:
    """Embedding and head included; nothing is said of ids, and that samples cannot measure it is."""
    anchor, donor, rows = models
    make_adapter(anchor.architecture, donor.state).write(str(tmp_path / "lora"))
    pair = ("--from", donor.path, "--to", anchor.path, "--heads", "permutation")
    done = run("carry", tmp_path / "lora", *pair, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert WARNED not in done.output
    assert "two vocabularies" in done.output
    assert "of the squared norm of what they were" in done.output
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = load(f"{donor.path}+{tmp_path / 'lora'}")(input_ids=ids).logits
        found = load(f"{anchor.path}+{tmp_path / 'out'}")(input_ids=rows[ids]).logits
        plain = load(str(donor.path))(input_ids=ids).logits
    assert float((plain - wanted).abs().max()) > 0.1
    torch.testing.assert_close(found[..., rows], wanted, rtol=1e-3, atol=1e-2)
