"""Task vectors carried to another base: what arrives, at which scale, under which delegate, at which token ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, run
from faults_support import CONFIG, GENERATION, TEMPLATE, read, whole, write
from plugin_support import error_of_merge, merged, with_tokenizer
from residual_support import Checkpoint, checkpoint, recipe, report, transport, twin
from torch import Tensor
from transformers import AutoTokenizer

import rotation_merge as rm
from rotation_merge.carrying.bases import Bases
from rotation_merge.model.fold import folded_tensors


def tuned(base: Checkpoint, folder: Path, size: float = 0.02, seed: int = 0) -> Checkpoint:
    """A fine-tune of a base: every matrix changed."""
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: x + size * x.std() * torch.randn(x.shape, generator=generator) if x.ndim > 1 else x
        for name, x in base.state.items()
    }
    return base.write(changed, folder)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, Checkpoint]:
    folder = tmp_path_factory.mktemp("trio")
    anchor = checkpoint("llama", "llama", folder / "anchor")
    old = twin(anchor, folder / "old", "rotation")
    return anchor, old, tuned(old, folder / "fine")


@pytest.mark.slow
@pytest.mark.parametrize("delegate", ["linear", "ties"])
def test_any_delegate_sees_anchor_plus_moved_change(delegate: str, trio: Any, tmp_path: Path) -> None:
    anchor, old, fine = trio
    expected = merged(transport(anchor, (fine, old), residual="rotation"), tmp_path / "plain")
    document = transport(anchor, (fine, old), residual="rotation")
    if delegate == "linear":
        document["models"].append({"model": str(anchor.path), "parameters": {"weight": 0.0}})
    document["parameters"].update(delegate=delegate, **({"density": 1.0} if delegate == "ties" else {}))
    torch.testing.assert_close(merged(document, tmp_path / "out"), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_weights_scale_and_changes_of_several_bases_add_up(trio: Any, tmp_path: Path) -> None:
    """In the anchor's coordinates."""
    anchor, old, fine = trio
    second_base = twin(anchor, tmp_path / "second base", "rotation", seed=9)
    second = tuned(second_base, tmp_path / "second", seed=3)

    def result(name: str, *pairs: tuple[Checkpoint, Checkpoint], weight: float = 1.0) -> dict[str, Tensor]:
        document = transport(anchor, *pairs, residual="rotation", normalize=False)
        document["models"][0]["parameters"]["weight"] = weight
        return merged(document, tmp_path / name)

    pairs = (fine, old), (second, second_base)
    half, two, both = result("half", pairs[0], weight=0.5), result("two", pairs[1]), result("both", *pairs)
    base, name = anchor.folded(), "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(both[name], 2 * half[name] + two[name] - 2 * base[name], atol=1e-5, rtol=1e-4)
    carried = {f"{model.path} (carried over from {origin.path})" for model, origin in pairs}
    assert set(report(tmp_path / "both")["summary"]) == carried


@pytest.mark.slow
def test_far_changes_are_called_far_and_excluded_tensors_are_the_anchors(trio: Any, tmp_path: Path) -> None:
    anchor, old, fine = trio
    far, name = tuned(old, tmp_path / "far", size=0.9), "model.embed_tokens.weight"
    merged(transport(anchor, (far, old), residual="rotation"), tmp_path / "out")
    assert any("too large to transfer well" in note for note in report(tmp_path / "out")["notes"])
    document = transport(anchor, (fine, old), residual="permutation", exclude="embed_tokens")
    assert torch.equal(merged(document, tmp_path / "excluded")[name], anchor.state[name])
    assert not any("too large" in note for note in report(tmp_path / "excluded")["notes"])


# --- token ids --------------------------------------------------------------------------------------------------------

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def other_vocabulary(model: Checkpoint, folder: Path, rows: list[int], extra: int) -> Checkpoint:
    """The model with its tokens in another order, and new rows after them."""
    state, generator = model.state, torch.Generator().manual_seed(1)
    for name in VOCABULARY:
        new = torch.randn(extra, state[name].shape[1], generator=generator)
        state[name] = torch.cat([state[name][rows], new])
    result = model.write(state, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(rows) + extra}))
    return result


def copied(model: Checkpoint, folder: Path, words: list[str] | None = None) -> Checkpoint:
    """The model in another folder, with its config, and a tokenizer of its own or none."""
    copy = model.write(model.state, folder)
    (folder / "config.json").write_text((model.path / "config.json").read_text())
    if words is not None:
        with_tokenizer(words, folder)
    return copy


@pytest.fixture(scope="module")
def words(trio: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, Checkpoint, list[int]]:
    """Anchor, old base and fine-tune; the last two have the tokens at other ids, and nine rows of padding. And the
    anchor's row of each old token."""
    folder, (anchor, old, _) = tmp_path_factory.mktemp("words"), trio
    size = anchor.config["vocab_size"]
    rows = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    longer = other_vocabulary(old, folder / "old", rows, extra=9)
    models = copied(anchor, folder / "anchor"), longer, tuned(longer, folder / "fine")
    for model, order in zip(models, (range(size), rows, rows), strict=True):
        with_tokenizer([f"w{i}" for i in order], model.path)
    return *models, rows


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["rotation", "signed_permutation", "none"])
def test_task_vector_to_other_token_ids(residual: str, words: Any, tmp_path: Path) -> None:
    """Every token gets its change; the same as a value, bit for bit as `transfer` adds it. A recipe folds the anchor
    where a stream turns."""
    anchor, old, fine, rows = words
    result = merged(transport(anchor, (fine, old), residual=residual), tmp_path / "out")
    before = anchor.folded() if residual == "rotation" else anchor.state
    for name in VOCABULARY:
        change, expected = (result[name] - before[name])[rows], (fine.state[name] - old.state[name])[: len(rows)]
        assert result[name].shape == before[name].shape
        assert float(change.norm()) > 0
        if residual == "signed_permutation" or (residual == "rotation" and name == VOCABULARY[0]):
            torch.testing.assert_close(change.norm(dim=1), expected.norm(dim=1), atol=1e-4, rtol=1e-3)
    assert run("check", tmp_path / "out.yml").exit_code == 0
    assert any(f"share {len(rows)} tokens" in note for note in report(tmp_path / "out")["notes"])
    if residual == "none":
        return
    summary = report(tmp_path / "out")["summary"][f"{fine.path} (carried over from {old.path})"]
    assert residual != "rotation" or summary["relative_after"] <= 1e-4
    options = rm.AlignConfig(heads="permutation", residual=residual)
    alignment, _ = Bases.of(str(anchor.path), str(old.path)).aligned(rm.TransferConfig(match=options))
    view = rm.Delta.between(old.path, fine.path).moved(alignment, anchor.path).applied()
    carried = rm.transfer(fine.path, old.path, anchor.path, rm.TransferConfig(match=options))
    folded = dict(folded_tensors(view.architecture, view.tensors, alignment.folded))
    for name, tensor in view.state_dict().items():
        torch.testing.assert_close(folded[name], result[name], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(tensor, carried[name], atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
def test_donor_of_another_vocabulary(mean: bool, words: Any, tmp_path: Path) -> None:
    """mergekit brings the vocabularies together after the alignment, which looks at shared tokens."""
    anchor, old, _, rows = words
    document = recipe(anchor, old, residual="rotation", **({"anchor": "mean"} if mean else {}))
    result, before = merged({**document, "tokenizer": {"source": "base"}}, tmp_path / "out"), anchor.folded()
    for name in result:
        part = rows if name in VOCABULARY else slice(None)
        torch.testing.assert_close(result[name][part], before[name][part].float(), atol=1e-4, rtol=1e-3)


def test_vocabularies_that_cannot_be_carried(words: Any, tmp_path: Path) -> None:
    """Resized ones, samples of two, those without a tokenizer, and those of other tokens: one line each."""
    anchor, old, fine, _ = words
    mute = {name: copied(model, tmp_path / name) for name, model in (("old", old), ("fine", fine))}
    cases = [
        (transport(anchor, (fine, old), residual="rotation") | {"tokenizer_source": "base"}, "leave out 'tokenizer'"),
        (transport(anchor, (fine, old), residual="rotation"), "samples cannot be shared"),
        (transport(anchor, (mute["fine"], mute["old"]), residual="rotation"), "no tokenizer says"),
    ]
    cases[1][0]["models"][-1]["parameters"]["carry"] = "refit"
    for document, expected in cases:
        assert expected in error_of_merge(document, tmp_path / "out")
    with_tokenizer([f"other{i}" for i in range(53)], mute["old"].path)
    message = error_of_merge(cases[2][0], tmp_path / "out")
    assert f"has 53 tokens that differ from {anchor.path} (`other0`, `other1`)" in message
    assert "carry between bases of one vocabulary" in message


@pytest.mark.slow
@pytest.mark.parametrize("same_ids", [True, False])
def test_a_chat_template_comes_along(same_ids: bool, words: Any, tmp_path: Path) -> None:
    """With the ids that it needs, where these mean the same in the new base."""
    anchor, old, fine, rows = words
    order = [f"w{i}" for i in rows]
    chat = copied(fine, tmp_path / "chat", order)
    speaker = AutoTokenizer.from_pretrained(chat.path)
    speaker.chat_template, speaker.eos_token = "{{ messages }} w1", "w1"
    speaker.save_pretrained(chat.path)
    (chat.path / "generation_config.json").write_text(json.dumps({"eos_token_id": speaker.eos_token_id}))
    new = copied(old, tmp_path / "new", order) if same_ids else anchor
    output = output_of("carry", chat.path, "--from", old.path, "--to", new.path, tmp_path / "out", "--force")
    assert ("Its chat template was copied." in output) == same_ids
    carried = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (carried.chat_template == speaker.chat_template) == same_ids
    assert carried.get_vocab() == AutoTokenizer.from_pretrained(new.path).get_vocab()
    if same_ids:
        generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert generation["eos_token_id"] == speaker.eos_token_id


def test_turns_end_where_the_fine_tune_does_not_say_so(tmp_path: Path) -> None:
    """As of an adapter with a chat template on its base, whose config it has."""
    old, new = whole("llama", tmp_path / "old"), tmp_path / "new"
    template = (old / TEMPLATE).read_text()
    (old / TEMPLATE).unlink()
    for file in (CONFIG, GENERATION):
        write(old / file, {**read(old / file), "eos_token_id": 1})
    for folder in (new, tmp_path / "chat"):
        shutil.copytree(old, folder)
    (tmp_path / "chat" / TEMPLATE).write_text(template)
    (tmp_path / "chat" / GENERATION).unlink()
    carried = rm.transfer(tmp_path / "chat", old, new, out=tmp_path / "out")
    assert carried.config["eos_token_id"] == [1, 4]
    assert [read(tmp_path / "out" / file)["eos_token_id"] for file in (CONFIG, GENERATION)] == [[1, 4], [1, 4]]
