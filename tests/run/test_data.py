"""Data that people have reaches the models: text, tables, records, datasets, images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from cli_support import CHECKPOINTS
from plugin_support import build
from plugin_support import make as make_checkpoint
from tiny_models import ALL, make

from rotation_merge import RotationMergeError
from rotation_merge.run.data import Data, read_samples, unpadded
from rotation_merge.run.evaluate import score
from rotation_merge.run.examples import tokenizer_of
from rotation_merge.run.functions import load
from rotation_merge.run.sample_kinds import columns

datasets = pytest.importorskip("datasets")
LLAMA, VIT = str(CHECKPOINTS / "llama-0"), str(CHECKPOINTS / "vit-0")
GPT2 = {"vocab_size": 256, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {LLAMA: load(LLAMA), VIT: load(VIT), "": transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))}


def read(content: Any, folder: Path, model: Any, path: str = "", kind: str = "jsonl", **options: Any) -> Data:
    """Text of a file of some kind, rows of JSON, or arrays, read for a model."""
    file = folder / f"d.{'npz' if isinstance(content, dict) else kind}"
    if isinstance(content, dict):
        np.savez(file, **content)
    else:
        file.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    return read_samples(path, str(file), module=model, **options)


TEXTS = {"text": ["import os", "def f(): pass"] * 3}


@pytest.mark.parametrize("kind", ["d", "d.parquet", "d.json", "d.csv"])
def test_text_columns_are_tokenised_with_the_models_tokenizer(kind: str, models: dict[str, Any], tmp_path: Path):
    rows = datasets.Dataset.from_dict(TEXTS)
    write = {"d": rows.save_to_disk, "d.parquet": rows.to_parquet, "d.json": rows.to_json, "d.csv": rows.to_csv}[kind]
    write(tmp_path / kind)
    data = read_samples(LLAMA, str(tmp_path / kind), batch_size=2, module=models[LLAMA])
    assert (data.task, data.examples, len(data.batches)) == ("next token", 6, 3)
    assert bytes(data.batches[0]["input_ids"][0][:9].tolist()) == b"import os"
    assert data.batches[0]["attention_mask"].sum(1).tolist() == [9, 13]


@pytest.mark.parametrize("family", ["BertConfig", "GPT2Config", "T5Config", "Qwen2Config"])
def test_a_made_up_tokenizer_is_none(family: str, tmp_path: Path):
    """transformers makes one up where its files are missing, to which any text is one unknown token, or nothing."""
    getattr(transformers, family)().save_pretrained(tmp_path)
    with pytest.raises(RotationMergeError, match="no tokenizer can be loaded"):
        tokenizer_of(str(tmp_path))


@pytest.mark.parametrize("kind", ["dataset", "numbers", "names", "no classes"])
def test_images_become_pixels_with_labels(kind: str, models: dict[str, Any], tmp_path: Path):
    """Prepared as the model's processor does, in its size; classes by number, or alphabetically."""
    image = pytest.importorskip("PIL.Image")
    values = np.arange(256, dtype=np.uint8).reshape(4, 8, 8)
    pictures = [image.fromarray(array) for array in values]
    if kind == "dataset":
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"image": pictures, "label": [3, 2, 1, 0]}, features=features)
        rows.save_to_disk(tmp_path / "d")
    folders = {"numbers": "3210", "names": "dcba"}.get(kind, ["."] * 4)
    for number, (folder, picture) in enumerate(zip(folders, pictures, strict=True) if kind != "dataset" else ()):
        (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "d" / folder / f"{number}.png")
    [batch] = read_samples(VIT, str(tmp_path / "d"), module=models[VIT]).batches
    order = [3, 2, 1, 0] if kind in ("numbers", "names") else [0, 1, 2, 3]
    assert np.allclose(batch["pixel_values"][:, 0], values[order] / 16 - 0.5)
    assert batch.get("labels", np.array([])).tolist() == {"dataset": [3, 2, 1, 0], "no classes": []}.get(
        kind, [0, 1, 2, 3]
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_images_without_a_preprocessor_get_the_models_size(channels: int, tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (20, 10), (255, 255, 255)).save(tmp_path / "white.png")
    image.new("L", (7, 9), 0).save(tmp_path / "x-black.png")
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8, "image_size": 16, "patch_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(num_channels=channels, **sizes))
    [batch] = read_samples("", str(tmp_path), module=model).batches
    assert batch["pixel_values"].shape == (2, channels, 16, 16)
    assert batch["pixel_values"].flatten(1).mean(1).tolist() == pytest.approx([1.0, -1.0])


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
    ("text", "wanted", "names"),
    [
        ("text,label\na b,1\n\"c, d\",0\n", [["a b", "c, d"], ["1", "0"]], ["text", "label"]),
        ("id,Review,Class\n1,good film,pos\n2,bad,neg\n", [["good film", "bad"], ["pos", "neg"]], ["text", "label"]),
        ("a,b,score\nx y,z w,0.5\n", [["x y"], ["z w"], ["0.5"]], ["text", "text_pair", "label"]),
        ("text,a,b\nonly this,1,2\n", [["only this"]], ["text"]),
    ],
)  # fmt: skip
def test_columns_of_tables_go_by_their_names(text: str, wanted: list[list], names: list[str]):
    header, *rows = csv.reader(text.splitlines())
    known = columns(header)
    assert list(known) == names
    assert [[row[header.index(known[role])] for row in rows] for role in names] == wanted


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_labels_of_tables_are_numbers_or_classes(delimiter: str, tmp_path: Path):
    classes = {"neg": 0, "pos": 1}
    model = build("bert", vocab_size=256, num_labels=2, label2id=classes, id2label={i: n for n, i in classes.items()})
    kind = {",": "csv", "\t": "tsv"}[delimiter]
    with (tmp_path / "d").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(
            [["Review", "Class", "id"], ["good", "Pos", "x"], ["a, \t", "0", ""]]
        )
    text = (tmp_path / "d").read_text()
    data = read(text, tmp_path, model, LLAMA, kind)
    assert (data.task, data.batches[0]["labels"].tolist()) == ("class", [1, 0])
    wrong = {"good,bad,x": "the model has no class 'bad'", "a,b,c,0": "row 4 has other columns", "a": "row 4"}
    for line, message in wrong.items():
        with pytest.raises(RotationMergeError, match=message):
            read(text + line.replace(",", delimiter) + "\n", tmp_path, model, LLAMA, kind)


@pytest.mark.parametrize(("family", "makes_its_own"), [("t5", False), ("bart", True)])
@pytest.mark.parametrize("lacking", [4, 2, 0])
def test_what_a_decoder_reads_has_to_be_said(family: str, makes_its_own: bool, lacking: int, tmp_path: Path):
    """By labels, where the model makes nothing of what its encoder reads; also to a model without weights (refit's)."""
    model = make(next(case for case in ALL if case.family == family))
    rows = [{"input_ids": [5, 6, 7, 8 + i], **({"labels": [5, 6]} if i >= lacking else {})} for i in range(4)]
    for module in (model, model.to("meta")):
        if makes_its_own or not lacking:
            data = read(rows, tmp_path, module, batch_size=2)
            assert all(("decoder_input_ids" in batch) == ("labels" in batch) == (not lacking) for batch in data.batches)
            continue
        with pytest.raises(RotationMergeError, match=r"d.jsonl: holds nothing that the decoder of T5.*'labels'"):
            read(rows, tmp_path, module, batch_size=2)


def test_tokens_that_a_decoder_writes_may_be_more_than_the_text_has(tmp_path: Path):
    model = make(next(case for case in ALL if case.family == "t5"))
    [batch] = read(
        [{"input_ids": [5], "labels": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [8]}], tmp_path, model
    ).batches
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
def test_labels_that_the_model_does_not_have(labels: list, message: str, tmp_path: Path):
    """They are refused where they are used, and only there; labels of some examples are labels of none."""
    model = load(str(make_checkpoint("bert", tmp_path / "m", num_labels=3)))
    data = read([{"input_ids": [3, 4], "label": label} for label in labels], tmp_path, model, batch_size=2)
    with pytest.raises(RotationMergeError, match=message) as caught:
        score(model, data)
    assert caught.value.where == str(tmp_path / "d.jsonl")


def test_a_row_of_labels_is_as_long_as_the_outputs(tmp_path: Path):
    """Not as the text, to whose length the labels of tokens are padded."""
    path = make_checkpoint("bert", tmp_path / "m", num_labels=3, problem_type="multi_label_classification")
    rows = [{"input_ids": list(range(3, 8 + i)), "labels": [1, 0, i % 2]} for i in range(4)]
    data = read(rows, tmp_path, load(str(path)))
    assert data.task == "labels"
    assert data.batches[0]["labels"].tolist() == [[1, 0, 0], [1, 0, 1]] * 2
    assert score(load(str(path)), data).figures


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 16, 16), (2, 16, 16)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pixels_of_another_size(shape: tuple[int, ...], device: str, tmp_path: Path):
    with pytest.raises(RotationMergeError, match=r"d.npz: ViT\w+ cannot run on 'pixel_values' of shape \[2, "):
        read({"pixel_values": np.zeros(shape, dtype=np.float32)}, tmp_path, build("vit").to(device))


def test_rows_of_pictures_are_read_or_refused_in_one_line(models: dict[str, Any], tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    [batch] = read([{"image": str(tmp_path / "a.png"), "label": 0}], tmp_path, models[VIT], VIT).batches
    assert len(batch["pixel_values"]) == 1
    with pytest.raises(RotationMergeError, match=r"b\.png: cannot be read \(cannot identify image file"):
        read([{"image": str(tmp_path / "b.png"), "label": 0}], tmp_path, models[VIT], VIT)


def test_cells_are_numbers_without_spaces_and_empty_rows_are_none(tmp_path: Path):
    """Also where the model's classes have numbers for names."""
    names = {"id2label": {0: "1", 1: "0"}, "label2id": {"1": 0, "0": 1}}
    model = build("bert", vocab_size=256, num_labels=2, **names)
    data = read("text, label\none, 1\n,\ntwo,+1\n", tmp_path, model, LLAMA, "csv")
    assert (data.task, data.batches[0]["labels"].tolist()) == ("class", [1, 1])
