"""Folders of sentence-transformers go through whole: modules, prompts, config; dense maps are aligned with the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import mergekit_yaml, one_error, recipe_for, save
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
WHOLE = ("--heads", "permutation", "--residual", "permutation")


def modules(folder: Path, *dense: int, linear: bool = False) -> Path:
    """Pooling, dense maps of these sizes with a Tanh between (or linear without biases), normalisation, prompts."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    width, settings = 32, {
        "modules.json": [{"idx": i, "name": str(i), "path": paths[i], "type": kind} for i, kind in enumerate(types)],
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
        "sentence_bert_config.json": {"max_seq_length": 16},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }  # fmt: skip
    for path in paths[1:]:
        (folder / path).mkdir()
    for number, size in enumerate(dense):
        act = "activation.Tanh" if number < len(dense) - 1 and not linear else "linear.Identity"
        sizes = {"in_features": width, "out_features": size, "bias": not linear}
        settings[f"{number + 2}_Dense/config.json"] = {**sizes, "activation_function": f"torch.nn.modules.{act}"}
        weights = {"linear.weight": torch.randn(size, width)} | ({} if linear else {"linear.bias": torch.randn(size)})
        save_file(weights, folder / f"{number + 2}_Dense" / "model.safetensors")
        width = size
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def encoder(folder: Path, *dense: int, seed: int = 0, gemma: bool = False) -> Path:
    torch.manual_seed(seed)
    both_ways = {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 4, "use_bidirectional_attention": True}
    model: PreTrainedModel = BertModel(BertConfig(**SIZES, max_position_embeddings=16))
    if gemma:
        layers = ["sliding_attention", "full_attention"]
        model = Gemma3TextModel(Gemma3TextConfig(**SIZES, **both_ways, layer_types=layers))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    save(model, folder)
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1").save_pretrained(folder)
    return modules(folder, *dense, linear=gemma)


def moved(model: Path, where: Path, residual: str = "permutation") -> Path:
    """The same function in other coordinates, dense maps included."""
    changed = twin_of(model, heads="permutation", residual=residual)
    shutil.copytree(model, where)
    save_file({n: t.contiguous() for n, t in changed.items() if "_Dense" not in n}, where / "model.safetensors")
    for place in where.glob("*_Dense"):
        own = {n.partition(".")[2]: t.contiguous() for n, t in changed.items() if n.startswith(place.name)}
        save_file(own, place / "model.safetensors")
    return where


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sentence")
    anchor = encoder(folder / "anchor", 24, 16)
    donor = encoder(folder / "donor", 24, 16, seed=4)
    return {"anchor": anchor, "twin": moved(anchor, folder / "twin"), "donor": donor,
            "bare": encoder(folder / "bare")}  # fmt: skip


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
def pairs(models: dict[str, Path]) -> Path:
    """Pairs of texts, scored by what the anchor says of them."""
    return scored(models["anchor"].parent / "pairs.csv", models["anchor"])


@pytest.fixture(scope="module")
def texts(pairs: Path) -> Path:
    """The same texts, one a line."""
    path = pairs.with_name("texts.txt")
    path.write_text("".join(f"{text}\n" for row in pairs.read_text().split("\n")[1:] for text in row.split(",")[:2]))
    return path


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "okenizer" not in p.name}


def agrees(folder: Path, pairs: Path) -> float:
    """How a folder's cosines go with the scores of pairs."""
    return parsed("evaluate", folder, "--data", pairs)[0]["pearson"]


def check_alike(wanted: Path, got: Path, dense: int = 2) -> None:
    """Check that two models have the same weights, dense maps among them, and the second every module."""
    assert everything(got) >= everything(wanted)
    first, second = (rm.average([path]) for path in (wanted, got))
    assert sum(name.endswith("_Dense.linear.weight") for name in first) == dense
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("cls", [1, 2]), ("max", [5, 4]), ("mean", [3, 3]), ("mean_sqrt_len_tokens", [6 / 2**0.5, 6 / 2**0.5]),
     ("weightedmean", [11 / 3, 10 / 3]), ("lasttoken", [5, 4])],
)  # fmt: skip
def test_ways_of_pooling(mode: str, wanted: list[float]):
    """Of two tokens and one of padding, by hand."""
    states, mask = torch.tensor([[[1.0, 2.0], [5.0, 4.0], [99.0, 99.0]]]), torch.tensor([[1, 1, 0]])
    encode = type("Encoder", (torch.nn.Module,), {"forward": lambda *_, **__: ModelOutput(last_hidden_state=states)})
    model = encode()
    model.weight, model.config = torch.nn.Parameter(torch.zeros(1)), SimpleNamespace()
    pooling = [{"type": "Pooling", "path": "1_Pooling", "modes": [mode]}]
    embedding = with_modules(model, pooling)(input_ids=torch.zeros(1, 3).long(), attention_mask=mask).text_embeds
    assert embedding.tolist()[0] == pytest.approx(wanted)


@pytest.mark.slow
def test_the_default_prompt_stands_before_every_text(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """As sentence-transformers encodes; no more tokens than the folder says."""
    path = tmp_path / "prompted"
    shutil.copytree(models["anchor"], path)
    settings, pooling = path / "config_sentence_transformers.json", path / "1_Pooling" / "config.json"
    prompted = scored(tmp_path / "prompted.csv", path, prompt="w7 w8 ")
    short = scored(tmp_path / "short.csv", path, prompt="w7 w8 ", most=3)
    assert agrees(path, prompted) < 0.99
    settings.write_text(json.dumps({"prompts": {"query": "w7 w8 "}, "default_prompt_name": "query"}))
    assert agrees(path, prompted) == pytest.approx(1.0, abs=1e-6)
    assert agrees(path, short) < 0.99
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 3}))
    assert agrees(path, short) == pytest.approx(1.0, abs=1e-6)
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    assert "its pooling excludes the prompt" in one_error(run("evaluate", path, "--data", pairs).output)
    settings.write_text(json.dumps({"default_prompt_name": "query"}))
    assert "not among its prompts" in one_error(run("evaluate", path, "--data", pairs).output)


@pytest.mark.slow
def test_align_takes_the_stream_and_the_dense_maps_along(models: dict[str, Path], tmp_path: Path):
    anchor, twin, out = models["anchor"], models["twin"], tmp_path / "out"
    assert parsed("align", anchor, twin, out, *WHOLE)
    assert parsed("verify", twin, out)["same"]
    check_alike(anchor, out)


@pytest.mark.slow
def test_embedding_gemma(tmp_path: Path):
    """Gemma 3 that looks both ways, its stream read by two linear dense maps: a moved twin gives the same embeddings,
    and the anchor when merged with it."""
    anchor = encoder(tmp_path / "anchor", 48, 32, gemma=True)
    donor = moved(anchor, tmp_path / "twin", residual="signed_permutation")
    first, second = ({**load_file(p / "model.safetensors"), **load_file(p / "2_Dense" / "model.safetensors")}
                     for p in (anchor, donor))  # fmt: skip
    assert not [name for name in first if torch.equal(first[name], second[name])]
    ids = torch.arange(2, 11)[None]
    found, moved_found = (embed(path, ids, torch.float64) for path in (anchor, donor))
    assert found.shape == (1, 32)
    assert (moved_found - found).abs().max() <= 1e-5
    assert parsed("verify", anchor, donor)["same"]
    model = Gemma3TextModel.from_pretrained(anchor)
    assert agrees(anchor, scored(tmp_path / "pairs.csv", anchor)) == pytest.approx(1.0, abs=1e-6)
    other = ids.index_fill(1, torch.tensor([8]), 30)
    early = [model(input_ids=x).last_hidden_state[:, 0] for x in (ids, other)]
    assert (early[0] - early[1]).abs().max() > 1e-3  # the first token sees the last one
    out = tmp_path / "out"
    result = mergekit_yaml(recipe_for("linear", anchor, donor, residual="signed_permutation"), out)
    assert result.exit_code == 0, result.output
    check_alike(anchor, out)


@pytest.mark.slow
def test_a_merge_writes_every_module(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """Dense maps in their own folders: aligned ones are the anchor's, others the mean, as in Python."""
    anchor, donor = models["anchor"], models["donor"]
    result = mergekit_yaml(recipe_for("linear", anchor, models["twin"], residual="permutation"), tmp_path / "aligned")
    assert result.exit_code == 0, result.output
    check_alike(anchor, tmp_path / "aligned")
    plain = recipe_for("linear", anchor, donor, ffn="none", attention="none", heads="none", scaling=False)
    assert mergekit_yaml(plain, tmp_path / "plain").exit_code == 0
    merged = rm.average([anchor, donor])
    merged.save_pretrained(tmp_path / "python")
    both = [load_file(path / "2_Dense" / "model.safetensors")["linear.weight"] for path in (anchor, donor)]
    torch.testing.assert_close(merged["2_Dense.linear.weight"], sum(both) / 2)
    check_alike(tmp_path / "python", tmp_path / "plain")
    for out in (tmp_path / "plain", tmp_path / "python"):
        assert everything(out) >= everything(anchor)
        assert not any("_Dense" in name for name in load_file(out / "model.safetensors"))
    assert agrees(tmp_path / "python", pairs) == pytest.approx(rm.evaluate(merged, pairs)["pearson"], rel=1e-5)


def test_without_a_dense_map_the_stream_stays(models: dict[str, Path], tmp_path: Path):
    done = run("align", models["bare"], models["bare"], tmp_path / "out", "--residual", "permutation")
    assert done.exit_code == 2
    assert "which this model gives out" in one_error(done.output)
    assert parsed("align", models["bare"], models["bare"], tmp_path / "out", "--heads", "permutation")
    assert everything(tmp_path / "out") >= everything(models["bare"])


@pytest.mark.slow
def test_carry_keeps_the_modules(models: dict[str, Path], tmp_path: Path):
    arguments = ("--from", models["anchor"], "--to", models["twin"], *WHOLE)
    assert parsed("carry", models["anchor"], tmp_path / "out", *arguments)
    assert everything(tmp_path / "out") >= everything(models["twin"])
    assert parsed("verify", models["anchor"], tmp_path / "out", "--tolerance", "1e-3")["same"]


@pytest.mark.slow
def test_measured_by_spearman_on_pairs(models: dict[str, Path], pairs: Path):
    """Embeddings are those of the modules one by one, of texts of several lengths in one batch."""
    anchor, donor = parsed("evaluate", models["anchor"], models["donor"], "--data", pairs)
    assert anchor["task"] == "similarity"
    assert anchor["pearson"] == pytest.approx(1.0, abs=1e-6)
    assert anchor["spearman"] == pytest.approx(1.0, abs=1e-3)
    assert max(donor["pearson"], donor["spearman"]) < 0.9
    (barrier,) = parsed("barrier", models["anchor"], models["twin"], "--data", pairs, "--points", "3", *WHOLE)
    plain, aligned = (curve["loss"] for curve in barrier["curves"])
    assert plain[1] > aligned[1] + 0.02
    assert aligned[1] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.slow
def test_python_calls_judge_embeddings_as_the_commands_do(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """From folders, and from views of them; what cannot be trained is refused by both."""
    anchor, twin, donor = (models[name] for name in ("anchor", "twin", "donor"))
    (row,) = parsed("evaluate", donor, "--data", pairs)
    for model in (donor, rm.average([donor])):
        figures = rm.evaluate(model, pairs)
        assert figures == pytest.approx({name: row[name] for name in figures}, rel=1e-5)
        assert {"loss", "pearson", "spearman"} <= figures.keys()
    options = ("--points", "3", "--attention", "none", "--heads", "none", "--ffn", "none")
    (barrier,) = parsed("barrier", anchor, twin, "--data", pairs, *options)
    curve = rm.barrier(anchor, twin, pairs, rm.BarrierConfig(points=3))
    assert curve.loss == pytest.approx(barrier["curves"][0]["loss"], rel=1e-5)
    assert run("measure", donor, "--data", pairs, "--out", tmp_path / "s.safetensors").exit_code == 0
    rm.measure(donor, pairs).save(tmp_path / "python.safetensors")
    wanted, got = (load_file(tmp_path / name) for name in ("s.safetensors", "python.safetensors"))
    assert rm.Statistics.open(tmp_path / "python.safetensors").gram("2_Dense.linear.weight") is not None
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(rm.RotationMergeError, match="whose modules cannot be trained"):
        rm.polish(anchor, [twin], pairs)


@pytest.mark.slow
def test_averages_with_inputs_take_pairs_as_texts(models: dict[str, Path], pairs: Path, tmp_path: Path):
    """By regmean and refit the anchor and itself in other coordinates give the anchor back, dense maps included; what
    does not know the modules behind the transformer says so."""
    anchor, twin = models["anchor"], models["twin"]
    recipe = recipe_for("linear", anchor, twin, residual="permutation")
    for entry in recipe["models"]:
        file = tmp_path / f"{Path(entry['model']).name}.safetensors"
        assert run("measure", entry["model"], "--data", pairs, "--out", file).exit_code == 0
        entry["parameters"]["statistics"] = str(file)
    assert rm.Statistics.open(file).gram("2_Dense.linear.weight") is not None
    recipe["parameters"]["delegate"] = "regmean"
    assert mergekit_yaml(recipe, tmp_path / "out").exit_code == 0
    assert parsed("evaluate", tmp_path / "out", "--data", pairs)[0]["spearman"] == pytest.approx(1, abs=1e-3)
    refit = recipe_for("linear", anchor, twin, residual="permutation")
    refit["parameters"] |= {"delegate": "refit", "data": str(pairs)}
    assert mergekit_yaml(refit, tmp_path / "refit").exit_code == 0
    assert parsed("evaluate", tmp_path / "refit", "--data", pairs)[0]["spearman"] == pytest.approx(1, abs=1e-3)
    bad = run("measure", anchor, "--data", pairs, "--kinds", "fisher", "--out", tmp_path / "f.safetensors")
    assert "no head that gives probabilities" in one_error(bad.output)
    bad = run("polish", anchor, tmp_path / "polished", "--teachers", twin, "--data", pairs)
    assert "whose modules cannot be trained" in one_error(bad.output)


@pytest.mark.slow
@pytest.mark.parametrize("single", [False, True])
def test_refit_moves_embeddings_towards_both(
    single: bool, models: dict[str, Path], pairs: Path, texts: Path, tmp_path: Path
):
    """On pairs and on single texts; dense maps are solved with the transformer's, and come nearer to what was wanted
    than the plain average does, on texts that the refit has not seen."""
    recipe = recipe_for("linear", models["anchor"], models["donor"], ffn="none", attention="none", heads="none")
    assert mergekit_yaml(recipe, tmp_path / "plain").exit_code == 0
    recipe["parameters"] |= {"delegate": "refit", "data": str(texts if single else pairs), "samples": 48}
    assert mergekit_yaml(recipe, tmp_path / "refit").exit_code == 0
    assert everything(tmp_path / "refit") >= everything(models["anchor"])
    names = ("anchor", "donor", "plain", "refit")
    folders = [models.get(name, tmp_path / name) for name in names]
    ids = torch.randint(2, 40, (64, 7), generator=torch.Generator().manual_seed(9))
    anchor, donor, plain, refit = (embed(folder, ids) for folder in folders)
    middle = torch.nn.functional.normalize(anchor + donor, dim=1)
    assert ((refit - middle).norm() < 0.8 * (plain - middle).norm()).item()
    dense = [load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"] for folder in folders]
    assert not torch.allclose(dense[2], dense[3], atol=1e-3)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "2_Dense" / "model.safetensors").unlink(), "weights are missing"),
        (lambda f: (f / "2_Dense" / "model.safetensors").write_bytes(b"x"), "cannot be read"),
        (lambda f: (f / "modules.json").write_text("{}"), "list of modules"),
        (lambda f: (f / "modules.json").write_text('[{"type": "a.LSTM", "path": "1"}]'), "'LSTM' is not known"),
        (lambda f: (f / "modules.json").write_text('[{"type": "a.Dense", "path": "../x"}]'), "outside"),
    ],
)
def test_damage_is_one_line(spoil: Any, said: str, tmp_path: Path):
    bad = encoder(tmp_path / "bad", 16)
    spoil(bad)
    done = run("align", bad, bad, tmp_path / "out")
    assert done.exit_code == 2
    assert said in one_error(done.output)
    assert not (tmp_path / "out").exists()
