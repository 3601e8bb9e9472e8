"""Merges by statistics: twins give the anchor, whatever moved them; what does not fit is refused in one line."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli_support import error_of, parsed, run
from click.testing import CliRunner
from mergekit.scripts.multimerge import main as mergekit_multi
from plugin_support import (
    EVERYTHING,
    build,
    error_of_merge,
    from_file,
    lora,
    make,
    merged,
    recipe_for,
    save,
    twin,
    write_recipe,
)
from residual_support import Checkpoint, checkpoint, recipe
from residual_support import twin as residual_twin
from safetensors.torch import load_file
from tiny_models import ALL, inputs
from tiny_models import make as tiny
from torch import Tensor
from transformers import RwkvConfig, RwkvForCausalLM

import rotation_merge as rm

TOLERANCE, NAME = 2e-4, "statistics.safetensors"
CLASSIFIERS = ("bert", "deberta_v2", "distilbert", "eurobert", "modernbert", "mpnet")
"""Families whose first tiny model predicts masked words, for which measuring asks a tokenizer."""
FAMILIES = sorted({case.family for case in ALL} - {"nomic_bert"})  # which a test below refuses
KINDS = ("llama", "bert", "gpt2", "t5", "phi3", "gemma2", "whisper")
CASES = [*((family, "classifier" if family in CLASSIFIERS else "") for family in FAMILIES)]


def data_for(model: Path | Checkpoint, file: Path, rows: int = 24) -> str:
    """A file of random inputs of a tiny checkpoint's kind; of a path's, which takes words, random words."""
    batches = [{"input_ids": torch.randint(3, 40, (rows, 12), generator=torch.Generator().manual_seed(0))}]
    if isinstance(model, Checkpoint):
        module = model.case.model_class.from_pretrained(model.path)
        takes = signature(module.forward).parameters
        batches = [inputs(model.case, module, seed) for seed in range(rows // 2)]
        batches = [{name: tensor for name, tensor in batch.items() if name in takes} for batch in batches]
    arrays = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}  # as processors give
    np.savez(file, **{name: (x.float() if x.is_floating_point() else x).numpy() for name, x in arrays.items()})
    return str(file)


def measure(path: Path, data: str, kinds: str = "gram,fisher") -> dict[str, Any]:
    return parsed("measure", path, "--data", data, "--kinds", kinds)


def state(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, and not the statistics beside them."""
    return load_file(folder / "model.safetensors")


def farthest(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to each one's size."""
    assert result.keys() == expected.keys()
    return max(float((result[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-6)) for n in expected)


def weighted(delegate: str, anchor: Path | str, *donors: Path | str, **parameters: Any) -> dict[str, Any]:
    document = recipe_for("linear", anchor, *donors, **parameters)
    document["parameters"]["delegate"] = delegate
    return document


def first_of(family: str, folder: Path) -> Checkpoint:
    model = checkpoint(family, next(c.name for c in ALL if c.family == family), folder)
    tied = any(
        t.tied and t.name not in model.state for t in Checkpoint(model.case, folder, True).architecture.tensors()
    )
    return Checkpoint(model.case, folder, tied)


# --- twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [*CASES, ("nemotron_h", "latent experts")], ids=str)
def test_twins_give_the_anchor(family: str, name: str, tmp_path: Path) -> None:
    """Measured into files, carried, and averaged by whole merges: families whose files have other names than what runs,
    and one of each kind of the others, of which test_moved_values.py has the law in memory.

    Nemotron-H's latent experts write into coordinates that nothing moves: stacked where they run, apart in files.
    """
    model = checkpoint(family, name, tmp_path / "anchor") if name else first_of(family, tmp_path / "anchor")
    if family not in KINDS and model.state.keys() <= tiny(model.case).state_dict().keys():
        return
    anchor, data = model.path, data_for(model, tmp_path / "data.npz", rows=2)
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        measure(path, data, "gram")
    assert farthest(merged(weighted("regmean", anchor, moved), tmp_path / "out"), state(anchor)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_twins_give_the_anchor_by_fisher(family: str, tmp_path: Path) -> None:
    """One that is moved as far as diagonals survive; and no farther."""
    anchor = make(family, tmp_path / "anchor")
    still = {"attention": "none", "heads": "permutation", "ffn": "permutation", "scaling": True}
    moved, monomial = twin(anchor, tmp_path / "twin"), twin(anchor, tmp_path / "monomial", seed=2, **still)
    for model in (anchor, moved, monomial):
        measure(model, data_for(anchor, tmp_path / "data.npz"), "fisher")
    result = merged(weighted("fisher", anchor, monomial, attention="none"), tmp_path / "out")
    assert farthest(result, state(anchor)) < TOLERANCE
    assert "attention: none" in error_of_merge(weighted("fisher", anchor, moved), tmp_path / "refused")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_twins_moved_in_the_stream_give_the_anchor(family: str, tmp_path: Path) -> None:
    """Gains folded, stream turned, experts reordered: what a plain average of the aligned twin gives, this gives."""
    anchor = first_of(family, tmp_path / "anchor")
    moved = residual_twin(anchor, tmp_path / "twin", "rotation")
    data = data_for(anchor, tmp_path / "data.npz")
    for model in (anchor, moved):
        measure(model.path, data, "gram")
    document = recipe(anchor, moved, residual="rotation", **({"untie": True} if anchor.untied else {}))
    plain = merged(document, tmp_path / "linear")
    document["parameters"]["delegate"] = "regmean"
    assert farthest(merged(document, tmp_path / "regmean"), plain) < TOLERANCE


# --- the average of models that differ --------------------------------------------------------------------------------


STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False, "residual": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "residual", "changes"),
    [("llama", "rotation", {"attention_bias": True, "num_hidden_layers": 1}), ("bert", "permutation", {})],
)
def test_statistics_go_along_with_a_donor_into_a_merge(
    family: str, residual: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of models that differ, with biases: the same as of models that were aligned before they were measured."""
    models = [make(family, tmp_path / str(i), seed=i, **changes) for i in range(2)]
    aligned = [tmp_path / f"aligned {i}" for i in range(2)]
    data, flags = data_for(models[0], tmp_path / "data.npz", rows=8), ("--residual", residual, "--heads", "permutation")
    for model, out in zip(models, aligned, strict=True):
        assert run("align", models[0], model, out, *flags, "--no-verify").exit_code == 0
        measure(model, data, "gram")
        measure(out, data, "gram")
    results = []
    for each, options in ((models, {**EVERYTHING, "residual": residual}), (aligned, STILL)):
        document = weighted("regmean", *each, **options, shrink=0.9)
        for share, entry in zip((0.3, 0.7), document["models"], strict=True):
            entry["parameters"]["weight"] = share
        results.append(merged(document, tmp_path / f"out {len(results)}"))
    assert farthest(results[0], results[1]) < 1e-4


@pytest.mark.slow
def test_regmean_is_the_least_squares_optimum(tmp_path: Path) -> None:
    """Without shrinking each map gives, on both models' inputs, what the two maps gave, as nearly as can be."""
    models = [make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    for path in models:
        measure(path, data_for(models[0], tmp_path / "data.npz", rows=64), "gram")
    result = merged(weighted("regmean", *models, **STILL, shrink=1.0, ridge=0.0), tmp_path / "out")
    name, right, total = "model.layers.0.self_attn.k_proj.weight", 0.0, 0.0
    for path in models:
        statistics, tensors = rm.Statistics.open(path / NAME), state(path)
        gram = statistics.gram(name)
        assert gram is not None
        assert statistics.axes[name] in statistics.split
        gain = tensors["model.layers.0.input_layernorm.weight"].double()
        inputs = gain[:, None] * gram.double()[:-1, :-1] * gain
        right, total = right + tensors[name].double() @ inputs, total + inputs
    torch.testing.assert_close(result[name].double(), right @ torch.linalg.inv(total), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_statistics_of_an_adapter_lie_beside_it(tmp_path: Path) -> None:
    """A donor that is a model and its adapter merges as what the two make, in shards; so does one that a file of maps
    moves, one in a stage, and one that is rounded."""
    base, file = make("llama", tmp_path / "base"), tmp_path / "alignment.safetensors"
    tuned = lora(tmp_path / "adapter", base, target_modules=["q_proj", "up_proj"])
    whole = save(tuned.merge_and_unload(), tmp_path / "whole", max_shard_size="20KB")
    assert len(list(whole.glob("*.safetensors"))) > 1
    adapted = f"{base}+{tmp_path / 'adapter'}"
    for model in (base, whole, adapted):
        assert run("measure", model, "--data", "self", "--samples", 8, "--length", 12).exit_code == 0
    assert (tmp_path / "adapter" / NAME).exists()
    assert run("align", base, whole, "--alignment", file, "--heads", "permutation").exit_code == 0
    expected = merged(weighted("regmean", base, whole), tmp_path / "expected")
    for name, document in {
        "lora": weighted("regmean", base, adapted),
        "file": from_file(weighted("regmean", base, whole), file),
    }.items():
        assert farthest(merged(document, tmp_path / name), expected) < 1e-4
    merged({**weighted("regmean", base, whole), "dtype": "bfloat16"}, tmp_path / "rounded")
    rounded = state(tmp_path / "rounded")
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert farthest({key: tensor.float() for key, tensor in rounded.items()}, expected) < 0.01
    first, second = weighted("linear", base) | {"name": "first"}, weighted("regmean", base, whole)
    second["models"].append({"model": "first", "parameters": {"weight": 0.0}})
    stages = write_recipe(yaml.safe_dump_all([first, second]), tmp_path / "stages.yml")
    out = tmp_path / "multi"
    done = CliRunner().invoke(mergekit_multi, [str(stages), "-I", str(tmp_path / "work"), "--out-path", str(out)])
    assert done.exit_code == 0, done.output
    assert farthest(state(out), expected) < 1e-4


# --- what is refused: one line each, nothing half written -------------------------------------------------------------


def test_what_has_no_maps_or_runs_them_in_parts(tmp_path: Path) -> None:
    """An unknown architecture would get the plain mean; nomic-bert's file holds as one what runs as three maps."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2)
        RwkvForCausalLM(config).save_pretrained(tmp_path / str(seed))
    for delegate in ("regmean", "ot_fusion", "refit"):
        document = weighted(delegate, tmp_path / "0", tmp_path / "1", unsupported="merge")
        assert f"delegate {delegate} does not know this architecture" in error_of_merge(document, tmp_path / "out")
    anchor = checkpoint("nomic_bert", "classifier", tmp_path / "anchor").path
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        measure(path, data_for(path, tmp_path / "data.npz", rows=2), "gram")
    assert "runs it in parts, use 'refit'" in error_of_merge(weighted("regmean", anchor, moved), tmp_path / "out")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor")
    models = anchor, twin(anchor, folder / "twin")
    for model in models:
        measure(model, data_for(anchor, folder / "data.npz"))
    return models


DONORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "out of range": ("regmean", {"shrink": 2.0}, "shrink"),
    "a weight below 0": ("regmean", {"weight": -0.5}, "{donor}: its weight is -0.5"),
    "other weights": ("regmean", {"statistics": "{anchor}/{name}"}, "was measured on other weights"),
    "nothing there": ("regmean", {"statistics": "none.safetensors"}, "there are no statistics at 'none.safetensors'"),
    "no statistics": ("regmean", {"statistics": "{donor}/model.safetensors"}, "is not a statistics file"),
    "truncated": ("regmean", {"statistics": "{work}/truncated"}, "cannot be read"),
    "NaN": ("regmean", {"statistics": "{work}/NaN"}, "NaN"),
    "of another kind": ("fisher", {"statistics": "{work}/gram"}, "needs fisher"),
    "a change that samples carry": ("regmean", {"finetuned_from": "{donor}", "carry": "refit"}, "needs statistics of"),
}
"""Parameters under a donor that has statistics, and what is said of them."""


@pytest.mark.parametrize("fault", DONORS)
def test_parameters_of_a_donor(fault: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    delegate, parameters, words = DONORS[fault]
    whole = (pair[1] / NAME).read_bytes()
    place = whole.index(b"{") + int.from_bytes(whole[:8], "little")
    (tmp_path / "truncated").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "NaN").write_bytes(whole[:place] + b"\xff" * (len(whole) - place))
    if delegate == "fisher":
        run("measure", pair[1], "--data", "self", "--samples", 2, "--length", 8, "--out", tmp_path / "gram")
    document = weighted(delegate, *pair, **({"attention": "none"} if delegate == "fisher" else {}))
    names = {"anchor": pair[0], "donor": pair[1], "name": NAME, "work": tmp_path}
    for name, value in parameters.items():
        document["models"][1]["parameters"][name] = value.format(**names) if isinstance(value, str) else value
    assert words.format(**names) in error_of_merge(document, tmp_path / "out")


def test_models_without_statistics_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A model without weight needs none. With too few samples their sums are singular."""
    bare, bare_too = (save(build("llama", seed), tmp_path / str(seed)) for seed in (5, 6))
    assert "--kinds fisher" in error_of_merge(weighted("fisher", pair[0], bare, attention="none"), tmp_path / "out")
    line = error_of_merge(weighted("regmean", bare, bare_too), tmp_path / "out")
    assert f"rotation-merge measure {bare} --data DATA" in line
    for path in (bare, bare_too):
        assert "singular" in run("measure", path, "--data", "self", "--samples", 1, "--length", 4).output
    document = weighted("regmean", bare, bare_too)
    document["parameters"] |= {"shrink": 1.0, "ridge": 0.0}
    assert "set 'ridge'" in error_of_merge(document, tmp_path / "out")
    document = weighted("regmean", save(build("llama", 7), tmp_path / "third"), pair[0])
    document["models"][0]["parameters"]["weight"] = 0.0
    merged(document, tmp_path / "out")


def test_a_model_that_answers_with_nan(tmp_path: Path) -> None:
    """At once, or in the last of the samples: nothing stays, not even for going on."""
    model, late, data = build("llama", 5), build("llama", 5), tmp_path / "data.jsonl"
    model.model.norm.weight.data[0] = late.model.embed_tokens.weight.data[39] = float("nan")
    names = {"broken": model, "late": late, "whole": build("llama", 6)}
    broken, last, whole = (save(each, tmp_path / name) for name, each in names.items())
    data.write_text('{"input_ids": [3, 4, 5, 6]}\n' * 17 + '{"input_ids": [3, 39, 5, 6]}\n')
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "out"
    runs: list[tuple[object, ...]] = [("measure", broken, "--data", data), ("polish", broken, out, "--teachers", whole)]
    runs += [("polish", whole, out, "--teachers", broken, "--data", source) for source in ("self", data)]
    runs += [("measure", last, "--data", data, "--kinds", kind) for kind in ("gram", "fisher")]
    for arguments in runs:
        assert ("NaN" if last in arguments else "answers with NaN") in error_of(*arguments)
        assert sorted(tmp_path.rglob("*")) == before
