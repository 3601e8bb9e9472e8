"""Bad recipes and inputs: each gives one clear line and a failing exit code, and leaves nothing behind.

The table can be run by any command that takes a recipe: a case is a function that spoils a good recipe or checkpoint,
and the words that the line must contain.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from interrupted_support import forked
from plugin_support import Evil, SpoiltDonor, command, make, one_error, recipe_for, state, twin, write_recipe
from safetensors.torch import save_file


@dataclass
class Bench(SpoiltDonor):
    """A good recipe and its models, to be spoilt."""

    folder: Path
    anchor: Path
    donor: Path
    recipe: Any
    out: Path
    flags: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        return self.recipe["parameters"]

    def donor_entry(self) -> dict[str, Any]:
        return self.recipe["models"][1]

    def delegate(self, name: str, **parameters: Any) -> None:
        self.recipe = recipe_for(name, self.anchor, self.donor, **parameters)

    def text(self, old: str, new: str) -> None:
        """Change the recipe as text."""
        text = write_recipe(self.recipe, self.folder / "text.yml").read_text()
        assert old in text
        self.recipe = text.replace(old, new, 1)

    def replace_donor(self, family: str, **changes: Any) -> None:
        shutil.rmtree(self.donor)
        make(family, self.donor, seed=2, **changes)

    def pickled(self, content: Any) -> None:
        self.weights().unlink()
        torch.save(content, self.donor / "pytorch_model.bin")

    def sharded(self) -> Path:
        """The donor in two shards; returns the index."""
        tensors = sorted(state(self.donor).items())
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        half = len(tensors) // 2
        for name, part in zip(names, (tensors[:half], tensors[half:]), strict=True):
            save_file(dict(part), self.donor / name, {"format": "pt"})
        index = {key: names[i >= half] for i, (key, _) in enumerate(tensors)}
        self.weights().unlink()
        path = self.donor / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return path


def by_file(bench: Bench, file: Path) -> None:
    """The donor is moved by a file, and nothing is matched."""
    kept = ("delegate", "weight")
    for settings in (bench.recipe["parameters"], bench.donor_entry()["parameters"]):
        for name in [name for name in settings if name not in kept]:
            del settings[name]
    bench.donor_entry()["parameters"]["alignment"] = str(file)


Spoil = Callable[[Bench], Any]
CASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    # --- keys
    "unknown key": (lambda b: b.recipe.update(tokeniser="base"), ("tokeniser", "did you mean 'tokenizer'")),
    "misspelt base_model": (lambda b: b.text("base_model", "base_mdoel"), ("base_mdoel", "'base_model'", "line 2")),
    "misspelt merge_method key": (lambda b: b.text("merge_method", "merge_mehtod"), ("merge_mehtod", "'merge_method'")),
    "misspelt method": (
        lambda b: b.recipe.update(merge_method="rotation-merge"),
        ("rotation-merge", "did you mean 'rotation_merge'"),
    ),
    "misspelt models": (lambda b: b.text("models", "modles"), ("modles", "'models'")),
    "misspelt parameters of a model": (
        lambda b: b.donor_entry().update(paramters={"weight": 1}),
        ("paramters", "'parameters'", "models[1]"),
    ),
    "option at the top": (lambda b: b.recipe.update(heads="permutation"), ("heads", "'parameters'")),
    "unknown key of a condition": (
        lambda b: b.parameters.update(ffn=[{"filtre": "layers.0", "value": "none"}, {"value": "permutation"}]),
        ("filtre", "'filter'"),
    ),
    "unknown key of a slice": (
        lambda b: b.recipe.update(slices=[{"sources": [{"model": str(b.anchor), "layer_rnge": [0, 2]}]}]),
        ("layer_rnge", "'layer_range'"),
    ),
    "unknown key of the tokenizer": (lambda b: b.recipe.update(tokenizer={"sorce": "base"}), ("sorce", "'source'")),
    # --- parameters
    "misspelt parameter": (lambda b: b.donor_entry()["parameters"].update(wieght=1), ("wieght", "'weight'", "linear")),
    "misspelt option": (lambda b: b.parameters.update(hedas="permutation"), ("hedas", "'heads'")),
    "parameter of another delegate": (lambda b: b.parameters.update(density=0.5), ("density", "linear")),
    "unknown delegate": (lambda b: b.parameters.update(delegate="lienar"), ("lienar", "'linear'")),
    "delegate to ourselves": (lambda b: b.parameters.update(delegate="rotation_merge"), ("rotation_merge", "delegate")),
    "missing weight": (lambda b: b.donor_entry().pop("parameters"), ("weight", "linear", "models[1]")),
    "missing t": (lambda b: b.delegate("slerp"), ("'t'", "slerp")),
    "base without weight": (lambda b: b.recipe["models"].pop(0), ("weight", "base", "list")),
    "word for a number": (lambda b: b.donor_entry()["parameters"].update(weight="abc"), ("weight", "'abc'", "number")),
    "NaN for a weight": (lambda b: b.donor_entry()["parameters"].update(weight=float("nan")), ("weight", "finite")),
    "mapping for a number": (lambda b: b.donor_entry()["parameters"].update(weight={"a": 1}), ("weight",)),
    "null parameter": (lambda b: b.parameters.update(ffn=None), ("ffn",)),
    "value that the delegate does not know": (
        lambda b: b.delegate("della", rescale="sequential"),
        ("'rescale' is 'sequential'", "true or false", "parameters"),
    ),
    "unknown value": (lambda b: b.parameters.update(attention="rotations"), ("rotations", "'rotation'")),
    "number for a word": (lambda b: b.parameters.update(ffn=3), ("ffn", "3", "permutation")),
    "group that does not exist": (lambda b: b.parameters.update(residual="orthogonal"), ("orthogonal", "rotation")),
    "layers that cannot be read": (lambda b: b.parameters.update(layers="0..3"), ("layers", "0..3", "0-5,11")),
    "layers as a list": (lambda b: b.parameters.update(layers=[0, 1]), ("layers", "0-5,11")),
    "global option under a model": (
        lambda b: b.donor_entry()["parameters"].update(delegate="slerp"),
        ("delegate", "recipe's 'parameters'"),
    ),
    "donor's option for all": (lambda b: b.parameters.update(finetuned_from="x/y"), ("finetuned_from", "one donor")),
    "filter that matches no block": (
        lambda b: b.parameters.update(ffn=[{"filter": "up_proj", "value": "none"}, {"value": "permutation"}]),
        ("'up_proj'", "model.layers.0"),
    ),
    "unknown dtype": (lambda b: b.recipe.update(dtype="flaot32"), ("flaot32", "'float32'")),
    "integer dtype": (lambda b: b.recipe.update(dtype="int64"), ("int64", "float32")),
    # --- models of a recipe
    "no base_model": (lambda b: b.recipe.pop("base_model"), ("base_model is missing", "aligned to")),
    "no models": (lambda b: b.recipe.pop("models"), ("models",)),
    "models and slices": (
        lambda b: b.recipe.update(slices=[{"sources": [{"model": str(b.anchor), "layer_range": [0, 2]}]}]),
        ("models", "slices"),
    ),
    "three models for slerp": (
        lambda b: (
            b.delegate("slerp", t=0.5),
            b.recipe["models"].append({"model": str(twin(b.anchor, b.folder / "c"))}),
        ),
        ("slerp", "exactly 2 inputs", "got 3"),
    ),
    "two models for model_stock": (lambda b: b.delegate("model_stock"), ("model_stock", "at least 3")),
    "a model twice": (lambda b: b.recipe["models"].append(b.donor_entry()), ("uplicate",)),
    "another base for a slice": (
        lambda b: b.recipe.update(
            slices=[
                {
                    "base_model": str(b.donor),
                    "sources": [{"model": str(p), "layer_range": [0, 2]} for p in (b.anchor, b.donor)],
                }
            ],
            models=None,
            parameters={"delegate": "slerp", "t": 0.5},
        ),
        ("base_model", "slices[0]", "anchor"),
    ),
    "unequal slices": (
        lambda b: b.recipe.update(
            slices=[
                {
                    "sources": [
                        {"model": str(b.anchor), "layer_range": [0, 2]},
                        {"model": str(b.donor), "layer_range": [0, 1]},
                    ]
                }
            ],
            models=None,
            parameters={"delegate": "slerp", "t": 0.5},
        ),
        ("slices[0]", "2, 1 layers", "same number of layers"),
    ),
    "layers past the end": (
        lambda b: b.recipe.update(
            slices=[{"sources": [{"model": str(p), "layer_range": [1, 4]} for p in (b.anchor, b.donor)]}],
            models=None,
            parameters={"delegate": "slerp", "t": 0.5},
        ),
        ("layer 2", "has 2", "layer_range"),
    ),
    # --- YAML
    "broken YAML": (lambda b: b.text("models:", "models: ["), ("YAML", "line")),
    "tab in YAML": (lambda b: b.text("  delegate", "\tdelegate"), ("YAML", "line")),
    "list for models": (lambda b: b.recipe.update(models={"a": 1}), ("models", "list")),
    "number for a model": (lambda b: b.donor_entry().update(model=3), ("models[1]",)),
    "list of names for models": (lambda b: b.recipe.update(models=[str(b.anchor), str(b.donor)]), ("models[0]",)),
    "word for parameters": (lambda b: b.recipe.update(parameters="linear"), ("parameters",)),
    # --- files
    "no such directory": (lambda b: shutil.rmtree(b.donor), ("donor", "no such directory")),
    "no config": (lambda b: (b.donor / "config.json").unlink(), ("config.json is missing", "donor")),
    "no weights": (lambda b: b.weights().unlink(), ("no weights", "model.safetensors")),
    "a file for a model": (lambda b: b.donor_entry().update(model=str(b.weights())), ("is a file", "directory")),
    "config that is not JSON": (lambda b: (b.donor / "config.json").write_text("{"), ("config.json", "cannot be read")),
    "config that is a list": (lambda b: (b.donor / "config.json").write_text("[]"), ("config.json", "JSON object")),
    "config that is a directory": (
        lambda b: ((p := b.donor / "config.json").unlink(), p.mkdir()),
        ("config.json", "directory"),
    ),
    "weights that are a directory": (
        lambda b: (b.weights().unlink(), b.weights().mkdir()),
        ("model.safetensors", "directory"),
    ),
    "config of no known type": (lambda b: b.config(model_type="nothing"), ("donor", "config")),
    "unsupported architecture": (
        lambda b: [
            (p / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
            for p in (b.anchor, b.donor)
        ],
        ("BloomForCausalLM", "unsupported: merge"),
    ),
    "truncated safetensors": (
        lambda b: b.weights().write_bytes(b.weights().read_bytes()[:-100]),
        ("model.safetensors", "ownload"),
    ),
    "empty safetensors": (lambda b: b.weights().write_bytes(b""), ("donor", "ownload")),
    "garbage for safetensors": (lambda b: b.weights().write_bytes(b"\x00\x01garbage" * 50), ("donor", "ownload")),
    "damaged header": (
        lambda b: b.weights().write_bytes(struct.pack("<Q", 20) + b'{"a": {"dtype": 3}} ' + bytes(80)),
        ("donor", "ownload"),
    ),
    "a web page for safetensors": (lambda b: b.weights().write_text("<html>Not found</html>"), ("donor", "ownload")),
    "missing shard": (lambda b: (b.sharded().parent / "model-00002-of-00002.safetensors").unlink(), ("shard", "00002")),
    "truncated shard": (
        lambda b: (p := b.sharded().parent / "model-00002-of-00002.safetensors").write_bytes(p.read_bytes()[:-8]),
        ("00002-of-00002", "truncated"),
    ),
    "index that is not JSON": (lambda b: b.sharded().write_text("{"), ("index.json", "cannot be read")),
    "index without a map": (lambda b: b.sharded().write_text("{}"), ("index.json", "weight_map")),
    "index of another model": (
        lambda b: (p := b.sharded()).write_text(p.read_text().replace("layers.1.mlp.up_proj", "layers.9.mlp.up_proj")),
        ("layers.1.mlp.up_proj", "missing"),
    ),
    "pickle of a list": (lambda b: b.pickled([1, 2, 3]), ("pytorch_model.bin", "no tensors")),
    "pickle of numbers": (lambda b: b.pickled({"a": 1}), ("pytorch_model.bin", "no tensors")),
    "pickle that runs code": (
        lambda b: b.pickled({"a": Evil(b.folder / "owned")}),
        ("pytorch_model.bin", "tensors"),
    ),
    "old pickle that runs code": (
        lambda b: (
            b.weights().unlink(),
            (b.donor / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(b.folder / "owned"))),
        ),
        ("pytorch_model.bin", "tensors"),
    ),
    "pickle that runs code, lazily": (
        lambda b: (b.pickled({"a": Evil(b.folder / "owned")}), setattr(b, "flags", ("--lazy-unpickle",))),
        ("pytorch_model.bin", "tensors"),
    ),
    "truncated pickle": (
        lambda b: (
            b.pickled(state(b.anchor)),
            (p := b.donor / "pytorch_model.bin").write_bytes(p.read_bytes()[:-500]),
        ),
        ("pytorch_model.bin", "damaged"),
    ),
    # --- tensors
    "another architecture": (lambda b: b.replace_donor("bert"), ("bert", "llama", "one architecture")),
    "other head counts": (lambda b: b.replace_donor("llama", num_key_value_heads=4), ("KV heads 4", "2")),
    "config of other head counts": (lambda b: b.config(num_attention_heads=8), ("config",)),
    "heads that do not divide": (lambda b: b.config(num_attention_heads=5), ("donor", "5")),
    "other width": (lambda b: b.replace_donor("llama", hidden_size=48), ("size 48", "32")),
    "other FFN size": (lambda b: b.replace_donor("llama", intermediate_size=64), ("64", "48")),
    "other depth": (lambda b: b.replace_donor("llama", num_hidden_layers=3), ("3 layers", "2", "slices")),
    "other vocabulary": (lambda b: b.replace_donor("llama", vocab_size=41), ("41", "tokenizer")),
    "transposed tensor": (
        lambda b: b.tensors(
            lambda t: t.update({k: t[k].T.contiguous() for k in ["model.layers.0.mlp.up_proj.weight"]})
        ),
        ("up_proj.weight", "[32, 48]", "48 x 32"),
    ),
    "missing tensor": (
        lambda b: b.tensors(lambda t: t.pop("model.layers.1.self_attn.q_proj.weight")),
        ("layers.1.self_attn.q_proj.weight", "missing"),
    ),
    "tensor too many": (
        lambda b: b.tensors(lambda t: t.update({"model.layers.0.extra.weight": torch.ones(3)})),
        ("extra.weight", "not part"),
    ),
    "NaN in a matched tensor": (
        lambda b: b.tensors(lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))),
        ("up_proj.weight", "NaN", "donor"),
    ),
    "infinity in an embedding": (
        lambda b: b.tensors(lambda t: t["model.embed_tokens.weight"][3].fill_(float("inf"))),
        ("embed_tokens.weight", "infinity", "donor"),
    ),
    # --- what cannot be
    "rotation of a tied stream": (
        lambda b: (
            b.replace_donor("llama", tie_word_embeddings=True),
            shutil.rmtree(b.anchor),
            make("llama", b.anchor, tie_word_embeddings=True),
            b.parameters.update(residual="rotation"),
        ),
        ("tied", "untie"),
    ),
    "origin that is not there": (
        lambda b: b.donor_entry()["parameters"].update(finetuned_from=str(b.folder / "nowhere")),
        ("nowhere", "no such directory"),
    ),
    "alignment file that is not there": (
        lambda b: by_file(b, b.folder / "none.safetensors"),
        ("none.safetensors",),
    ),
    "alignment file of something else": (
        lambda b: by_file(b, b.weights()),
        ("model.safetensors", "alignment"),
    ),
    "adapter without a cache": (
        lambda b: b.donor_entry().update(model=f"{b.donor}+{make('llama', b.folder / 'x')}"),
        ("adapter",),
    ),
    # --- output
    "output under a file": (
        lambda b: ((b.folder / "file").write_text(""), setattr(b, "out", b.folder / "file" / "out")),
        ("file", "in the way"),
    ),
    "output is a file": (lambda b: b.out.write_text(""), ("out", "in the way")),
    "output is an input": (lambda b: setattr(b, "out", b.donor), ("donor", "one of the inputs")),
    "output that cannot be made": (lambda b: setattr(b, "out", Path("/proc/none/out")), ("/proc",)),
}


@pytest.fixture
def bench(pair: tuple[Path, Path], tmp_path: Path) -> Bench:
    shutil.copytree(pair[0].parent, tmp_path / "b")
    folder = tmp_path / "b"
    recipe = recipe_for("linear", folder / "anchor", folder / "donor")
    return Bench(folder, folder / "anchor", folder / "donor", recipe, folder / "out")


def run(bench: Bench) -> tuple[int, str]:
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.run_yaml import main

    LoaderCache.loaders.clear()
    content = bench.recipe
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    path = write_recipe(content, bench.folder / "recipe.yml")
    result = CliRunner().invoke(main, [str(path), str(bench.out), "--quiet", *bench.flags])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.name != "recipe.yml"}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(bench: Bench, name: str) -> None:
    spoil, words = CASES[name]
    spoil(bench)
    before = snapshot(bench.folder)
    code, output = run(bench)
    assert code in (1, 2), output
    error = one_error(output)
    print(f"{name}: {error}")
    for word in words:
        assert word in error, error
    assert len(error) < 600
    assert snapshot(bench.folder) == before
    assert not (bench.folder / "owned").exists()


def test_there_are_fifty() -> None:
    assert len(CASES) >= 50


def test_the_good_recipe_is_good(bench: Bench) -> None:
    assert run(bench)[0] == 0
    assert (bench.out / "model.safetensors").exists()


def test_in_a_process_of_its_own(bench: Bench) -> None:
    """As a user sees it: nothing but the line, and exit code 2."""
    bench.parameters["delegate"] = "lienar"
    path = write_recipe(bench.recipe, bench.folder / "recipe.yml")
    result = command("mergekit-yaml", path, bench.out)
    assert result.returncode == 2
    assert "'linear'" in one_error(result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_traceback_on_request(bench: Bench) -> None:
    bench.parameters["delegate"] = "lienar"
    path = write_recipe(bench.recipe, bench.folder / "recipe.yml")
    assert "Traceback" in forked("mergekit-yaml", path, bench.out, "-vv").stderr


def test_other_methods_are_left_alone(bench: Bench) -> None:
    """A recipe of mergekit's own fails as it always did."""
    bench.recipe.update(
        merge_method="linear", parameters={"unknown": 1}, models=[{"model": str(bench.folder / "none")}]
    )
    path = write_recipe(bench.recipe, bench.folder / "recipe.yml")
    result = forked("mergekit-yaml", path, bench.out)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_mergekit_pytorch_refuses(bench: Bench) -> None:
    recipe = {
        "merge_method": "rotation_merge",
        "models": [
            {"model": str(p / "model.safetensors"), "parameters": {"weight": 0.5}} for p in (bench.anchor, bench.donor)
        ],
    }
    path = write_recipe(recipe, bench.folder / "recipe.yml")
    result = forked("mergekit-pytorch", path, bench.folder / "merged")
    assert result.returncode == 2
    assert "mergekit-yaml" in one_error(result.stderr)
    assert not (bench.folder / "merged").exists()


def test_errors_in_python_are_exceptions(bench: Bench) -> None:
    from mergekit.config import MergeConfiguration

    from rotation_merge import RotationMergeError

    bench.recipe["tokeniser"] = "base"
    with pytest.raises(RotationMergeError, match="tokeniser"):
        MergeConfiguration.model_validate(bench.recipe)
