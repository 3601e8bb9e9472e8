"""Data that people have reaches the models: text, tables, records, datasets, images, arrays; or none is needed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_support import CHECKPOINTS
from plugin_support import build
from plugin_support import make as make_checkpoint
from tiny_models import ALL, keep_float64, make
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

from rotation_merge import RotationMergeError
from rotation_merge.run.data import Data, batched_by_length, read_samples, unpadded
from rotation_merge.run.evaluate import score
from rotation_merge.run.examples import tokenizer_of
from rotation_merge.run.functions import fused_attention, load
from rotation_merge.run.generated_samples import self_written
from rotation_merge.run.sample_kinds import columns

datasets = pytest.importorskip("datasets")
image = pytest.importorskip("PIL.Image")
LLAMA, VIT = str(CHECKPOINTS / "llama-0"), str(CHECKPOINTS / "vit-0")
GPT2 = {"vocab_size": 256, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {LLAMA: load(LLAMA), VIT: load(VIT), "": transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))}


def family(name: str) -> Any:
    return make(next(case for case in ALL if case.family == name))


def read(content: Any, folder: Path, model: Any, path: str = "", kind: str = "jsonl", **options: Any) -> Data:
    """Text of a file of some kind, rows of JSON, or arrays, read for a model."""
    file = folder / f"d.{'npz' if isinstance(content, dict) else kind}"
    if isinstance(content, dict):
        np.savez(file, **content)
    else:
        file.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    return read_samples(path, str(file), module=model, **options)


@pytest.mark.parametrize("kind", ["d", "d.parquet", "d.json", "d.csv"])
def test_text_columns_are_tokenised_with_the_models_tokenizer(kind: str, models: dict[str, Any], tmp_path: Path):
    rows = datasets.Dataset.from_dict({"text": ["import os", "def f(): pass"] * 3})
    write = {"d": rows.save_to_disk, "d.parquet": rows.to_parquet, "d.json": rows.to_json, "d.csv": rows.to_csv}[kind]
    write(tmp_path / kind)
    data = read_samples(LLAMA, str(tmp_path / kind), batch_size=2, module=models[LLAMA])
    assert (data.task, data.examples, len(data.batches)) == ("next token", 6, 3)
    assert bytes(data.batches[0]["input_ids"][0][:9].tolist()) == b"import os"
    assert data.batches[0]["attention_mask"].sum(1).tolist() == [9, 13]


@pytest.mark.parametrize("config", ["BertConfig", "GPT2Config", "T5Config", "Qwen2Config"])
def test_a_made_up_tokenizer_is_none(config: str, tmp_path: Path):
    """transformers makes one up where its files are missing, to which any text is one unknown token, or nothing."""
    getattr(transformers, config)().save_pretrained(tmp_path)
    with pytest.raises(RotationMergeError, match="no tokenizer can be loaded"):
        tokenizer_of(str(tmp_path))


@pytest.mark.parametrize(
    ("folders", "labels"),
    [("dataset", [3, 2, 1, 0]), ("3210", [0, 1, 2, 3]), ("dcba", [0, 1, 2, 3]), ("....", [])],
)
def test_images_become_pixels_with_labels(folders: str, labels: list[int], models: dict[str, Any], tmp_path: Path):
    """Prepared as the model's processor does, in its size; classes by number, or alphabetically."""
    values = np.arange(256, dtype=np.uint8).reshape(4, 8, 8)
    pictures = [image.fromarray(array) for array in values]
    if folders == "dataset":
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        content = {"image": pictures, "label": [3, 2, 1, 0]}
        datasets.Dataset.from_dict(content, features=features).save_to_disk(tmp_path / "d")
    else:
        for number, (folder, picture) in enumerate(zip(folders, pictures, strict=True)):
            (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
            picture.save(tmp_path / "d" / folder / f"{number}.png")
    [batch] = read_samples(VIT, str(tmp_path / "d"), module=models[VIT]).batches
    order = [3, 2, 1, 0] if folders in ("3210", "dcba") else [0, 1, 2, 3]
    assert np.allclose(batch["pixel_values"][:, 0], values[order] / 16 - 0.5)
    assert batch.get("labels", np.array([])).tolist() == labels


@pytest.mark.parametrize("channels", [1, 3])
def test_images_without_a_preprocessor_get_the_models_size(channels: int, tmp_path: Path):
    image.new("RGB", (20, 10), (255, 255, 255)).save(tmp_path / "white.png")
    image.new("L", (7, 9), 0).save(tmp_path / "x-black.png")
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8, "image_size": 16, "patch_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(num_channels=channels, **sizes))
    [batch] = read_samples("", str(tmp_path), module=model).batches
    assert batch["pixel_values"].shape == (2, channels, 16, 16)
    assert batch["pixel_values"].flatten(1).mean(1).tolist() == pytest.approx([1.0, -1.0])


def test_rows_of_pictures_are_read_or_refused_in_one_line(models: dict[str, Any], tmp_path: Path):
    image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    [batch] = read([{"image": str(tmp_path / "a.png"), "label": 0}], tmp_path, models[VIT], VIT).batches
    assert len(batch["pixel_values"]) == 1
    with pytest.raises(RotationMergeError, match=r"b\.png: cannot be read \(cannot identify image file"):
        read([{"image": str(tmp_path / "b.png"), "label": 0}], tmp_path, models[VIT], VIT)


ROW = "record 1: its 'input_ids' are "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"input_ids": [3, 256]}], r"token id 256 is outside the model's vocabulary of 256"),
        ([{"input_ids": [-1, 3]}], r"token id -1 is outside"),
        ([{"input_ids": [3] * 9}], r"9 tokens in a row, the model has positions for 8"),
        ([{"input_ids": "abc"}], ROW + "abc"),
        ([{"input_ids": None}], "record 1: columns are input_ids; none holds texts"),
        ([{"input_ids": [1.5]}], ROW + r"\[1.5\]"),
        ([{"input_ids": [[1, 2], [3]]}], ROW + r"\[\[1, 2\], \[3\]\]"),
        ([{"input_ids": [[1, 2], [3, 4]]}], ROW + r"\[\[1, 2\], \[3, 4\]\]"),
        ([{"input_ids": []}], "record 1: holds no tokens"),
        ([{"input_ids": [1]}, {"answer": 42}], "record 2: columns are answer; none holds texts"),
        ([{"input_ids": [1]}, [1, 2]], r"record 2: columns are \[1, 2\]; none holds texts"),
        ([{"input_ids": [1], "label": {"a": 1}}], "record 1: its label is {'a': 1}"),
        ([{"input_ids": [1], "labels": ["a"]}], r"record 1: its label is \['a'\]"),
        ('{"input_ids": [1], "label": NaN}', "'labels' holds NaN or infinity"),
        ([{"text": "no tokenizer"}], "no tokenizer can be loaded"),
        ([{"input_ids": [1], "label": i} for i in ([0.5], 1)], "examples whose 'labels' differ in shape"),
        ([{"input_ids": [1], "label": i} for i in ([0.5], [1.5, 2.5])], "examples whose 'labels' differ in shape"),
        ('{"input_ids": [1]}\n{"input_ids": ', "cannot be read .line 2 is not JSON"),
        ("", "holds no examples"),
        ({"input_ids": np.ones((3, 4))}, r"'input_ids' is of float32, shape \[3, 4\]"),
        ({"input_ids": np.ones(3, int)}, r"'input_ids' is of int64, shape \[3\]"),
        ({"input_ids": np.ones((3, 4), int), "attention_mask": np.ones((3, 5), int)}, "'attention_mask' has shape"),
        ({"input_ids": np.ones((3, 4), int), "labels": np.array(3)}, "arrays of different lengths: .*labels 0"),
        ({"inputs_embeds": np.full((2, 3, 8), np.inf)}, "'inputs_embeds' holds NaN or infinity"),
        ({"pixel_values": np.ones((1, 3, 4, 4))}, "holds pixel_values; GPT2LMHeadModel takes input_ids"),
        ({"input_ids": np.array(["a"])}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_take_is_one_line(content: Any, message: str, models: dict[str, Any], tmp_path: Path):
    with pytest.raises(RotationMergeError, match=message) as caught:
        read(content, tmp_path, models[""])
    assert str(caught.value.where).startswith((str(tmp_path / "d."), "the model"))
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cells", "names"),
    [
        ("text,label\na b,1\n\"c, d\",0\n", [["a b", "c, d"], ["1", "0"]], ["text", "label"]),
        ("id,Review,Class\n1,good film,pos\n2,bad,neg\n", [["good film", "bad"], ["pos", "neg"]], ["text", "label"]),
        ("a,b,score\nx y,z w,0.5\n", [["x y"], ["z w"], ["0.5"]], ["text", "text_pair", "label"]),
        ("text,a,b\nonly this,1,2\n", [["only this"]], ["text"]),
    ],
)  # fmt: skip
def test_columns_of_tables_go_by_their_names(text: str, cells: list[list[str]], names: list[str]):
    header, *rows = csv.reader(text.splitlines())
    known = columns(header)
    assert list(known) == names
    assert [[row[header.index(known[role])] for row in rows] for role in names] == cells


@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_labels_of_tables_are_numbers_or_classes(kind: str, delimiter: str, tmp_path: Path):
    classes = {"neg": 0, "pos": 1}
    model = build("bert", vocab_size=256, num_labels=2, label2id=classes, id2label={i: n for n, i in classes.items()})
    text = 'Review,Class,id\ngood,Pos,x\n"a, \t",0,\n'.replace(",", delimiter).replace(f'"a{delimiter}', '"a,')
    data = read(text, tmp_path, model, LLAMA, kind)
    assert (data.task, data.batches[0]["labels"].tolist()) == ("class", [1, 0])
    for line, message in {
        "good,bad,x": "the model has no class 'bad'",
        "a,b,c,0": "row 4 has other columns",
        "a": "row 4",
    }.items():
        with pytest.raises(RotationMergeError, match=message):
            read(text + line.replace(",", delimiter) + "\n", tmp_path, model, LLAMA, kind)


def test_cells_are_numbers_without_spaces_and_empty_rows_are_none(tmp_path: Path):
    """Also where the model's classes have numbers for names."""
    names = {"id2label": {0: "1", 1: "0"}, "label2id": {"1": 0, "0": 1}}
    model = build("bert", vocab_size=256, num_labels=2, **names)
    data = read("text, label\none, 1\n,\ntwo,+1\n", tmp_path, model, LLAMA, "csv")
    assert (data.task, data.batches[0]["labels"].tolist()) == ("class", [1, 1])


@pytest.mark.parametrize(("name", "makes_its_own"), [("t5", False), ("bart", True)])
@pytest.mark.parametrize("lacking", [4, 2, 0])
def test_what_a_decoder_reads_has_to_be_said(name: str, makes_its_own: bool, lacking: int, tmp_path: Path):
    """By labels, where the model makes nothing of what its encoder reads; also to a model without weights (refit's)."""
    model = family(name)
    rows = [{"input_ids": [5, 6, 7, 8 + i], **({"labels": [5, 6]} if i >= lacking else {})} for i in range(4)]
    for module in (model, model.to("meta")):
        if makes_its_own or not lacking:
            data = read(rows, tmp_path, module, batch_size=2)
            assert all(("decoder_input_ids" in batch) == ("labels" in batch) == (not lacking) for batch in data.batches)
            continue
        with pytest.raises(RotationMergeError, match=r"d.jsonl: holds nothing that the decoder of T5.*'labels'"):
            read(rows, tmp_path, module, batch_size=2)


def test_tokens_that_a_decoder_writes_may_be_more_than_the_text_has(tmp_path: Path):
    rows = [{"input_ids": [5], "labels": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [8]}]
    [batch] = read(rows, tmp_path, family("t5")).batches
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["decoder_input_ids"].shape == (2, 3)
    assert [part["decoder_input_ids"].shape for part in unpadded([batch], "d")] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 7, 1], "label 7 is none of the model's 3 classes"),
        ([0, -1, 1], "label -1 is none of the model's 3 classes"),
        ([0.5, 1.5, 2.5], "1 numbers for each example, BertForSequenceClassification gives 3"),
        ([0, 1, None], "no loss on data without labels for every example"),
    ],
)
def test_labels_that_the_model_does_not_have(labels: list[Any], message: str, tmp_path: Path):
    """They are refused where they are used, and only there; labels of some examples are labels of none."""
    model = load(str(make_checkpoint("bert", tmp_path / "m", num_labels=3)))
    data = read([{"input_ids": [3, 4], "label": label} for label in labels], tmp_path, model, batch_size=2)
    with pytest.raises(RotationMergeError, match=message) as caught:
        score(model, data)
    assert caught.value.where == str(tmp_path / "d.jsonl")


def test_a_row_of_labels_is_as_long_as_the_outputs(tmp_path: Path):
    """Not as the text, to whose length the labels of tokens are padded."""
    model = load(str(make_checkpoint("bert", tmp_path / "m", num_labels=3, problem_type="multi_label_classification")))
    rows = [{"input_ids": list(range(3, 8 + i)), "labels": [1, 0, i % 2]} for i in range(4)]
    data = read(rows, tmp_path, model)
    assert data.task == "labels"
    assert data.batches[0]["labels"].tolist() == [[1, 0, 0], [1, 0, 1]] * 2
    assert score(model, data).figures


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 16, 16), (2, 16, 16)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pixels_of_another_size(shape: tuple[int, ...], device: str, tmp_path: Path):
    with pytest.raises(RotationMergeError, match=r"d.npz: ViT\w+ cannot run on 'pixel_values' of shape \[2, "):
        read({"pixel_values": np.zeros(shape, dtype=np.float32)}, tmp_path, build("vit").to(device))


# --- samples that models make, batches without padding ---------------------------------------------------------------


@pytest.mark.slow
def test_a_language_model_writes_its_own_samples(models: dict[str, Any]):
    model = models[LLAMA]
    first, again, other = (read_samples(LLAMA, "self", 3, length=40, seed=s, module=model) for s in (0, 0, 1))
    ids = first.batches[0]["input_ids"]
    assert (ids.shape, first.task) == ((3, 40), "next token")
    assert torch.equal(ids, again.batches[0]["input_ids"])
    assert not torch.equal(ids, other.batches[0]["input_ids"])
    noise = torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, random = (float(model(input_ids=x, labels=x).loss) for x in (ids, noise))
    assert own < random - 3


def test_models_without_a_cache_write_the_same(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """As Mamba, which keeps what it has read in another way: the whole text goes through it for every token."""
    model = models[LLAMA]
    text, forward = self_written(model, LLAMA, 2, 12), model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: MambaCausalLMOutput(logits=forward(**inputs).logits))
    assert torch.equal(self_written(model, LLAMA, 2, 12), text)


def test_synthetic_images_are_in_the_range_of_real_ones(models: dict[str, Any]):
    pixels = read_samples(VIT, "synthetic", 40, 40, module=models[VIT]).batches[0]["pixel_values"]
    assert pixels.shape == (40, 1, 8, 8)
    assert -0.5 <= float(pixels.min()) < -0.4
    assert 0.4 < float(pixels.max()) <= 0.5


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [("self", VIT, "does not write text"), ("synthetic", LLAMA, "does not take images")],
)
def test_samples_of_another_kind_are_refused(source: str, path: str, message: str, models: dict[str, Any]):
    with pytest.raises(RotationMergeError, match=message):
        read_samples(path, source, module=models[path])


def test_padding_is_cut_off_and_equal_lengths_stand_together():
    left = {"input_ids": torch.tensor([[0, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    right = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    cut = unpadded([right, left, {"input_ids": torch.tensor([[6, 7]])}], "data")
    assert [batch["input_ids"].tolist() for batch in cut] == [[[1, 2, 3]], [[4, 5], [8, 9]], [[6, 7]]]
    assert set(cut[0]) == {"input_ids"}
    with pytest.raises(RotationMergeError, match="holes"):
        unpadded([{"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}], "data")


def test_texts_of_like_length_stand_together():
    texts = [torch.arange(1, n + 1) for n in (5, 10, 9, 4, 8)]
    pictures = {"input_ids": torch.ones(1, 3).long(), "pixel_values": torch.zeros(1, 1, 2, 2)}
    labelled = [{"input_ids": text[None], "labels": torch.ones(1)} for text in texts]
    batches = batched_by_length([*labelled, pictures], 30)
    assert [batch["input_ids"].shape for batch in batches[:-1]] == [(3, 10), (2, 5)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches[:-1]] == [[10, 9, 8], [5, 4]]
    assert batches[-1] is pictures
    assert torch.equal(batches[0]["input_ids"][2, :8], texts[4])
    (alike,) = batched_by_length([{"input_ids": torch.ones(2, 4).long()}], 8)
    assert set(alike) == {"input_ids"}


@pytest.mark.parametrize("name", ["bert", "deberta_v2", "mpnet", "gpt2", "llama", "falcon_h1", "qwen3_next", "mixtral"])
def test_padding_at_the_end_changes_no_family(name: str):
    """Recurrent ones, too: all families were tried once."""
    model = family(name)
    long, short = (torch.randint(3, 20, (1, n), generator=torch.Generator().manual_seed(n)) for n in (10, 8))
    (both,) = batched_by_length([{"input_ids": long}, {"input_ids": short}], 100)
    with keep_float64(), torch.no_grad():
        padded, alone = (model(**batch)[0] for batch in (both, {"input_ids": short}))
    assert float((padded[1:, :8] - alone).abs().max()) <= 1e-9


@pytest.mark.parametrize(("scale", "kind"), [(1.0, "sdpa"), (0.9, "eager")])
def test_fused_attention_only_where_it_computes_the_same(
    scale: float, kind: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    model, usual = models[LLAMA], torch.nn.functional.scaled_dot_product_attention
    scaled = lambda *inputs, **options: scale * usual(*inputs, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled)
    with fused_attention(model, {"input_ids": torch.arange(20)[None]}):
        assert model.config._attn_implementation == kind
    assert model.config._attn_implementation == "eager"
