"""Folders of sentence-transformers go through whole: modules, prompts, config; dense maps are aligned with the rest."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import error_of, output_of, parsed
from plugin_support import merged, recipe_for, save
from safetensors.torch import load_file, save_file
from tiny_models import twin_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import ModelOutput

import rotation_merge as rm
from rotation_merge.run.sentence import with_modules

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
NOTHING = {"ffn": "none", "attention": "none", "heads": "none", "scaling": False}
DENSE = "2_Dense"
WHOLE = ("--heads", "permutation", "--residual", "permutation")


def encoder(folder: Path, *dense: int, seed: int = 0, gemma: bool = False) -> Path:
    """Pooling, dense maps of these sizes with a Tanh between (Gemma: linear without biases), normalisation, prompts."""
    torch.manual_seed(seed)
    model: PreTrainedModel = BertModel(BertConfig(**SIZES, max_position_embeddings=16))
    if gemma:
        both_ways = {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 4, "use_bidirectional_attention": True}
        layers = ["sliding_attention", "full_attention"]
        model = Gemma3TextModel(Gemma3TextConfig(**SIZES, **both_ways, layer_types=layers))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    save(model, folder)
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1").save_pretrained(folder)
    places = ["", "1_Pooling", *(f"{i}_Dense" for i, _ in enumerate(dense, 2)), f"{2 + len(dense)}_Normalize"]
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), "Normalize"]
    entries = [{"path": place, "type": f"models.{kind}"} for place, kind in zip(places, kinds, strict=True)]
    settings: dict[str, Any] = {
        "modules.json": entries,
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
        "sentence_bert_config.json": {"max_seq_length": 16},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }
    for place, (width, size) in zip(places[2:-1], pairwise((32, *dense)), strict=True):
        act = "activation.Tanh" if size != dense[-1] and not gemma else "linear.Identity"
        sizes = {"in_features": width, "out_features": size, "bias": not gemma}
        settings[f"{place}/config.json"] = {**sizes, "activation_function": f"torch.nn.modules.{act}"}
        weights = {"linear.weight": torch.randn(size, width)} | ({} if gemma else {"linear.bias": torch.randn(size)})
        (folder / place).mkdir()
        save_file(weights, folder / place / "model.safetensors")
    for name, content in settings.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def moved(model: Path, where: Path, residual: str = "permutation") -> Path:
    """The same function in other coordinates, dense maps included."""
    changed = twin_of(model, heads="permutation", residual=residual)
    shutil.copytree(model, where)
    save_file({n: t.contiguous() for n, t in changed.items() if "_Dense" not in n}, where / "model.safetensors")
    for place in where.glob("*_Dense"):
        tensors = {n.partition(".")[2]: t.contiguous() for n, t in changed.items() if n.startswith(place.name)}
        save_file(tensors, place / "model.safetensors")
    return where


def embed(folder: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Embeddings of texts of one length, by the modules of a folder one by one."""
    with torch.no_grad():
        pooled = AutoModel.from_pretrained(folder, dtype=dtype)(input_ids=ids).last_hidden_state.mean(1)
    for place in sorted(folder.glob("*_Dense")):
        dense = {name: tensor.to(dtype) for name, tensor in load_file(place / "model.safetensors").items()}
        pooled = pooled @ dense["linear.weight"].T + dense.get("linear.bias", 0.0)
        if "Tanh" in (place / "config.json").read_text():
            pooled = pooled.tanh()
    return torch.nn.functional.normalize(pooled, dim=1)


def scored(path: Path, folder: Path, prompt: str = "", most: int = 16) -> Path:
    """Pairs of texts, scored by what a folder's modules say of them behind a prompt."""
    draw, tokenizer = torch.Generator().manual_seed(1), PreTrainedTokenizerFast.from_pretrained(folder)
    words = [" ".join(f"w{i}" for i in torch.randint(2, 40, (4 + k % 5,), generator=draw)) for k in range(64)]
    seen = [embed(folder, torch.tensor([tokenizer(prompt + text)["input_ids"][:most]])) for text in words]
    cosines = [f"{float((a * b).sum()):.6f}" for a, b in zip(seen[::2], seen[1::2], strict=True)]
    rows = zip(words[::2], words[1::2], cosines, strict=True)
    path.write_text("\n".join(map(",".join, [("sentence1", "sentence2", "score"), *rows])))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sentence")
    anchor, donor = encoder(folder / "anchor", 24, 16), encoder(folder / "donor", 24, 16, seed=4)
    gemma = encoder(folder / "gemma", 48, 32, gemma=True)
    twins = {"twin": moved(anchor, folder / "twin"), "gemma twin": moved(gemma, folder / "other", "signed_permutation")}
    return {"anchor": anchor, "donor": donor, "bare": encoder(folder / "bare"), "gemma": gemma, **twins}


@pytest.fixture(scope="module")
def pairs(models: dict[str, Path]) -> Path:
    """Pairs of texts, scored by what the anchor says of them."""
    return scored(models["anchor"].parent / "pairs.csv", models["anchor"])


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "okenizer" not in p.name}


def agrees(folder: Path, pairs: Path) -> float:
    """How a folder's cosines go with the scores of pairs; Python judges as the command does."""
    (facts,) = parsed("evaluate", folder, "--data", pairs)
    assert facts["task"] == "similarity"
    figures = rm.evaluate(folder, str(pairs))
    assert figures == pytest.approx({name: facts[name] for name in ("loss", "error", "pearson", "spearman")}, rel=1e-5)
    assert (figures["spearman"] > 0.99) == (figures["pearson"] > 0.99)
    return figures["pearson"]


def check_alike(first: Path, second: Path) -> None:
    """Check that two models have the same weights, dense maps among them, and the second every module."""
    assert everything(second) >= everything(first)
    a, b = (rm.average([path]) for path in (first, second))
    assert sum(name.endswith("_Dense.linear.weight") for name in a) == 2
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("cls", [1, 2]), ("max", [5, 4]), ("mean", [3, 3]), ("mean_sqrt_len_tokens", [6 / 2**0.5, 6 / 2**0.5]),
     ("weightedmean", [11 / 3, 10 / 3]), ("lasttoken", [5, 4])],
)  # fmt: skip
def test_ways_of_pooling(mode: str, expected: list[float]):
    """Of two tokens and one of padding, by hand."""
    states, mask = torch.tensor([[[1.0, 2.0], [5.0, 4.0], [99.0, 99.0]]]), torch.tensor([[1, 1, 0]])
    encode = type("Encoder", (torch.nn.Module,), {"forward": lambda *_, **__: ModelOutput(last_hidden_state=states)})
    model = encode()
    model.weight, model.config = torch.nn.Parameter(torch.zeros(1)), SimpleNamespace()
    pooling = [{"type": "Pooling", "path": "1_Pooling", "modes": [mode]}]
    embedding = with_modules(model, pooling)(input_ids=torch.zeros(1, 3).long(), attention_mask=mask).text_embeds
    assert embedding.tolist()[0] == pytest.approx(expected)


@pytest.mark.slow
def test_the_default_prompt_stands_before_every_text(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """As sentence-transformers encodes; no more tokens than the folder says."""
    path = shutil.copytree(models["anchor"], tmp_path / "prompted")
    settings, pooling = path / "config_sentence_transformers.json", path / "1_Pooling" / "config.json"
    prompted = scored(tmp_path / "prompted.csv", path, prompt="w7 w8 ")
    short = scored(tmp_path / "short.csv", path, prompt="w7 w8 ", most=3)
    assert agrees(path, prompted) < 0.99
    settings.write_text(json.dumps({"prompts": {"query": "w7 w8 "}, "default_prompt_name": "query"}))
    assert agrees(path, prompted) == pytest.approx(1.0, abs=1e-6)
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 3}))
    assert agrees(path, short) == pytest.approx(1.0, abs=1e-6)
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    assert "its pooling excludes the prompt" in error_of("evaluate", path, "--data", pairs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["align", "carry", "linear", "regmean", "refit", "gemma"])
def test_every_way_brings_a_twin_to_the_anchor(way: str, models: dict[str, Path], pairs: Path, tmp_path: Path):
    """Dense maps included; those that need samples take the pairs as texts. Gemma 3 looks both ways, and its stream is
    read by two linear dense maps."""
    anchor, twin, out = models["anchor"], models["twin"], tmp_path / "out"
    recipe = recipe_for("linear", anchor, twin, residual="permutation")
    if way == "gemma":
        anchor, twin = models["gemma"], models["gemma twin"]
        pairs, recipe = scored(tmp_path / "d.csv", anchor), recipe_for("linear", anchor, twin, residual="largest")
        assert agrees(twin, pairs) == pytest.approx(1.0, abs=1e-6)
    elif way not in ("align", "carry"):
        recipe["parameters"] |= {"delegate": way, **({"data": str(pairs)} if way == "refit" else {})}
    for entry in recipe["models"] if way == "regmean" else ():
        file = entry["parameters"]["statistics"] = str(tmp_path / f"{Path(entry['model']).name}.safetensors")
        output_of("measure", entry["model"], "--data", pairs, "--out", file)
        assert rm.Statistics.open(file).gram(f"{DENSE}.linear.weight") is not None
    if way == "align":
        assert parsed("align", anchor, twin, out, *WHOLE)
    elif way == "carry":
        assert parsed("carry", twin, out, "--from", twin, "--to", anchor, *WHOLE)
    else:
        merged(recipe, out)
    assert everything(out) >= everything(anchor)
    assert agrees(out, pairs) == pytest.approx(1.0, abs=1e-3)
    if way in ("align", "linear", "gemma"):
        check_alike(anchor, out)


@pytest.mark.slow
def test_averages_write_every_module(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """Dense maps in their own folders, averaged by a recipe as in Python."""
    anchor, donor = models["anchor"], models["donor"]
    average = rm.average([anchor, donor])
    average.save_pretrained(tmp_path / "python")
    weights = merged(recipe_for("linear", anchor, donor, **NOTHING), tmp_path / "plain")
    assert not any("_Dense" in name for name in weights)
    check_alike(tmp_path / "python", tmp_path / "plain")
    weights = [load_file(folder / DENSE / "model.safetensors")["linear.weight"] for folder in (anchor, donor)]
    torch.testing.assert_close(average[f"{DENSE}.linear.weight"], sum(weights) / 2)
    assert agrees(tmp_path / "python", pairs) < 0.99
    for out in (tmp_path / "plain", tmp_path / "python"):
        assert everything(out) >= everything(anchor)


def test_what_does_not_know_the_modules_says_so(models: dict[str, Path], pairs: Path, tmp_path: Path):
    anchor, bare = models["anchor"], models["bare"]
    calls = {
        ("measure", anchor, "--data", pairs, "--kinds", "fisher", "--out", tmp_path / "f"): "no head that gives",
        ("polish", anchor, tmp_path / "p", "--teachers", models["twin"], "--data", pairs): "cannot be trained",
        ("align", bare, bare, tmp_path / "out", "--residual", "permutation"): "which this model gives out",
    }
    for arguments, message in calls.items():
        assert message in error_of(*arguments)
    assert parsed("align", bare, bare, tmp_path / "out", "--heads", "permutation")
    assert everything(tmp_path / "out") >= everything(bare)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (f"{DENSE}/model.safetensors", None, "weights are missing"),
        (f"{DENSE}/model.safetensors", "x", "cannot be read"),
        (f"{DENSE}/config.json", '{"in_features": 32, "out_features": 8}', "not as its config says"),
        ("modules.json", "{}", "list of modules"),
        ("modules.json", '[{"type": "a.LSTM", "path": "1"}]', "'LSTM' is not known"),
        ("modules.json", '[{"type": "a.Dense", "path": "../x"}]', "outside"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', "not among its prompts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": ["query"]}', "not among its prompts"),
    ],
)
def test_damage_is_one_line(file: str, content: str | None, message: str, tmp_path: Path):
    bad = encoder(tmp_path / "bad", 16)
    (bad / file).unlink() if content is None else (bad / file).write_text(content)
    (tmp_path / "d.csv").write_text("a,b,score\nw1,w2,0.5\nw3,w4,0.1")
    reads = file in (f"{DENSE}/config.json", "config_sentence_transformers.json")  # what only running the model shows
    call = ("evaluate", bad, "--data", tmp_path / "d.csv") if reads else ("align", bad, bad, tmp_path / "out")
    assert message in error_of(*call)
    assert not (tmp_path / "out").exists()
