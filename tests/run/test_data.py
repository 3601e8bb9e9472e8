"""Data that people have reaches the models: dataset directories with text and images, tables, records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from cli_support import CHECKPOINTS
from plugin_support import build
from plugin_support import make as make_checkpoint
from tiny_models import ALL, make

from rotation_merge import RotationMergeError
from rotation_merge.run.data import read_batches
from rotation_merge.run.evaluate import score
from rotation_merge.run.examples import tokenizer_of
from rotation_merge.run.functions import load
from rotation_merge.run.tables import read_table, roles

datasets = pytest.importorskip("datasets")


def test_text_columns_are_tokenised_with_the_models_tokenizer(tmp_path: Path):
    datasets.Dataset.from_dict({"text": ["import os", "def f(): pass"] * 3}).save_to_disk(tmp_path / "d")
    path = str(CHECKPOINTS / "llama-0")
    found = read_batches(str(tmp_path / "d"), path, load(path), batch_size=2)
    assert found.task == "next token"
    assert found.examples == 6
    assert bytes(found.batches[0]["input_ids"][0][:9].tolist()) == b"import os"


@pytest.mark.parametrize("family", ["BertConfig", "GPT2Config", "T5Config", "Qwen2Config"])
def test_a_made_up_tokenizer_is_none(family: str, tmp_path: Path):
    """transformers makes one up where its files are missing, to which any text is one unknown token, or nothing."""
    getattr(transformers, family)().save_pretrained(tmp_path)
    with pytest.raises(RotationMergeError, match=r"no tokenizer (can be loaded|is there)"):
        tokenizer_of(str(tmp_path))


def test_image_columns_become_pixels_with_labels(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((8, 8), 16 * i, dtype=np.uint8)) for i in range(4)]
    datasets.Dataset.from_dict(
        {"image": pictures, "label": [0, 1, 2, 3]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    ).save_to_disk(tmp_path / "d")
    path = str(CHECKPOINTS / "vit-0")
    found = read_batches(str(tmp_path / "d"), path, load(path))
    assert found.batches[0]["pixel_values"].shape == (4, 1, 8, 8)
    assert found.batches[0]["labels"].tolist() == [0, 1, 2, 3]


def test_a_dataset_without_a_known_column_is_refused_in_one_line(tmp_path: Path):
    datasets.Dataset.from_dict({"answer": [42]}).save_to_disk(tmp_path / "d")
    path = str(CHECKPOINTS / "llama-0")
    with pytest.raises(RotationMergeError, match="columns are answer"):
        read_batches(str(tmp_path / "d"), path, load(path))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3, 256], r"token id 256 is outside the model's vocabulary of 256"),
        ([-1, 3], r"token id -1 is outside"),
        ([3] * 9, r"9 tokens in a row, the model has positions for 8"),
    ],
)
def test_tokens_that_the_model_does_not_have(ids: list[int], said: str, tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=256, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    (tmp_path / "d.jsonl").write_text(f'{{"input_ids": {ids}}}\n')
    with pytest.raises(RotationMergeError, match=said) as caught:
        read_batches(str(tmp_path / "d.jsonl"), "unused", model)
    assert caught.value.where == str(tmp_path / "d.jsonl")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"input_ids": "abc"}', "record 1: its 'input_ids' are abc"),
        ('{"input_ids": null}', "record 1: its 'input_ids' are None"),
        ('{"input_ids": [1.5]}', r"record 1: its 'input_ids' are \[1.5\]"),
        ('{"input_ids": [[1, 2], [3]]}', r"record 1: its 'input_ids' are \[\[1, 2\], \[3\]\]"),
        ('{"input_ids": [[1, 2], [3, 4]]}', r"record 1: its 'input_ids' are \[\[1, 2\], \[3, 4\]\]"),
        ('{"input_ids": []}', "record 1: holds no tokens"),
        ('{"input_ids": [1], "label": {"a": 1}}', "record 1: its label is {'a': 1}"),
        ('{"input_ids": [1], "labels": ["a"]}', r"record 1: its label is \['a'\]"),
        ('{"input_ids": [1], "label": NaN}', "'labels' holds NaN or infinity"),
        ({"input_ids": np.ones((3, 4))}, r"'input_ids' is of float32, shape \[3, 4\]"),
        ({"input_ids": np.ones(3, int)}, r"'input_ids' is of int64, shape \[3\]"),
        ({"inputs_embeds": np.full((2, 3, 8), np.inf)}, "'inputs_embeds' holds NaN or infinity"),
    ],
)
def test_what_are_no_numbers(record: str | dict, said: str, tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=256, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    path = tmp_path / ("d.jsonl" if isinstance(record, str) else "d.npz")
    path.write_text(record) if isinstance(record, str) else np.savez(path, **record)
    with pytest.raises(RotationMergeError, match=said):
        read_batches(str(path), "unused", model)


@pytest.mark.parametrize(
    ("text", "wanted", "columns"),
    [
        ("text,label\na b,1\n\"c, d\",0\n", [["a b", "c, d"], [1, 0]], ["text", "label"]),
        ("id,Review,Class\n1,good film,pos\n2,bad,neg\n", [["good film", "bad"], ["pos", "neg"]], ["text", "label"]),
        ("a,b,score\nx y,z w,0.5\n", [["x y"], ["z w"], [0.5]], ["text", "text_pair", "label"]),
        ("text,a,b\nonly this,1,2\n", [["only this"]], ["text"]),
    ],
)  # fmt: skip
def test_tables(text: str, wanted: list[list], columns: list[str], tmp_path: Path):
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "t.tsv").write_text(text.replace("c, d", "c d").replace(",", "\t"))
    records = read_table(tmp_path / "t.csv")
    known = roles(records[0])
    assert list(known) == columns
    assert [[record[known[role]] for record in records] for role in columns] == wanted
    assert roles(read_table(tmp_path / "t.tsv")[0]) == known


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("text,label\n", "no rows"),
        ("text,label\na,b,c\n", "row 2 has 3 columns"),
        ("n,m\n1,2\n2,3\n", "columns are n, m; none holds texts"),
    ],
)  # fmt: skip
def test_tables_that_are_none(text: str, said: str, tmp_path: Path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(RotationMergeError, match=said):
        read_batches(str(tmp_path / "t.csv"), "", build("bert"))


@pytest.mark.parametrize(("family", "makes_its_own"), [("t5", False), ("bart", True)])
@pytest.mark.parametrize("without", ["labels", "labels of some", "nothing"])
def test_what_a_decoder_reads_has_to_be_said(family: str, makes_its_own: bool, without: str, tmp_path: Path):
    """By labels, where the model makes nothing of what its encoder reads; also to a model without weights (refit's)."""
    model = make(next(case for case in ALL if case.family == family))
    records = [{"input_ids": [5, 6, 7, 8 + i], "labels": [5, 6]} for i in range(4)]
    for record in records[: {"labels": 4, "labels of some": 2}.get(without, 0)]:
        del record["labels"]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    for one in (model, model.to("meta")):
        if without == "nothing" or makes_its_own:
            found = read_batches(str(tmp_path / "d.jsonl"), "", one, batch_size=2)
            assert all(("decoder_input_ids" in batch) == ("labels" in batch) for batch in found.batches)
            continue
        with pytest.raises(RotationMergeError, match=r"d.jsonl: has examples without an input for .* T5.*'labels'"):
            read_batches(str(tmp_path / "d.jsonl"), "", one, batch_size=2)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 7, 1], "label 7 is none of the model's 3 classes"),
        ([0, -1, 1], "label -1 is none of the model's 3 classes"),
        ([0.5, 1.5, 2.5], "1 numbers for each example, BertForSequenceClassification gives 3"),
        ([0, 1, None], "no loss on data without labels for every example"),
    ],
)
def test_labels_that_the_model_does_not_have(labels: list, said: str, tmp_path: Path):
    """They are refused where they are used, and only there; labels of some examples are labels of none."""
    path = make_checkpoint("bert", tmp_path / "m", num_labels=3)
    rows = [{"input_ids": [3, 4], "label": one} for one in labels]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_batches(str(tmp_path / "d.jsonl"), "", load(str(path)), batch_size=2)
    with pytest.raises(RotationMergeError, match=said) as caught:
        score(load(str(path)), found)
    assert caught.value.where == str(tmp_path / "d.jsonl")


def test_a_row_of_labels_is_as_long_as_the_outputs(tmp_path: Path):
    """Not as the text, to whose length the labels of tokens are padded."""
    path = make_checkpoint("bert", tmp_path / "m", num_labels=3, problem_type="multi_label_classification")
    rows = [{"input_ids": list(range(3, 8 + i)), "labels": [1, 0, i % 2]} for i in range(4)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = load(str(path))
    found = read_batches(str(tmp_path / "d.jsonl"), "", model)
    assert found.task == "labels"
    assert found.batches[0]["labels"].tolist() == [[1, 0, 0], [1, 0, 1]] * 2
    assert score(model, found).figures


def test_pixels_of_another_size(tmp_path: Path):
    for seed, shape in enumerate([(2, 3, 8, 8), (2, 1, 16, 16), (2, 16, 16)]):
        np.savez(tmp_path / f"{seed}.npz", pixel_values=np.zeros(shape, dtype=np.float32))
    model = build("vit")
    for one in (model, model.to("meta")):
        for seed in range(3):
            with pytest.raises(
                RotationMergeError, match=rf"{seed}.npz: ViT\w+ cannot run on 'pixel_values' of shape \[2, "
            ):
                read_batches(str(tmp_path / f"{seed}.npz"), "", one)
