"""Alignment files: written by the command line, applied by recipes, refused for other weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import from_file, merged, mergekit_yaml, one_error, reads_of_files
from residual_support import Checkpoint, checkpoint, recipe, report, transport, twin
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import difference, inputs, keep_float64, outputs, reload

import rotation_merge as rm

CASES = [
    ("llama", "llama", "rotation"),
    ("vit", "classifier", "rotation"),
    ("bert", "classifier", "permutation"),
    ("gemma2", "tied", "signed_permutation"),
]


def align(anchor: Checkpoint, donor: Checkpoint, file: Path, residual: str, *flags: str) -> None:
    """What a user types to write an alignment."""
    arguments = ["align", str(anchor.path), str(donor.path), "--alignment", str(file), "--heads", "permutation"]
    result = run(*arguments, "--residual", residual, *flags)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "residual"), CASES, ids=lambda x: x.replace(" ", "_"))
@pytest.mark.parametrize("flags", [(), ("--half",)], ids=["float32", "float16"])
def test_file_stands_in_for_matching(family: str, name: str, residual: str, flags: Any, tmp_path: Path) -> None:
    anchor = checkpoint(family, name, tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", residual)
    align(anchor, donor, tmp_path / "map.safetensors", residual, *flags)
    merged(from_file(recipe(anchor, donor, residual="none"), tmp_path / "map.safetensors"), tmp_path / "out")
    assert anchor.differs(tmp_path / "out") <= (1e-4 if not flags else 0.1)
    assert "nothing was matched" in " ".join(report(tmp_path / "out")["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "residual"), CASES, ids=lambda x: x.replace(" ", "_"))
def test_half_precision_keeps_maps_orthogonal(family: str, name: str, residual: str, tmp_path: Path) -> None:
    """Between independent models: the donor aligned by a file in float16 computes what the donor computes."""
    anchor, donor = (checkpoint(family, name, tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    own = {name: x.double() for name, x in donor.state.items()}
    double = own, donor.config
    made = rm.align((anchor.state, anchor.config), double, heads="permutation", residual=residual)
    made.save(tmp_path / "map.safetensors", {"note": 1}, half=True)
    with safe_open(tmp_path / "map.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["head"])["made"]
    assert metadata["note"] == 1
    assert metadata["options"]["residual"] == residual
    loaded = rm.Alignment.load(tmp_path / "map.safetensors")
    for ours, theirs in ((loaded.basis.anchor, made.basis.anchor), (loaded.basis.donor, made.basis.donor)):
        assert (ours.name, ours.fingerprint, ours.tensors) == (theirs.name, theirs.fingerprint, theirs.tensors)
    assert set(loaded.transforms) == set(made.transforms)
    stream = loaded.transforms[next(iter(anchor.architecture.streams))].elements["map"]
    if residual == "rotation":
        matrix = stream.matrix[0]
        eye = torch.eye(len(matrix), dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.T, eye, atol=1e-13, rtol=0)
    model = donor.case.model_class.from_pretrained(donor.path, dtype=torch.float64, attn_implementation="eager")
    given = inputs(donor.case, model)
    expected = outputs(model.eval(), given)
    moved = loaded.apply(double).state_dict()
    with keep_float64():
        assert difference(outputs(reload(donor.case, donor.path, moved), given), expected) <= 1e-9


@pytest.mark.slow
def test_untied_anchor_and_donor(tmp_path: Path) -> None:
    """Both tied, the alignment a rotation: written with --untie, applied under untie: true."""
    anchor = checkpoint("llama", "qwen2", tmp_path / "anchor", untied=True)
    donor = checkpoint("llama", "qwen2", tmp_path / "donor", seed=1, untied=True)
    align(anchor, donor, tmp_path / "map.safetensors", "rotation", "--untie")
    document = from_file(recipe(anchor, donor, residual="none", untie=True), tmp_path / "map.safetensors")
    document["models"][0]["parameters"]["weight"], document["models"][1]["parameters"]["weight"] = 0.0, 1.0
    merged(document, tmp_path / "out")
    assert donor.differs(tmp_path / "out") <= 1e-3
    del document["parameters"]["untie"]
    assert "untie: true" in one_error(mergekit_yaml(document, tmp_path / "tied").output)


@pytest.mark.slow
def test_carries_task_vectors(tmp_path: Path) -> None:
    """One alignment of two bases serves every fine-tune of the old one."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    old = twin(anchor, tmp_path / "old", "rotation")
    align(anchor, old, tmp_path / "map.safetensors", "rotation")
    tuned = old.write({name: x + 0.01 * torch.randn_like(x) for name, x in old.state.items()}, tmp_path / "tuned")
    matched = merged(transport(anchor, (tuned, old), residual="rotation"), tmp_path / "matched")
    given = merged(from_file(transport(anchor, (tuned, old)), tmp_path / "map.safetensors"), tmp_path / "given")
    for name, tensor in matched.items():
        torch.testing.assert_close(given[name], tensor, atol=1e-5, rtol=1e-4)
    assert tuned.differs(tmp_path / "given") <= 1e-3


@pytest.mark.parametrize("other", ["anchor", "donor"])
def test_other_weights_are_refused(other: str, tmp_path: Path) -> None:
    models = {n: checkpoint("llama", "llama", tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor"))}
    align(models["anchor"], models["donor"], tmp_path / "map.safetensors", "none")
    state = models[other].state
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][0, 0] = state[name][0, 0].nextafter(torch.tensor(9.0))
    models[other] = models[other].write(state, tmp_path / "changed")
    document = from_file(recipe(models["anchor"], models["donor"], residual="none"), tmp_path / "map.safetensors")
    result = mergekit_yaml(document, tmp_path / "out")
    assert result.exit_code != 0
    message = one_error(result.output)
    assert "other weights" in message
    assert str(tmp_path / "changed") in message
    assert not (tmp_path / "out").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    model = checkpoint("llama", "llama", tmp_path / "model")
    path = tmp_path / "map.safetensors"
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(rm.RotationMergeError, match="cannot be read"):
        rm.Alignment.load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(rm.RotationMergeError, match="is not an alignment file"):
        rm.Alignment.load(path)
    path.unlink()
    still = rm.align(model.path, model.path, attention="none", ffn="none", scaling=False)
    still.save(path)
    assert rm.Alignment.load(path) == still
    other = checkpoint("vit", "classifier", tmp_path / "vit")
    with pytest.raises(rm.RotationMergeError, match=r"architecture is vit, that of .* is llama"):
        rm.Alignment.load(path).apply(other.path)
    document = from_file(recipe(other, twin(other, tmp_path / "twin", "none"), residual="none"), path)
    assert "was made for llama models, not for vit" in one_error(mergekit_yaml(document, tmp_path / "out").output)
    with safe_open(path, "pt") as file:
        meta = file.metadata()
    save_file({}, path, {**meta, "format": "rotation_merge.alignment.1"})
    with pytest.raises(rm.RotationMergeError, match="another version"):
        rm.Alignment.load(path)
    head = json.loads(meta["head"])
    head["kinds"]["residual"] = "stream"
    for name, words in {"map.matrix": "space 'residual' does not belong", "odd:matrix": "no group element"}.items():
        save_file({f"residual|{name}": torch.eye(3)[None]}, path, {**meta, "head": json.dumps(head)})
        with pytest.raises(rm.RotationMergeError, match=words):
            rm.Alignment.load(path)


def fingerprint(state: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    """As alignments keep it."""
    still = rm.align((state, config), (state, config), attention="none", ffn="none", scaling=False)
    return still.basis.donor.fingerprint


@pytest.mark.slow
def test_fingerprint_sees_weights_names_and_config(tmp_path: Path) -> None:
    model = checkpoint("llama", "llama", tmp_path / "model")
    state, config = model.state, {**model.config, "tie_word_embeddings": True}
    mark = fingerprint(state, config)
    assert mark == fingerprint(dict(reversed(state.items())), {**config, "_name_or_path": "elsewhere"})
    assert mark != fingerprint(state, {**config, "rope_theta": 1.0})
    assert mark != fingerprint({n: x.half() for n, x in state.items()}, config)
    assert mark != fingerprint({n: x for n, x in state.items() if n != "lm_head.weight"}, config)
    changed = {name: x.clone() for name, x in state.items()}
    for name, x in changed.items():
        x.view(torch.int32).view(-1)[-1] ^= 1
        assert mark != fingerprint({**state, name: x}, config), name


@pytest.mark.slow
def test_nothing_is_read_again_for_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`align --alignment` reads every tensor of both models once; the file, its report and a merge agree on them."""
    anchor, donor = (checkpoint("llama", "llama", tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    reads = reads_of_files(monkeypatch)
    once = sorted((str(m.path), name) for m in (anchor, donor) for name in m.state)
    align(anchor, donor, tmp_path / "map.safetensors", "none")
    assert sorted(reads) == once
    with safe_open(tmp_path / "map.safetensors", "pt") as file:
        written = {name: mark for name, mark, _ in json.loads(file.metadata()["head"])["models"]}
    reads.clear()
    merged(recipe(anchor, donor, residual="none"), tmp_path / "out")
    assert Counter(reads) == {one: 2 if "_proj" in one[1] else 1 for one in once}  # matched, and merged
    assert report(tmp_path / "out")["fingerprints"] == written
    assert written[str(anchor.path)] in (tmp_path / "out" / "README.md").read_text()
    for mark, model in zip(written.values(), (anchor, donor), strict=True):
        assert mark == fingerprint(model.state, model.config)


@pytest.mark.slow
def test_fingerprints_of_what_a_merge_reads(tmp_path: Path) -> None:
    """The old base of a task vector too; tensors that are not merged are left out, and the report says so."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    old = twin(anchor, tmp_path / "old", "none")
    tuned = old.write({name: 1.01 * x for name, x in old.state.items()}, tmp_path / "tuned")
    merged(transport(anchor, (tuned, old), exclude="embed_tokens"), tmp_path / "out")
    found = report(tmp_path / "out")["fingerprints"]
    count = len(anchor.state)
    assert list(found) == [str(model.path) for model in (anchor, tuned, old)]
    assert found[str(anchor.path)] == fingerprint(anchor.state, anchor.config)
    for model in (tuned, old):
        assert found[str(model.path)].endswith(f" (of the {count - 1} of {count} tensors that were read)")
