"""What mergekit can read and be told: slices, modules, shards, pickles, tokenizers, per-layer lists."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run as command
from click.testing import CliRunner
from mergekit.io import loader
from mergekit.scripts.run_yaml import main as run_yaml
from plugin_support import (
    error_of_merge,
    lora,
    make,
    merged,
    mergekit_yaml,
    one_error,
    recipe_for,
    relative_distances,
    state,
    twin,
    with_tokenizer,
    write_recipe,
    write_state,
)
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

import rotation_merge as rm
from rotation_merge.model.folder import ShardReader
from rotation_merge.report.integrity.mending import mend

Pair = tuple[Path, Path]
Tensors = dict[str, torch.Tensor]


def assert_same(result: Tensors, expected: Tensors) -> None:
    distances = relative_distances(result, expected)
    assert max(distances.values()) <= 1e-5, sorted(distances.items(), key=lambda item: -item[1])[:5]


def layers_from(tensors: Tensors, order: list[int]) -> Tensors:
    """The model whose layer i is layer order[i] of `tensors`."""
    result = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for new, old in enumerate(order):
        part = {name: x for name, x in tensors.items() if f".layers.{old}." in name}
        result |= {name.replace(f".layers.{old}.", f".layers.{new}."): x.clone() for name, x in part.items()}
    return result


def with_slices(recipe: dict, *pieces: list[tuple[Path, list[int]]]) -> dict:
    settings = {"parameters": recipe["models"][0]["parameters"]} if "parameters" in recipe["models"][0] else {}
    slices = [
        {"sources": [{"model": str(model), "layer_range": span, **settings} for model, span in piece]}
        for piece in pieces
    ]
    return {key: value for key, value in recipe.items() if key != "models"} | {"slices": slices}


@pytest.mark.parametrize(
    ("delegate", "pieces", "layers"),
    [
        pytest.param("linear", [("ad", [0, 2]), ("ad", [1, 2]), ("ad", [0, 2])], [0, 1, 1, 0, 1], id="repeated"),
        pytest.param("linear", [("ad", [0, 2]), ("da", [1, 2])], [0, 1, 1], id="renumbered, the base's too"),
        pytest.param("passthrough", [("a", [0, 2]), ("d", [0, 2])], [0, 1, 0, 1], id="of single models"),
    ],
)
def test_layers_in_slices(delegate: str, pieces: list[Any], layers: list[int], pair: Pair, tmp_path: Path) -> None:
    """A stack of layers of both: the donor's stand in the anchor's coordinates."""
    models = dict(zip("ad", pair, strict=True))
    slices = [[(models[name], span) for name in names] for names, span in pieces]
    result = merged(with_slices(recipe_for(delegate, *pair), *slices), tmp_path / "out")
    assert_same(result, layers_from(state(pair[0]), layers))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == len(layers)


def test_shifted_layers(pair: Pair, tmp_path: Path) -> None:
    """The donor has a layer more at the front, so its layers stand one lower than the anchor's."""
    anchor, donor = pair
    config = json.loads((donor / "config.json").read_text()) | {"num_hidden_layers": 3}
    shifted = write_state(layers_from(state(donor), [1, 0, 1]), donor, tmp_path / "shifted")
    (shifted / "config.json").write_text(json.dumps(config))
    recipe = recipe_for("slerp", anchor, shifted, t=0.5)
    assert_same(merged(with_slices(recipe, [(anchor, [0, 2]), (shifted, [1, 3])]), tmp_path / "out"), state(anchor))


def test_modules(pair: Pair, tmp_path: Path) -> None:
    recipe = with_slices(recipe_for("linear", *pair), [(model, [0, 2]) for model in pair])
    recipe["modules"] = {"default": {"slices": recipe.pop("slices")}}
    assert_same(merged(recipe, tmp_path / "out"), state(pair[0]))


# --- files -----------------------------------------------------------------------------------------------------------


def as_pickle(source: Path, where: Path, shards: int = 1) -> Path:
    where.mkdir()
    shutil.copy(source / "config.json", where)
    tensors, names = state(source), [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    if shards == 1:
        torch.save(tensors, where / "pytorch_model.bin")
        return where
    place = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        torch.save({key: tensors[key] for key, file in place.items() if file == name}, where / name)
    (where / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return where


@pytest.mark.parametrize(("shards", "flags"), [(1, ()), (3, ("--no-safe-serialization",))])
def test_pickles(pair: Pair, tmp_path: Path, shards: int, flags: tuple[str, ...]) -> None:
    donor, out = as_pickle(pair[1], tmp_path / "bin", shards), tmp_path / "out"
    result = merged(recipe_for("linear", pair[0], donor), out, *flags)
    assert_same(torch.load(out / "pytorch_model.bin", weights_only=True) if flags else result, state(pair[0]))


@pytest.mark.slow
def test_pickles_read_lazily(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread at a time: mergekit patches torch meanwhile, and two would leave it patched. Its own unpickler for
    this does not work on Python 3.13: one line says so."""
    out, at_once, stock = tmp_path / "out", [0], loader.torch_lazy_load

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        at_once.append(at_once.pop() + 1)
        time.sleep(0.003)
        assert at_once == [1], "two threads at once"
        with stock():
            yield
        at_once[:] = [0]

    monkeypatch.setattr(loader, "torch_lazy_load", watched)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as many blocks are read at once
    pickled = [as_pickle(model, tmp_path / f"{number}", shards=3) for number, model in enumerate(pair)]
    result = mergekit_yaml(recipe_for("linear", *pickled), out, "--lazy-unpickle")
    if sys.version_info >= (3, 13) and result.exit_code:
        assert "leave out --lazy-unpickle" in one_error(result.output)
        assert not out.exists()
    else:
        assert result.exit_code == 0, result.output
        assert_same(state(out), state(pair[0]))


def test_a_tied_head_stored_once_more(tmp_path: Path) -> None:
    """The donor stores its tied head too, as some checkpoints do; the output is the anchor again."""
    anchor = make("qwen2", tmp_path / "anchor")
    tensors = state(twin(anchor, tmp_path / "donor"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    again = write_state(tensors, anchor, tmp_path / "again")
    result = merged(recipe_for("linear", anchor, again), tmp_path / "out")
    result.pop("lm_head.weight", None)
    assert_same(result, state(anchor))


def test_a_head_that_differs_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    """Whatever the config says: as transformers loads it, of a donor and of an anchor, on every path."""
    base, body = (make("qwen2", tmp_path / name, seed=seed) for seed, name in enumerate(("base", "body")))
    donor = write_state({**state(body), "lm_head.weight": torch.randn(40, 32)}, body, tmp_path / "donor")
    adapted = lora(tmp_path / "adapter", donor, target_modules=["q_proj", "lm_head"])
    plain = dict.fromkeys(("attention", "heads", "ffn"), "none")
    weighted = recipe_for("linear", base, donor, untie=True, residual="rotation")
    for model, weight in zip(weighted["models"], (0.0, 1.0), strict=True):
        model["parameters"]["weight"] = weight
    merged(weighted, tmp_path / "as donor")
    merged(recipe_for("linear", donor, **plain), tmp_path / "as anchor")
    merged(recipe_for("linear", f"{donor}+{tmp_path / 'adapter'}", **plain), tmp_path / "adapted")
    mends = mend(str(shutil.copytree(donor, tmp_path / "mended")), [])
    rm.align(str(base), str(donor)).apply(str(donor)).save_pretrained(tmp_path / "aligned")
    rm.transfer(str(donor), str(base), str(base), untie=True).save_pretrained(tmp_path / "carried")
    rm.transfer(str(base), str(base), str(donor)).save_pretrained(tmp_path / "new base")
    rm.average([AutoModelForCausalLM.from_pretrained(donor)]).save_pretrained(tmp_path / "module")
    ids = torch.arange(20)[None]
    expected = AutoModelForCausalLM.from_pretrained(donor)(ids).logits
    assert mends == ["config.json: tied head"]
    for name in ("as donor", "as anchor", "mended", "aligned", "carried", "new base", "module"):
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False, name
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits, expected, rtol=0, atol=1e-4)
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "adapted")(ids).logits
    assert_close(result, adapted(ids).logits, rtol=0, atol=1e-4)


def test_a_checkpoint_that_changes_while_it_is_read(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one model and half of another is neither."""
    donor, another = Path(shutil.copytree(pair[1], tmp_path / "donor")), make("llama", tmp_path / "another", seed=7)
    stock = ShardReader.__call__

    def exchanged(*arguments: Any, **options: Any) -> Any:
        new = tmp_path / f"new-{threading.get_ident()}"  # tensors are read by several threads
        shutil.copy(another / "model.safetensors", new)
        new.rename(donor / "model.safetensors")
        return stock(*arguments, **options)

    monkeypatch.setattr(ShardReader, "__call__", exchanged)
    line = error_of_merge(recipe_for("linear", pair[0], donor), tmp_path / "out")
    assert line.startswith(f"Error: {donor}/model.safetensors: was changed while it was read")


@pytest.mark.parametrize("existing", [False, True])
def test_a_recipe_that_cannot_be_read(pair: Pair, tmp_path: Path, existing: bool) -> None:
    """Here the directory stands in its place."""
    path, out = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml"), tmp_path / "out"
    if existing:
        out.mkdir()
    swapped = f"is no recipe, but {path} is a file; give the recipe first"
    for second, words in ((path, swapped), (tmp_path / "new", "cannot be read or written")):
        line = one_error(CliRunner().invoke(run_yaml, [str(out), str(second)]).output)
        assert line.startswith(f"Error: {out}: {words}")


def test_a_class_that_the_recipe_names_is_the_outputs(tmp_path: Path) -> None:
    anchor, donor = (make("llama", tmp_path / f"model-{seed}", seed=seed) for seed in (0, 8))
    config = json.loads((anchor / "config.json").read_text())
    (anchor / "config.json").write_text(json.dumps({**config, "architectures": ["MineForCausalLM"]}))
    recipe = recipe_for("linear", anchor, donor)
    named = {"model": str(anchor), "override_architecture": "LlamaForCausalLM"}
    recipe["base_model"] = recipe["models"][0]["model"] = named
    merged(recipe, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_layers_that_share_their_weights_are_counted_as_before(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "embedding_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    for name in ("anchor", "donor"):
        AlbertModel(AlbertConfig(num_hidden_layers=4, **sizes)).save_pretrained(tmp_path / name)
    merged(recipe_for("linear", tmp_path / "anchor", tmp_path / "donor", unsupported="merge"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4


def test_a_class_of_several_stacks_without_a_file_is_merged_by_names(tmp_path: Path) -> None:
    """Text, images and what stands between them; models whose names differ are refused."""
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = {**sizes, **heads, **experts, "vocab_size": 50, "num_hidden_layers": 2}
    patches = {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    vision = {**sizes, **patches, "depth": 2, "num_heads": 4, "out_hidden_size": 32}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    anchor, donor = (tmp_path / name for name in ("anchor", "donor"))
    for folder in (anchor, donor):
        Qwen3VLMoeForConditionalGeneration(config).save_pretrained(folder)
    recipe = recipe_for("linear", anchor, donor, unsupported="merge")
    result = merged(recipe, tmp_path / "out")
    said = command("check", write_recipe(recipe, tmp_path / "recipe.yml"))
    assert ("cosine" in said.output, said.exit_code) == (False, 0)  # of no matrices
    first, second = state(anchor), state(donor)
    assert_close(result, {name: (first[name] + second[name]) / 2 for name in first})
    without = {name: tensor for name, tensor in second.items() if name != "lm_head.weight"}
    less = write_state(without, donor, tmp_path / "less")
    line = error_of_merge(recipe_for("linear", anchor, less, unsupported="merge"), tmp_path / "none")
    assert "'lm_head.weight' is only in one of it and" in line
    kept = merged(recipe_for("linear", anchor, less, unsupported="merge", exclude="lm_head"), tmp_path / "kept")
    assert_close(kept["lm_head.weight"], first["lm_head.weight"])


# --- tokenizers ------------------------------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(40)]
OTHERS = [WORDS[i] for i in torch.randperm(35, generator=torch.Generator().manual_seed(3))] + ["new1", "new2"]
"""The donor has the anchor's words in another order, lacks some and has some of its own."""
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("words")
    anchor, generator = make("llama", folder / "anchor"), torch.Generator().manual_seed(4)
    tensors = state(twin(anchor, folder / "moved"))
    rows = torch.tensor([WORDS.index(word) if word in WORDS else 0 for word in OTHERS])
    for name in (EMBEDDING, "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name][rows[:-2]], torch.randn(2, 32, generator=generator)])
    donor = write_state(tensors, anchor, folder / "donor")
    config = json.loads((anchor / "config.json").read_text()) | {"vocab_size": len(OTHERS)}
    (donor / "config.json").write_text(json.dumps(config))
    with_tokenizer(WORDS, anchor)
    with_tokenizer(OTHERS, donor)
    return anchor, donor


@pytest.mark.parametrize("source", ["union", "base", {"source": "union", "pad_to_multiple_of": 8}], ids=str)
def test_tokenizers(speakers: Pair, tmp_path: Path, source: object) -> None:
    recipe = recipe_for("linear", *speakers)
    recipe["tokenizer" if isinstance(source, dict) else "tokenizer_source"] = source
    result, expected, of_donor = merged(recipe, tmp_path / "out"), state(speakers[0]), state(speakers[1])
    vocabulary = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").get_vocab()
    assert ("new1" in vocabulary) == (source != "base")
    for name in (EMBEDDING, "lm_head.weight"):
        rows = result.pop(name)
        known = rows[[vocabulary[word] for word in WORDS]]
        torch.testing.assert_close(known, expected.pop(name), rtol=1e-5, atol=1e-6)
        if source != "base":
            torch.testing.assert_close(rows[vocabulary["new1"]], of_donor[name][OTHERS.index("new1")])
        assert not isinstance(source, dict) or len(rows) == 48
    assert_same(result, expected)


def test_a_token_has_the_row_of_the_model_that_is_named(speakers: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *speakers)
    recipe["tokenizer"] = {"source": "base", "tokens": {"w3": {"source": str(speakers[1]), "force": True}}}
    row = merged(recipe, tmp_path / "out")[EMBEDDING][WORDS.index("w3")]
    torch.testing.assert_close(row, state(speakers[1])[EMBEDDING][OTHERS.index("w3")])


def test_long_vocabularies_are_cut_where_the_user_says_so(speakers: Pair, tmp_path: Path) -> None:
    result = merged(recipe_for("linear", *speakers), tmp_path / "out", "--unsafe-truncate-embeddings")
    assert len(result["lm_head.weight"]) == 37


# --- per-layer lists and filters -------------------------------------------------------------------------------------


def changed_layers(result: Tensors, anchor: Path, part: str) -> list[int]:
    """Layers in which some tensor named like `part` is not the anchor's."""
    names = [n for n, d in relative_distances(result, state(anchor)).items() if part in n and d > 1e-3]
    return sorted({int(re.search(r"layers\.(\d+)\.", name)[1]) for name in names})  # type: ignore[index]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("deep")
    anchor = make("llama", folder / "anchor", num_hidden_layers=4)
    return anchor, twin(anchor, folder / "donor", heads="permutation", scaling=False)


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ({"ffn": ["none", "permutation"]}, [0, 1, 2]),
        ({"ffn": [{"filter": "layers.2", "value": "none"}, {"value": "permutation"}]}, [2]),
        ({"layers": "0-1,3"}, [2]),
    ],
)
def test_settings_by_layer(deep: Pair, tmp_path: Path, setting: dict, changed: list[int]) -> None:
    """A block is matched whole or not at all: the tensors of an FFN always agree."""
    result = merged(recipe_for("linear", *deep, **{"scaling": False, **setting}), tmp_path / "out")
    for name in ("up_proj", "gate_proj", "down_proj"):
        assert changed_layers(result, deep[0], name) == changed
    if "layers" not in setting:
        assert changed_layers(result, deep[0], "v_proj") == []


@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_settings_of_a_slice(residual: str, pair: Pair, tmp_path: Path) -> None:
    """They hold for its layers, whether blocks are matched one by one or with the stream."""
    slices = ([(model, [layer, layer + 1]) for model in pair] for layer in range(2))
    recipe = with_slices(recipe_for("linear", *pair, residual=residual), *slices)
    recipe["slices"][1]["parameters"] = {"ffn": "none"}
    assert changed_layers(merged(recipe, tmp_path / "out"), pair[0], "up_proj") == [1]


def test_settings_of_one_donor(deep: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *deep, second := twin(deep[0], tmp_path / "second", seed=5))
    recipe["models"][2]["parameters"] |= {"attention": "none", "heads": False}
    result = merged(recipe, tmp_path / "out")
    assert changed_layers(result, deep[0], "q_proj") == [0, 1, 2, 3]
    assert changed_layers(result, deep[0], "up_proj") == []
    rows = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["rows"]
    assert not [row for row in rows if row["kind"] == "attention" and row["donor"] == str(second)]


@pytest.mark.parametrize("off", [False, "none"])
def test_a_donor_of_no_base_is_merged_as_it_is(off: Any, pair: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair)
    recipe["models"][1]["parameters"]["finetuned_from"] = off
    assert_same(merged(recipe, tmp_path / "off"), state(pair[0]))
