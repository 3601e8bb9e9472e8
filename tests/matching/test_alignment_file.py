"""Alignment files: written by `align` and `save_alignment`, applied by recipes, refused for other weights."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, parsed
from plugin_support import error_of_merge, from_file, make, merged, reads_of_files, recipe_for, state, write_state
from plugin_support import twin as twin_of
from residual_support import checkpoint, recipe, report
from safetensors.torch import load_file
from tiny_models import difference, inputs, keep_float64, outputs, reload

import rotation_merge as rm

Tensors = dict[str, torch.Tensor]


def align(anchor: Any, donor: Any, file: Path, residual: str = "none", *flags: str) -> None:
    """What a user types to write an alignment."""
    arguments = ["align", str(anchor), str(donor), "--alignment", str(file), "--heads", "permutation"]
    output_of(*arguments, "--residual", residual, *flags)


def equal(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- applied by recipes


@pytest.mark.slow
@pytest.mark.parametrize("case", [("llama", "llama", "rotation"), ("bert", "classifier", "permutation")], ids=str)
def test_half_precision_keeps_maps_orthogonal(case: tuple[str, str, str], tmp_path: Path) -> None:
    """Between independent models: the donor aligned by a file in float16 computes what the donor computes."""
    anchor, donor = (checkpoint(*case[:2], tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    double = {name: x.double() for name, x in donor.state.items()}, donor.config
    alignment = rm.align((anchor.state, anchor.config), double, heads="permutation", residual=case[2])
    alignment.save(tmp_path / "map", {"note": 1}, half=True)
    loaded = rm.Alignment.load(tmp_path / "map")
    assert (loaded.metadata["note"], loaded.metadata["options"]["residual"]) == (1, case[2])
    if case[2] == "rotation":
        matrix = loaded.transforms["residual"].elements["map"].matrix[0]
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)).double(), atol=1e-13, rtol=0)
    model = donor.case.model_class.from_pretrained(donor.path, dtype=torch.float64, attn_implementation="eager")
    given = inputs(donor.case, model)
    expected, moved = outputs(model.eval(), given), loaded.apply(double).state_dict()
    with keep_float64():
        assert difference(outputs(reload(donor.case, donor.path, moved), given), expected) <= 1e-9


# --- written by recipes


def table(out: Path) -> str:
    """What the card says of the alignment, the sentence on files left out."""
    text = (out / "README.md").read_text().partition("### Alignment")[2].partition("### How to run it")[0]
    said = r"moved by the transforms in \S+: |`\S+` was aligned by the file .*| and line up with `\S+`"
    return re.sub(r"\n+", "\n", re.sub(said, "", text))  # by matching alone does it line up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "residual", "dtype"),
    [
        ("llama", "signed_permutation", "bfloat16"),
        ("qwen2", "rotation", "float32"),
        ("vit", "rotation", "float32"),
        ("bert", "finetuned_from", "float32"),
    ],
)
def test_a_merge_from_a_file_is_the_one_that_wrote_it(family: str, residual: str, dtype: str, tmp_path: Path) -> None:
    """The same bytes, and the same figures in report and card; the file is what `align` writes.

    One of an untied head is refused where it is tied.
    """
    anchor, donor = (make(family, tmp_path / f"model-{seed}", seed=seed) for seed in (0, 8))
    options = {"untie": True} if family == "qwen2" else {}
    document = recipe_for("linear", anchor, donor, **options)
    if residual == "finetuned_from":
        tuned = {n: t + 0.01 * torch.randn_like(t) for n, t in state(donor).items()}
        document = recipe_for("task_arithmetic", anchor, write_state(tuned, anchor, tmp_path / "tuned"))
        document["models"][1]["parameters"]["finetuned_from"] = str(donor)
    else:
        document["parameters"]["residual"] = options["residual"] = residual
    document["dtype"] = dtype
    out, again, kept = tmp_path / "out", tmp_path / "again", "kept/file.safetensors"
    first = merged({**document, "parameters": {**document["parameters"], "save_alignment": kept}}, out)
    second = from_file(document, out / kept)
    second["parameters"]["save_alignment"] = kept
    assert equal(merged(second, again), first)
    assert equal(load_file(again / kept), load_file(out / kept))
    matched, replayed = report(out), report(again)
    assert any("nothing was matched" in note for note in replayed["notes"])
    assert (replayed["rows"], replayed["whole"]) == (matched["rows"], matched["whole"])
    assert table(again) == table(out)
    align(anchor, donor, tmp_path / "file", options.get("residual", "none"), *["--untie"] * ("untie" in options))
    shown = [parsed("inspect", path) for path in (out / kept, tmp_path / "file")]
    assert shown[0]["figures"] == pytest.approx(shown[1]["figures"])
    assert set(shown[0]["fingerprints"]) == {str(anchor), str(donor)}
    for name, tensor in load_file(out / kept).items():
        torch.testing.assert_close(tensor, load_file(tmp_path / "file")[name], rtol=1e-4, atol=1e-5)
    if second["parameters"].pop("untie", False):
        assert "untie: true" in error_of_merge(second, tmp_path / "tied")


def test_a_file_for_each_donor_where_it_is_asked_for(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Of an untied head, too."""
    other = twin_of(pair[0], tmp_path / "other", seed=7)
    merged(recipe_for("linear", *pair, other, save_alignment=True), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("alignment*"))
    assert [file.name for file in files] == ["alignment-2.safetensors", "alignment.safetensors"]
    assert not equal(*map(load_file, files))
    merged(from_file(recipe_for("linear", pair[0], other), files[0]), tmp_path / "again")
    assert not list((tmp_path / "again").glob("alignment*"))
    anchor = make("llama", tmp_path / "anchor", tie_word_embeddings=True)
    options = {"residual": "rotation", "untie": True, "save_alignment": True}
    merged(recipe_for("linear", anchor, twin_of(anchor, tmp_path / "donor"), **options), tmp_path / "untied")
    assert any(name.startswith("residual|") for name in load_file(tmp_path / "untied" / "alignment.safetensors"))


def test_a_file_of_some_layers_holds_the_whole_alignment(tmp_path: Path) -> None:
    """Of a donor that is aligned as a whole: another merge takes all layers from it."""
    anchor, donor = (make("llama", tmp_path / f"model-{seed}", seed=seed) for seed in (0, 8))
    whole = recipe_for("linear", anchor, donor, residual="signed_permutation")
    sources = [{**model, "layer_range": [1, 2]} for model in whole["models"]]
    part = {name: value for name, value in whole.items() if name != "models"} | {"slices": [{"sources": sources}]}
    part["parameters"] = {**whole["parameters"], "save_alignment": "maps.safetensors"}
    for _ in range(2):
        merged(part, tmp_path / "part")
    again = merged(from_file(whole, tmp_path / "part" / "maps.safetensors"), tmp_path / "again")
    assert equal(again, merged(whole, tmp_path / "whole"))


# --- fingerprints


def fingerprint(tensors: Tensors, config: dict[str, Any]) -> str:
    """As alignments keep it."""
    still = rm.align((tensors, config), (tensors, config), attention="none", ffn="none", scaling=False)
    return still.basis.donor.fingerprint


@pytest.mark.slow
def test_fingerprint_sees_weights_names_and_config(tmp_path: Path) -> None:
    model = checkpoint("llama", "llama", tmp_path / "model")
    tensors, config = model.state, {**model.config, "tie_word_embeddings": True}
    mark = fingerprint(tensors, config)
    assert mark == fingerprint(dict(reversed(tensors.items())), {**config, "_name_or_path": "elsewhere"})
    assert mark != fingerprint(tensors, {**config, "rope_theta": 1.0})
    assert mark != fingerprint({n: x.half() for n, x in tensors.items()}, config)
    assert mark != fingerprint({n: x for n, x in tensors.items() if n != "lm_head.weight"}, config)
    for name, x in {name: x.clone() for name, x in tensors.items()}.items():
        x.view(torch.int32).view(-1)[-1] ^= 1
        assert mark != fingerprint({**tensors, name: x}, config), name


@pytest.mark.slow
def test_nothing_is_read_again_for_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`align --alignment` reads every tensor of both models once; the file, its report and a merge agree on them."""
    anchor, donor = (checkpoint("llama", "llama", tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    reads = reads_of_files(monkeypatch)
    once = sorted((str(m.path), name) for m in (anchor, donor) for name in m.state)
    align(anchor.path, donor.path, tmp_path / "map")
    assert sorted(reads) == once
    basis = rm.Alignment.load(tmp_path / "map").basis
    written = {identity.name: identity.fingerprint for identity in (basis.anchor, basis.donor)}
    reads.clear()
    merged(recipe(anchor, donor, residual="none"), tmp_path / "out")
    assert Counter(reads) == {one: 2 if "_proj" in one[1] else 1 for one in once}  # matched, and merged
    assert report(tmp_path / "out")["fingerprints"] == written
    assert written[str(anchor.path)] in (tmp_path / "out" / "README.md").read_text()
    assert list(written.values()) == [fingerprint(model.state, model.config) for model in (anchor, donor)]
    merged(recipe(anchor, donor, residual="none", exclude="embed_tokens"), tmp_path / "part")
    count = len(anchor.state)  # what is not merged is left out, and the report says so
    assert report(tmp_path / "part")["fingerprints"][str(donor.path)].endswith(
        f"(of the {count - 1} of {count} tensors that were read)"
    )
