"""One model of each family on the way that users take, mergekit's own commands: what a recipe writes is what Python
computes; ten families for whatever else a recipe may say. `pairs.tsv` lists them, with tolerances."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from programs import run
from safetensors.torch import load_file
from subjects import STILL, Pair, Subject, fresh, scratch, subject, tried
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import rotation_merge as rm


class Models:
    """Checkpoints in float32: an anchor, and two models near it that lie in other coordinates."""

    def __init__(self, subject: Subject, residual: str) -> None:
        self.subject = subject
        self.groups = {"heads": "permutation", "residual": residual or "none"}
        model = subject.checkpoint("")
        twins = [rm.Alignment.random(model, seed=seed, **self.groups).apply(model) for seed in (1, 2)]
        views = rm.average([model]), *twins
        self.anchor, self.donor, self.other = (self.write(view, seed) for seed, view in enumerate(views))

    def write(self, view: rm.View, seed: int) -> Path:
        """A checkpoint; of donors with some noise, as a fine-tune has, and with no zeros."""
        generator, folder = torch.Generator().manual_seed(seed), fresh(f"path-{seed}")
        state = {name: x + 0.02 * seed * noise(x, generator) for name, x in view.state_dict().items()}
        rm.average([(state, view.config)]).to(torch.float32).save_pretrained(folder)
        return folder

    def average(self, method: str = "linear", **parameters: Any) -> rm.View:
        return rm.average(aligned(self), method, **parameters)

    def recipe(self, *donors: Path | str, **parameters: Any) -> dict[str, Any]:
        """The recipe of an anchor and donors, evenly weighted."""
        models = [str(model) for model in (self.anchor, *(donors or (self.donor,)))]
        return {
            "merge_method": "rotation_merge",
            "base_model": models[0],
            "models": [{"model": model, "parameters": {"weight": 1 / len(models)}} for model in models],
            "parameters": {"delegate": "linear", **self.groups, **parameters},
            "dtype": "float32",
        }


Law = Callable[[Models], float]
"""How far apart two ways to one model are."""


@functools.lru_cache(maxsize=2)
def aligned(models: Models, *donors: Path, **groups: Any) -> list[rm.View]:
    """The anchor and donors (by default the first), brought to it in Python."""
    donors = donors or (models.donor,)
    alignments = [rm.align(models.anchor, donor, **{**models.groups, **groups}) for donor in donors]
    folded = max(alignments, key=lambda alignment: len(alignment.folded))
    views = [alignment.apply(donor) for alignment, donor in zip(alignments, donors, strict=True)]
    return [folded.apply_anchor(models.anchor), *views]


def noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of a tensor's own size."""
    return x.std(correction=0) * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def done(program: str, *words: object) -> None:
    """One of mergekit's commands, which must succeed."""
    ended = run(program, *words, "--quiet")
    assert ended.code == 0, ended.out + ended.err


def merged(recipe: Mapping[str, Any], *flags: str) -> dict[str, Tensor]:
    """What `mergekit-yaml` writes of a recipe."""
    out, path = fresh("out"), scratch() / "recipe.yml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    done("mergekit-yaml", path, out, *flags)
    return tensors(out)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest relative distance of two models' tensors."""
    assert set(a) == set(b), sorted(set(a) ^ set(b))
    far = {name: float((a[name].double() - b[name].double()).norm() / (b[name].double().norm() + 1e-9)) for name in b}
    assert all(a[name].dtype == b[name].dtype for name in b)
    return max(far.values())


def by(method: str, **parameters: Any) -> Law:
    """A recipe is what Python computes, by a delegate with its parameters."""

    def law(models: Models) -> float:
        document, weights = models.recipe(delegate=method, **parameters), {"weights": [0.5, 0.5]}
        if method == "slerp":
            weights = {}
            for model in document["models"]:
                del model["parameters"]
        return apart(merged(document), models.average(method, **parameters, **weights))

    return law


def stock(models: Models) -> float:
    """The recipe of mergekit's method on aligned models that were written before."""
    folders = fresh("anchored"), fresh("aligned")
    for view, folder in zip(aligned(models), folders, strict=True):
        view.save_pretrained(folder)
    plain = {**models.recipe(), "merge_method": "linear", "parameters": {}, "base_model": str(folders[0])}
    plain["models"] = [{"model": str(folder), "parameters": {"weight": 0.5}} for folder in folders]
    return apart(merged(models.recipe()), merged(plain))


def slices(models: Models) -> float:
    """Layers one after the other, as slices."""
    whole = models.recipe()
    names = [entry["model"] for entry in whole.pop("models")]
    whole["slices"] = [
        {"sources": [{"model": m, "layer_range": [n, n + 1], "parameters": {"weight": 0.5}} for m in names]}
        for n in range(2)
    ]
    return apart(merged(whole), models.average())


def multi(models: Models) -> float:
    """A stage of `mergekit-multi` that takes what another has written."""
    first, out = {"name": "first", **models.recipe()}, fresh("out")
    second = {**models.recipe("first"), "parameters": {"delegate": "linear", **STILL}}
    path = scratch() / "stages.yml"
    path.write_text(yaml.safe_dump_all([first, second], sort_keys=False))
    done("mergekit-multi", path, "--intermediate-dir", fresh("stages"), "--out-path", out)
    expected = rm.average([models.anchor, models.average()], weights=[0.5, 0.5])
    return apart(tensors(out), expected)


def shards(models: Models) -> float:
    """Sharded donors, and a sharded output."""
    donor = fresh("sharded")
    rm.average([models.donor]).save_pretrained(donor, max_shard_size="20K")
    assert len(list(donor.glob("*.safetensors"))) > 1
    result = merged(models.recipe(donor), "--out-shard-size", "20000")
    assert len(list((scratch() / "out").glob("*.safetensors"))) > 1
    return apart(result, models.average())


def half(models: Models) -> float:
    """Models in bfloat16 are averaged in full precision, and rounded once."""
    folders = fresh("half-anchor"), fresh("half-donor")
    for folder, model in zip(folders, (models.anchor, models.donor), strict=True):
        rm.average([model]).to(torch.bfloat16).save_pretrained(folder)
    document = {**models.recipe(), "base_model": str(folders[0]), "dtype": "bfloat16"}
    for entry, folder in zip(document["models"], folders, strict=True):
        entry["model"] = str(folder)
    alignment = rm.align(*folders, **models.groups)
    return apart(merged(document), rm.average([alignment.apply_anchor(folders[0]), alignment.apply(folders[1])]))


def tokenizer(models: Models) -> float:
    """`tokenizer:` with a vocabulary that all have: the same weights, and its files beside them."""
    size = json.loads((models.anchor / "config.json").read_text())
    words = {f"w{number}": number for number in range(size.get("text_config", size)["vocab_size"])}
    for folder in (models.anchor, models.donor):
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    result = merged({**models.recipe(), "tokenizer": {"source": "union"}})
    assert (scratch() / "out" / "tokenizer.json").exists()
    for folder in (models.anchor, models.donor):
        for path in folder.glob("tokenizer*"):
            path.unlink()
    return apart(result, models.average())


def untied(models: Models) -> float:
    """`untie: true`: a head of its own where the embedding was the head, in coordinates that only it allows."""
    result = merged(models.recipe(residual="largest", untie=True))
    assert len(result) >= len(tensors(models.anchor))
    return apart(result, rm.average(aligned(models, residual="largest", untie=True)))


def donors(models: Models) -> float:
    """Two donors."""
    pair = models.donor, models.other
    return apart(merged(models.recipe(*pair)), rm.average(aligned(models, *pair)))


def lora(models: Models) -> float:
    """A donor that is a base with an adapter: as the model that they make."""
    from test_laws import trained

    folder, _ = trained(models.subject)
    name, whole = f"{models.subject.folder}+{folder}", fresh("whole")
    rm.average([name]).save_pretrained(whole)
    return apart(merged(models.recipe(name)), merged(models.recipe(whole)))


def tuned(models: Models) -> float:
    """`finetuned_from`: a change of a base in other coordinates, moved, and added to the anchor."""
    generator, fine = torch.Generator().manual_seed(9), fresh("fine")
    base = rm.average([models.donor])
    state = {name: x + 0.05 * noise(x, generator).float() for name, x in base.state_dict().items()}
    rm.average([(state, base.config)]).save_pretrained(fine)
    document = models.recipe(fine, delegate="task_arithmetic")
    document["models"] = [{"model": str(fine), "parameters": {"weight": 1.0, "finetuned_from": str(models.donor)}}]
    delta = rm.Delta.between(models.donor, fine).moved(
        rm.align(models.anchor, models.donor, **models.groups), models.anchor
    )
    return apart(merged(document), delta.applied())


WRITTEN = (stock, slices, multi, shards, half, tokenizer, untied, donors, lora, tuned)
LAWS: dict[str, Law] = {
    "recipe": by("linear"),
    "slerp": by("slerp", t=0.3),
    "ties": by("ties", density=0.5),
    "wudi": by("wudi"),
    **{law.__name__: law for law in WRITTEN},
}


@functools.lru_cache(maxsize=1)
def models_of(model: str, residual: str) -> Models:
    return Models(subject(model), residual)


@pytest.mark.parametrize("pair", tried(LAWS))
def test_law(pair: Pair) -> None:
    worst = LAWS[pair.law](models_of(pair.model, pair.residual))
    assert worst <= pair.tolerance, f"{worst:.1e}"
