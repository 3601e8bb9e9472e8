"""What mergekit can read and be told: slices, modules, shards, pickles, adapters, tokenizers, per-layer lists."""

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
from click.testing import CliRunner
from mergekit.io import loader
from mergekit.scripts.run_yaml import main as run_yaml
from plugin_support import (
    build,
    make,
    merged,
    mergekit_yaml,
    one_error,
    recipe_for,
    relative_distances,
    state,
    twin,
    write_recipe,
    write_state,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rotation_merge.model.folder import ShardReader

Pair = tuple[Path, Path]


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    distances = relative_distances(got, wanted)
    assert max(distances.values()) <= 1e-5, sorted(distances.items(), key=lambda item: -item[1])[:5]


def layers_from(tensors: dict[str, torch.Tensor], order: list[int]) -> dict[str, torch.Tensor]:
    """The model whose layer i is layer order[i] of `tensors`."""
    result = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for new, old in enumerate(order):
        for name, tensor in tensors.items():
            if f".layers.{old}." in name:
                result[name.replace(f".layers.{old}.", f".layers.{new}.")] = tensor.clone()
    return result


def with_slices(recipe: dict, *pieces: list[tuple[Path, list[int]]]) -> dict:
    weight = recipe["models"][0].get("parameters")
    slices = [
        {
            "sources": [
                {"model": str(m), "layer_range": r, **({"parameters": weight} if weight else {})} for m, r in piece
            ]
        }
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
    got = merged(with_slices(recipe_for(delegate, *pair), *slices), tmp_path / "out")
    assert_same(got, layers_from(state(pair[0]), layers))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == len(layers)


@pytest.mark.parametrize("delegate", ["linear", "slerp"])
def test_shifted_layers(pair: Pair, tmp_path: Path, delegate: str) -> None:
    """The donor has a layer more at the front, so its layers stand one lower than the anchor's."""
    anchor, donor = pair
    config = json.loads((donor / "config.json").read_text()) | {"num_hidden_layers": 3}
    shifted = write_state(layers_from(state(donor), [1, 0, 1]), donor, tmp_path / "shifted")
    (shifted / "config.json").write_text(json.dumps(config))
    extra = {"t": 0.5} if delegate == "slerp" else {}
    recipe = with_slices(recipe_for(delegate, anchor, shifted, **extra), [(anchor, [0, 2]), (shifted, [1, 3])])
    assert_same(merged(recipe, tmp_path / "out"), state(anchor))


@pytest.mark.parametrize("form", ["models", "slices"])
def test_modules(pair: Pair, tmp_path: Path, form: str) -> None:
    anchor, donor = pair
    recipe = recipe_for("linear", anchor, donor)
    if form == "models":
        recipe["modules"] = {"default": {"models": recipe.pop("models")}}
    else:
        recipe = with_slices(recipe, [(anchor, [0, 2]), (donor, [0, 2])])
        recipe["modules"] = {"default": {"slices": recipe.pop("slices")}}
    assert_same(merged(recipe, tmp_path / "out"), state(anchor))


def as_pickle(source: Path, where: Path, shards: int = 1) -> Path:
    where.mkdir()
    (where / "config.json").write_text((source / "config.json").read_text())
    tensors = state(source)
    if shards == 1:
        torch.save(tensors, where / "pytorch_model.bin")
        return where
    names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    place = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        torch.save({key: tensors[key] for key, file in place.items() if file == name}, where / name)
    (where / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return where


@pytest.mark.parametrize("flags", [(), ("--no-safe-serialization",)])
@pytest.mark.parametrize("shards", [1, 3])
def test_pickles(pair: Pair, tmp_path: Path, shards: int, flags: tuple[str, ...]) -> None:
    anchor, donor = pair
    out = tmp_path / "out"
    got = merged(recipe_for("linear", anchor, as_pickle(donor, tmp_path / "bin", shards)), out, *flags)
    if "--no-safe-serialization" in flags:
        got = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert_same(got, state(anchor))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_read_lazily(pair: Pair, tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    pickled = [as_pickle(model, tmp_path / f"{number}", shards) for number, model in enumerate(pair)]
    recipe = recipe_for("linear", *pickled)
    result = mergekit_yaml(recipe, out, "--lazy-unpickle")
    if sys.version_info >= (3, 13) and result.exit_code:
        assert "leave out --lazy-unpickle" in one_error(result.output)
        assert not out.exists()
    else:
        assert result.exit_code == 0, result.output
        assert_same(state(out), state(pair[0]))


@pytest.mark.parametrize("flags", [("--async-write", "--write-threads", "2"), ("--clone-tensors",)])
def test_writing_options(pair: Pair, tmp_path: Path, flags: tuple[str, ...]) -> None:
    anchor, donor = pair
    got = merged(recipe_for("linear", anchor, donor), tmp_path / "out", "--out-shard-size", "9000", *flags)
    assert_same(got, state(anchor))


def test_a_tied_head_stored_once_more(tmp_path: Path) -> None:
    """The donor stores its tied head too, as some checkpoints do; the output is the anchor again."""
    anchor = make("qwen2", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor")
    tensors = state(donor)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    again = write_state(tensors, anchor, tmp_path / "again")
    got = merged(recipe_for("linear", anchor, again), tmp_path / "out")
    got.pop("lm_head.weight", None)
    assert_same(got, state(anchor))


# --- tokenizers --------------------------------------------------------------------------------------------------


def with_tokenizer(words: list[str], where: Path) -> None:
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(where)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str], list[str]]:
    """A pair whose donor has its words in another order, lacks some and has some of its own."""
    folder = tmp_path_factory.mktemp("words")
    anchor = make("llama", folder / "anchor")
    words = [f"w{i}" for i in range(40)]
    with_tokenizer(words, anchor)
    moved = twin(anchor, folder / "moved")
    tensors = state(moved)
    others = [words[i] for i in torch.randperm(35, generator=torch.Generator().manual_seed(3))] + ["new1", "new2"]
    rows = torch.tensor([words.index(word) if word in words else 0 for word in others])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][rows].contiguous()
        tensors[name][-2:] = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    donor = write_state(tensors, anchor, folder / "donor")
    config = json.loads((anchor / "config.json").read_text()) | {"vocab_size": len(others)}
    (donor / "config.json").write_text(json.dumps(config))
    with_tokenizer(others, donor)
    return anchor, donor, words, others


@pytest.mark.parametrize("source", ["union", "base", {"source": "union"}, {"source": "union", "pad_to_multiple_of": 8}])
def test_tokenizers(speakers: tuple[Path, Path, list[str], list[str]], tmp_path: Path, source: object) -> None:
    anchor, donor, words, others = speakers
    recipe = recipe_for("linear", anchor, donor)
    recipe["tokenizer" if isinstance(source, dict) else "tokenizer_source"] = source
    got, wanted, theirs = merged(recipe, tmp_path / "out"), state(anchor), state(donor)
    vocabulary = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").get_vocab()
    assert ("new1" in vocabulary) == (source != "base")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = got.pop(name)
        known = [vocabulary[word] for word in words]
        torch.testing.assert_close(rows[known], wanted.pop(name), rtol=1e-5, atol=1e-6)
        if source != "base":
            torch.testing.assert_close(rows[vocabulary["new1"]], theirs[name][others.index("new1")])
        if isinstance(source, dict) and "pad_to_multiple_of" in source:
            assert len(rows) == 48
    assert_same(got, wanted)


def test_a_token_has_the_row_of_the_model_that_is_named(
    speakers: tuple[Path, Path, list[str], list[str]], tmp_path: Path
) -> None:
    anchor, donor, _, others = speakers
    recipe = recipe_for("linear", anchor, donor)
    recipe["tokenizer"] = {"source": "base", "tokens": {"w3": {"source": str(donor), "force": True}}}
    vocabulary, name = {f"w{i}": i for i in range(40)}, "model.embed_tokens.weight"
    row = merged(recipe, tmp_path / "out")[name][vocabulary["w3"]]
    torch.testing.assert_close(row, state(donor)[name][others.index("w3")])


def test_activations_are_compared_on_the_same_tokens(
    speakers: tuple[Path, Path, list[str], list[str]], tmp_path: Path
) -> None:
    recipe = recipe_for("ot_fusion", *speakers[:2], data="synthetic")
    recipe["tokenizer_source"] = "union"
    assert "its tokens are not those of" in one_error(mergekit_yaml(recipe, tmp_path / "out").output)
    assert not (tmp_path / "out").exists()


def test_different_vocabularies_without_tokenizer(
    speakers: tuple[Path, Path, list[str], list[str]], tmp_path: Path
) -> None:
    result = mergekit_yaml(recipe_for("linear", *speakers[:2]), tmp_path / "out")
    assert result.exit_code == 2
    assert "tokenizer" in one_error(result.output)
    assert not (tmp_path / "out").exists()
    recipe = recipe_for("linear", *speakers[:2])
    assert len(merged(recipe, tmp_path / "out", "--unsafe-truncate-embeddings")["lm_head.weight"]) == 37


# --- per-layer lists and filters -----------------------------------------------------------------------------------


def changed_layers(got: dict[str, torch.Tensor], anchor: Path, part: str) -> list[int]:
    """Layers in which some tensor named like `part` is not the anchor's."""
    distances = relative_distances(got, state(anchor))
    found = {int(re.search(r"layers\.(\d+)\.", n)[1]) for n, d in distances.items() if part in n and d > 1e-3}  # type: ignore[index]
    return sorted(found)


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
        ({"ffn": "none"}, [0, 1, 2, 3]),
    ],
)
def test_settings_by_layer(deep: Pair, tmp_path: Path, setting: dict, changed: list[int]) -> None:
    """A block is matched whole or not at all: the tensors of an FFN always agree."""
    anchor, donor = deep
    got = merged(recipe_for("linear", anchor, donor, **{"scaling": False, **setting}), tmp_path / "out")
    for name in ("up_proj", "gate_proj", "down_proj"):
        assert changed_layers(got, anchor, name) == changed
    if "layers" not in setting:
        assert changed_layers(got, anchor, "v_proj") == []


@pytest.mark.slow
def test_settings_of_one_donor(deep: Pair, tmp_path: Path) -> None:
    anchor, donor = deep
    other = twin(anchor, tmp_path / "other", seed=5)
    recipe = recipe_for("linear", anchor, donor, other)
    recipe["models"][2]["parameters"]["attention"] = "none"
    recipe["models"][2]["parameters"]["heads"] = False
    got = merged(recipe, tmp_path / "out")
    assert changed_layers(got, anchor, "q_proj") == [0, 1, 2, 3]
    assert changed_layers(got, anchor, "up_proj") == []
    rows = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["rows"]
    assert not [row for row in rows if row["kind"] == "attention" and row["donor"] == str(other)]


def test_a_filter_that_matches_no_block(deep: Pair, tmp_path: Path) -> None:
    """mergekit shows filters the names of tensors, so people write those; here they see blocks."""
    recipe = recipe_for("linear", *deep, ffn=[{"filter": "mlp", "value": "none"}, {"value": "permutation"}])
    result = mergekit_yaml(recipe, tmp_path / "out")
    assert result.exit_code == 2
    error = one_error(result.output)
    assert "'mlp'" in error
    assert "ffn" in error
    assert "model.layers.0" in error


def test_delegates_own_lists_and_filters(deep: Pair, tmp_path: Path) -> None:
    """They mean what they mean in mergekit: the value for each tensor."""
    anchor = deep[0]
    noisy = {
        n: t + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for n, t in state(anchor).items()
    }
    close = write_state(noisy, anchor, tmp_path / "close")
    t = [{"filter": "mlp", "value": 0.0}, {"value": [0.0, 1.0]}]
    off = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    ours = merged(recipe_for("slerp", anchor, close, t=t, **off), tmp_path / "ours")
    plain = recipe_for("slerp", anchor, close)
    theirs = merged({**plain, "merge_method": "slerp", "parameters": {"t": t}}, tmp_path / "theirs")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_loads_and_computes(tmp_path: Path) -> None:
    """A fresh model of another build comes out the same way, its config and card included."""
    model = build("mistral", dtype=torch.float32)
    model.save_pretrained(tmp_path / "anchor")
    donor = twin(tmp_path / "anchor", tmp_path / "donor")
    merged(recipe_for("linear", tmp_path / "anchor", donor), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "### Alignment" in card
    assert "- rotation-merge" in card
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert report["summary"][str(donor)]["relative_after"] < 1e-3


def test_a_checkpoint_that_changes_while_it_is_read(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one model and half of another is neither."""
    anchor, donor = pair[0], Path(shutil.copytree(pair[1], tmp_path / "donor"))
    other, stock = make("llama", tmp_path / "other", seed=7), ShardReader.__call__

    def exchanged(*given: Any, **options: Any) -> Any:
        new = tmp_path / f"new-{threading.get_ident()}"  # tensors are read by several threads
        shutil.copy(other / "model.safetensors", new)
        new.rename(donor / "model.safetensors")
        return stock(*given, **options)

    monkeypatch.setattr(ShardReader, "__call__", exchanged)
    line = one_error(mergekit_yaml(recipe_for("linear", anchor, donor), tmp_path / "out").output)
    assert line.startswith(f"Error: {donor}/model.safetensors: was changed while it was read")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_a_recipe_in_the_place_of_the_directory(pair: Pair, tmp_path: Path, existing: bool) -> None:
    path, out = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml"), tmp_path / "out"
    if existing:
        out.mkdir()
    line = one_error(CliRunner().invoke(run_yaml, [str(out), str(path)]).output)
    assert line.startswith(f"Error: {out}: cannot be read or written")


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
    from transformers import AlbertConfig, AlbertModel

    sizes = {"vocab_size": 20, "hidden_size": 8, "embedding_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    for name in ("anchor", "donor"):
        AlbertModel(AlbertConfig(num_hidden_layers=4, **sizes)).save_pretrained(tmp_path / name)
    merged(recipe_for("linear", tmp_path / "anchor", tmp_path / "donor", unsupported="merge"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
