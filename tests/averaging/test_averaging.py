"""Merges by statistics: twins give the anchor, whatever moved them; what does not fit is refused in one line."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli_support import parsed, run
from plugin_support import EVERYTHING, build, from_file, make, merged, mergekit_yaml, one_error, recipe_for, save, twin
from residual_support import Checkpoint, checkpoint, recipe
from residual_support import twin as residual_twin
from safetensors.torch import load_file
from tiny_models import ALL, inputs
from torch import Tensor
from transformers import LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

import rotation_merge as rm

TOLERANCE = 2e-4
NAME = "statistics.safetensors"


def data_for(model: Path | Checkpoint, where: Path, rows: int = 24) -> str:
    """A file of random inputs of a tiny checkpoint's kind; of a path's, which takes words, random words."""
    if isinstance(model, Checkpoint):
        module = model.case.model_class.from_pretrained(model.path)
        batches = [inputs(model.case, module, seed) for seed in range(rows // 2)]
        takes = signature(module.forward).parameters
        batches = [{name: tensor for name, tensor in batch.items() if name in takes} for batch in batches]
    else:
        draw = torch.Generator().manual_seed(0)
        batches = [{"input_ids": torch.randint(3, 40, (rows, 12), generator=draw)}]
    arrays = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}  # as processors give
    np.savez(where, **{name: (x.float() if x.is_floating_point() else x).numpy() for name, x in arrays.items()})
    return str(where)


def state(where: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, and not the statistics beside them."""
    return load_file(where / "model.safetensors")


def measure(path: Path, data: str, *options: str) -> dict[str, Any]:
    return parsed("measure", path, "--data", data, "--kinds", "gram,fisher", *options)


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to each one's size."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp(min=1e-6)) for n in wanted)


FAMILIES = ["llama", "qwen2", "bert"]
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "num_hidden_layers": 1},
    "bert": {"num_hidden_layers": 1},
}
STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False, "residual": "none"}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Path]]:
    """Of each family an anchor, a twin moved in every local space, and one moved as far as diagonals survive."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        anchor = make(family, folder / "anchor")
        still = {"attention": "none", "heads": "permutation", "ffn": "permutation", "scaling": True}
        models = anchor, twin(anchor, folder / "twin"), twin(anchor, folder / "monomial", seed=2, **still)
        data = data_for(anchor, folder / "data.npz")
        for model in models:
            measure(model, data)
        found[family] = models
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_twins_give_the_anchor_by_fisher(family: str, twins: dict[str, tuple[Path, ...]], tmp_path: Path):
    anchor, moved, monomial = twins[family]
    result = merged(_weighted("fisher", anchor, monomial, attention="none"), tmp_path / "out")
    assert worst(result, state(anchor)) < TOLERANCE
    refused = mergekit_yaml(_weighted("fisher", anchor, moved), tmp_path / "refused")
    assert refused.exit_code == 2
    assert "attention: none" in one_error(refused.output)
    assert not (tmp_path / "refused").exists()


CLASSIFIERS = ("bert", "deberta_v2", "distilbert", "eurobert", "modernbert", "mpnet")
"""Families whose first tiny model predicts masked words, for which measuring asks a tokenizer."""


LISTED = {case.family for case in ALL} - {"nomic_bert"}  # see below
EVERY = [(family, "classifier" if family in CLASSIFIERS else "") for family in sorted(LISTED)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [*EVERY, ("nemotron_h", "latent experts")], ids=str)
def test_twins_give_the_anchor_in_every_family(family: str, name: str, tmp_path: Path):
    """Measured into files, carried, and averaged by whole merges; in memory: tests/carrying/test_statistics_moved.py.

    Nemotron-H's latent experts write into coordinates that nothing moves: stacked where they run, apart in files.
    """
    model = checkpoint(family, name, tmp_path / "anchor") if name else _first(family, tmp_path / "anchor")
    anchor, data = model.path, data_for(model, tmp_path / "data.npz", rows=2)
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        parsed("measure", path, "--data", data)
    assert worst(merged(_weighted("regmean", anchor, moved), tmp_path / "out"), state(anchor)) < TOLERANCE


def test_an_architecture_that_nobody_knows_has_no_maps(tmp_path: Path):
    """With 'unsupported: merge' it would be the plain mean under another name."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        RwkvForCausalLM(RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2)).save_pretrained(
            tmp_path / str(seed)
        )
    for delegate in ("regmean", "ot_fusion", "refit"):
        recipe = _weighted(delegate, tmp_path / "0", tmp_path / "1", unsupported="merge")
        done = mergekit_yaml(recipe, tmp_path / "out")
        assert f"delegate {delegate} does not know this architecture" in one_error(done.output)
        assert not (tmp_path / "out").exists()


def test_a_tensor_that_runs_in_parts_is_refused(tmp_path: Path):
    """nomic-bert's file holds as one tensor what transformers runs, and measures, as three maps."""
    anchor = checkpoint("nomic_bert", "classifier", tmp_path / "anchor").path
    moved = twin(anchor, tmp_path / "twin")
    for path in (anchor, moved):
        assert run("measure", path, "--data", data_for(path, tmp_path / "data.npz", rows=2)).exit_code == 0
    said = one_error(mergekit_yaml(_weighted("regmean", anchor, moved), tmp_path / "out").output)
    assert "runs it in parts, use 'refit'" in said
    assert not (tmp_path / "out").exists()


def _weighted(delegate: str, anchor: Path, *donors: Path, **parameters: Any) -> dict[str, Any]:
    made = recipe_for("linear", anchor, *donors, **parameters)
    made["parameters"]["delegate"] = delegate
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_twins_moved_in_the_stream_give_the_anchor(family: str, tmp_path: Path):
    """Gains folded, stream turned, experts reordered: what a plain average of the aligned twin gives, this gives."""
    anchor = _first(family, tmp_path / "anchor")
    moved = residual_twin(anchor, tmp_path / "twin", "rotation")
    data = data_for(anchor, tmp_path / "data.npz")
    for one in (anchor, moved):
        measure(one.path, data)
    extra = {"untie": True} if anchor.untied else {}
    made = recipe(anchor, moved, residual="rotation", **extra)
    plain = merged(made, tmp_path / "linear")
    made["parameters"]["delegate"] = "regmean"
    assert worst(merged(made, tmp_path / "regmean"), plain) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_statistics_go_along_with_a_donor_into_a_merge(family: str, tmp_path: Path):
    """Of models that differ, with biases: the same as of models that were aligned before they were measured."""
    residual = {"llama": "rotation", "bert": "permutation"}[family]
    matched = {**EVERYTHING, "residual": residual}
    models = [make(family, tmp_path / str(i), seed=i, **CHANGES[family]) for i in range(2)]
    data, flags = data_for(models[0], tmp_path / "data.npz", rows=8), ("--residual", residual, "--heads", "permutation")
    aligned = []
    for model in models:
        aligned.append(tmp_path / f"aligned-{model.name}")
        assert run("align", models[0], model, aligned[-1], *flags, "--no-verify").exit_code == 0
    for model in (*models, *aligned):
        parsed("measure", model, "--data", data)
    found = []
    for name, some, options in (("carried", models, matched), ("measured", aligned, STILL)):
        made = _weighted("regmean", *some, **options, shrink=0.9)
        for share, entry in zip((0.3, 0.7), made["models"], strict=True):
            entry["parameters"]["weight"] = share
        found.append(merged(made, tmp_path / name))
    assert worst(*found) < 1e-4


def _first(family: str, where: Path) -> Checkpoint:
    name = next(c.name for c in ALL if c.family == family)
    found = checkpoint(family, name, where)
    tied = any(t.tied and t.name not in found.state for t in Checkpoint(found.case, where, True).architecture.tensors())
    return Checkpoint(found.case, where, tied)


@pytest.mark.slow
def test_regmean_is_the_least_squares_optimum(tmp_path: Path):
    """Without shrinking each map gives, on both models' inputs, what the two maps gave, as nearly as can be."""
    first, second = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    data = data_for(first, tmp_path / "data.npz", rows=64)
    for path in (first, second):
        measure(path, data)
    made = _weighted("regmean", first, second, attention="none", heads="none", ffn="none", scaling=False)
    made["parameters"] |= {"shrink": 1.0, "ridge": 0.0}
    result = merged(made, tmp_path / "out")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights, grams = [], []
    for path in (first, second):
        found, tensors = rm.Statistics.open(path / NAME), state(path)
        gram, gain = found.gram(name), tensors["model.layers.0.input_layernorm.weight"].double()
        assert gram is not None
        assert gram.split
        grams.append(gain[:, None] * gram.matrix.double()[:-1, :-1] * gain)
        weights.append(tensors[name].double())
    best = sum(w @ g for w, g in zip(weights, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    torch.testing.assert_close(result[name].double(), best, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_storage_does_not_matter(twins: dict[str, tuple[Path, ...]], tmp_path: Path):
    """bfloat16 output, and a donor in shards."""
    anchor, moved, _ = twins["llama"]
    sharded = tmp_path / "sharded"
    save(LlamaForCausalLM.from_pretrained(moved), sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    made = _weighted("regmean", anchor, sharded)
    made["models"][1]["parameters"]["statistics"] = str(moved / NAME)
    made["dtype"] = "bfloat16"
    merged(made, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert worst({n: x.float() for n, x in found.items()}, state(anchor)) < 0.01


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = make("llama", tmp_path / "model")
    once = parsed("measure", path, "--data", "self", "--samples", "8", "--length", "12", "--batch-size", "2")
    first = (path / NAME).read_bytes()
    assert once["samples"] == 8
    stock, calls = LlamaForCausalLM.forward, []

    @wraps(stock)
    def interrupted(self: LlamaForCausalLM, *given: Any, **options: Any) -> Any:
        if options["input_ids"].shape == (2, 12):  # a batch that is measured
            calls.append(options)
            if len(calls) == 20:  # in the second layer
                raise KeyboardInterrupt
        return stock(self, *given, **options)

    (path / NAME).unlink()
    arguments = ("measure", path, "--data", "self", "--samples", 8, "--length", 12, "--batch-size", 2)
    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)
    assert run(*arguments).exit_code != 0
    assert not (path / NAME).exists()
    assert (tmp_path / "model" / f"{NAME}.unfinished").is_dir()
    assert run(*arguments).exit_code == 0
    assert (path / NAME).read_bytes() == first
    assert not (tmp_path / "model" / f"{NAME}.unfinished").exists()


def spoilt(file: Path, where: Path, harm: str) -> str:
    """A damaged copy of a file of statistics."""
    whole = file.read_bytes()
    place = whole.index(b"{") + int.from_bytes(whole[:8], "little")
    content = {"truncated": whole[: len(whole) // 2], "NaN": whole[:place] + b"\xff" * (len(whole) - place)}
    where.write_bytes(content[harm])
    return str(where)


DONORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "out of range": ({"shrink": 2.0}, ["shrink"]),
    "a weight below 0": ({"weight": -0.5}, ["{donor}: its weight is -0.5"]),
    "other weights": (
        {"statistics": "{anchor}/{name}"},
        ["was measured on other weights", "name the file that it writes"],
    ),
    "nothing there": ({"statistics": "none.safetensors"}, ["--data DATA --out none.safetensors'"]),
    "no statistics": ({"statistics": "{donor}/model.safetensors"}, ["is not a statistics file"]),
    "truncated": ({"statistics": "{work}/truncated"}, ["cannot be read"]),
    "NaN": ({"statistics": "{work}/NaN"}, ["NaN"]),
    "of another kind": ({"statistics": "{work}/gram"}, ["needs fisher"]),
    "a change that samples carry": (
        {"finetuned_from": "{donor}", "carry": "refit"},
        ["needs statistics of the carried model", "and measure and merge the output"],
    ),
}
"""Parameters under a donor that has statistics, and what is said of them."""


class TestBadInput:
    """One line each, nothing half written."""

    @pytest.fixture
    def pair(self, twins: dict[str, tuple[Path, ...]]) -> tuple[Path, Path]:
        return twins["llama"][0], twins["llama"][1]

    def refused(self, document: dict[str, Any], where: Path) -> str:
        done = mergekit_yaml(document, where / "out")
        assert done.exit_code == 2, done.output
        assert not (where / "out").exists()
        return one_error(done.output)

    def test_none(self, pair: tuple[Path, Path], tmp_path: Path):
        """Each model that has none is named; a model without weight needs none."""
        bare, other = (save(build("llama", seed), tmp_path / str(seed)) for seed in (5, 6))
        said = self.refused(_weighted("regmean", pair[0], bare), tmp_path)
        assert f"rotation-merge measure {bare} --data DATA" in said
        assert "--kinds fisher" in self.refused(_weighted("fisher", pair[0], bare, attention="none"), tmp_path)
        said = self.refused(_weighted("regmean", bare, other), tmp_path)
        assert all(f"rotation-merge measure {model} --data DATA" in said for model in (bare, other))
        document = _weighted("regmean", bare, pair[0])
        document["models"][0]["parameters"]["weight"] = 0.0
        merged(document, tmp_path / "out")

    @pytest.mark.parametrize("bad", DONORS)
    def test_parameters_of_a_donor(self, bad: str, pair: tuple[Path, Path], tmp_path: Path):
        (parameters, words), fisher = DONORS[bad], bad == "of another kind"
        document = _weighted("fisher", *pair, attention="none") if fisher else _weighted("regmean", *pair)
        if bad in ("truncated", "NaN"):
            spoilt(pair[1] / NAME, tmp_path / bad, bad)
        elif fisher:
            run("measure", pair[1], "--data", "self", "--samples", 2, "--length", 8, "--out", tmp_path / "gram")
        names = {"anchor": pair[0], "donor": pair[1], "name": NAME, "work": tmp_path}
        for name, value in parameters.items():
            document["models"][1]["parameters"][name] = value.format(**names) if isinstance(value, str) else value
        said = self.refused(document, tmp_path)
        assert all(word.format(**names) in said for word in words)

    @pytest.mark.slow
    def test_too_few_samples(self, tmp_path: Path):
        paths = [make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
        for path in paths:
            assert "singular" in run("measure", path, "--data", "self", "--samples", 1, "--length", 4).output
        document = _weighted("regmean", *paths)
        document["parameters"] |= {"shrink": 1.0, "ridge": 0.0}
        assert "set 'ridge'" in self.refused(document, tmp_path)

    def test_data_and_disk(self, pair: tuple[Path, Path], tmp_path: Path):
        pixels, empty, out = tmp_path / "pixels.npz", tmp_path / "empty.jsonl", tmp_path / "out.safetensors"
        np.savez(pixels, pixel_values=np.zeros((2, 3, 8, 8), dtype=np.float32))
        empty.write_text("")
        cases = [(pixels, "takes input_ids"), (empty, "no examples"), (tmp_path / "none.txt", "no such file")]
        for data, words in cases:
            done = run("measure", pair[0], "--data", data, "--out", out)
            assert done.exit_code == 2
            assert words in one_error(done.output)
            assert not out.exists()
        done = run("measure", pair[0], "--data", "self", "--samples", 2, "--length", 8, "--out", "/dev/full/x")
        assert done.exit_code == 2
        one_error(done.output)

    def test_a_model_that_answers_with_nan(self, tmp_path: Path):
        """At once, in the last of the samples, or in the sums alone: nothing stays, not even for going on."""
        model, late, data = build("llama", 5), build("llama", 5), tmp_path / "data.jsonl"
        model.model.norm.weight.data[0] = late.model.embed_tokens.weight.data[39] = float("nan")
        names = {"broken": model, "late": late, "whole": build("llama", 6)}
        broken, last, whole = (save(each, tmp_path / name) for name, each in names.items())
        data.write_text('{"input_ids": [3, 4, 5, 6]}\n' * 17 + '{"input_ids": [3, 39, 5, 6]}\n')
        before, out = sorted(tmp_path.rglob("*")), tmp_path / "out"
        runs = [("measure", broken, "--data", source) for source in ("self", data)]
        runs += [("polish", whole, out, "--teachers", broken, "--data", source) for source in ("self", data)]
        runs += [("polish", broken, out, "--teachers", whole)]
        flags = (("--kinds", "gram"), ("--kinds", "fisher"), ("--by-layer",))
        for arguments in (*runs, *(("measure", last, "--data", data, *words) for words in flags)):
            done = run(*arguments)
            assert done.exit_code == 2
            assert ("NaN" if last in arguments else "answers with NaN") in one_error(done.output)
            assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_adapters_alignment_files_and_several_stages(tmp_path: Path):
    """A donor that is a model and its adapter merges as what the two make; so it does by a file, and in a stage."""
    from peft import LoraConfig, get_peft_model
    from plugin_support import write_recipe

    base = make("llama", tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    tuned = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    tuned.save_pretrained(tmp_path / "adapter")
    whole = save(tuned.merge_and_unload(), tmp_path / "whole")
    adapted = f"{base}+{tmp_path / 'adapter'}"
    options = ("--data", "self", "--samples", 8, "--length", 12)
    for model in (base, whole, adapted):
        assert run("measure", model, *options).exit_code == 0
    assert (tmp_path / "adapter" / NAME).exists()
    wanted = merged(_weighted("regmean", base, whole), tmp_path / "wanted")
    assert worst(merged(_weighted("regmean", base, adapted), tmp_path / "lora"), wanted) < 1e-4
    file = tmp_path / "alignment.safetensors"
    assert run("align", base, whole, "--alignment", file, "--heads", "permutation").exit_code == 0
    assert worst(merged(from_file(_weighted("regmean", base, whole), file), tmp_path / "file"), wanted) < 1e-4
    first = _weighted("linear", base, base) | {"name": "first"}
    second = _weighted("regmean", base, whole)
    second["models"].append({"model": "first", "parameters": {"weight": 0.0}})
    from click.testing import CliRunner
    from mergekit.scripts.multimerge import main as mergekit_multi

    first["models"] = [{"model": str(base), "parameters": {"weight": 1.0}}]
    stages = write_recipe(yaml.safe_dump_all([first, second]), tmp_path / "stages.yml")
    arguments = [str(stages), "-I", str(tmp_path / "work"), "--out-path", str(tmp_path / "multi")]
    done = CliRunner().invoke(mergekit_multi, arguments)
    assert done.exit_code == 0, done.output
    assert worst(state(tmp_path / "multi"), wanted) < 1e-4
