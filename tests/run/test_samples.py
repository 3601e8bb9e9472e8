"""Data that people have reaches the models: text, tables, records, datasets, images, arrays; or none is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_support import CHECKPOINTS
from plugin_support import build
from tiny_models import ALL, keep_float64, make
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

from rotation_merge import RotationMergeError
from rotation_merge.run.batches import batched_by_length, unpadded
from rotation_merge.run.data import Data, described, read_samples, split_batches
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import fused_attention, load
from rotation_merge.run.sources import PLAUSIBLE, self_written, tokenizer_of

datasets = pytest.importorskip("datasets")
image = pytest.importorskip("PIL.Image")
LLAMA, VIT = str(CHECKPOINTS / "llama-0"), str(CHECKPOINTS / "vit-0")
GPT2 = {"vocab_size": 256, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}


def family(name: str) -> Any:
    return make(next(case for case in ALL if case.family == name))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    pictured = {name: family(name).float() for name in ("qwen2_5_vl", "llava", "mistral3")}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    small = {"t5": family("t5"), "meta": build("vit").to("meta"), "bert": build("bert", num_labels=3)}
    return {LLAMA: load(LLAMA), VIT: load(VIT), "": gpt2, **pictured, **small}


def read(content: Any, folder: Path, model: Any, path: str = "", kind: str = "jsonl", **options: Any) -> Data:
    """Text of a file of some kind, rows of JSON, or arrays, read for a model."""
    file = folder / f"d.{'npz' if isinstance(content, dict) else kind}"
    if isinstance(content, dict):
        np.savez(file, **{name: np.asarray(array) for name, array in content.items()})
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


def test_a_made_up_tokenizer_is_none(tmp_path: Path):
    """transformers makes one up where its files are missing, to which any text is one unknown token, or nothing."""
    for config in ("BertConfig", "GPT2Config", "T5Config", "Qwen2Config"):
        getattr(transformers, config)().save_pretrained(tmp_path)
        with pytest.raises(RotationMergeError, match="no tokenizer can be loaded"):
            tokenizer_of(str(tmp_path))


@pytest.mark.parametrize(
    ("folders", "labels"),
    [("dataset", [3, 2, 1, 0]), ("3210", [0, 1, 2, 3]), ("dcba", [0, 1, 2, 3]), ("....", []), ("rows", [0, 1, 2, 3])],
)
def test_images_become_pixels_with_labels(folders: str, labels: list[int], models: dict[str, Any], tmp_path: Path):
    """Prepared as the model's processor does, in its size; classes by number, or alphabetically."""
    values = np.arange(256, dtype=np.uint8).reshape(4, 8, 8)
    pictures, place = [image.fromarray(array) for array in values], tmp_path / "d"
    if folders == "dataset":
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        content = {"image": pictures, "label": [3, 2, 1, 0]}
        datasets.Dataset.from_dict(content, features=features).save_to_disk(place)
    else:
        files = [place / ("" if folders == "rows" else folders[i]) / f"{i}.png" for i in range(4)]
        for picture, file in zip(pictures, files, strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
    if folders == "rows":
        rows = [{"image": str(file), "label": i} for i, file in enumerate(files)]
        [batch] = read(rows, tmp_path, models[VIT], VIT).batches
    else:
        [batch] = read_samples(VIT, str(place), module=models[VIT]).batches
    order = [3, 2, 1, 0] if folders in ("3210", "dcba") else [0, 1, 2, 3]
    assert np.allclose(batch["pixel_values"][:, 0], values[order] / 16 - 0.5)
    assert batch.get("labels", torch.tensor([])).tolist() == labels


def test_images_without_a_preprocessor_get_the_models_size(tmp_path: Path):
    image.new("RGB", (20, 10), (255, 255, 255)).save(tmp_path / "white.png")
    image.new("L", (7, 9), 0).save(tmp_path / "x-black.png")
    for channels in (1, 3):
        [batch] = read_samples("", str(tmp_path), module=build("vit", num_channels=channels)).batches
        assert batch["pixel_values"].shape == (2, channels, 16, 16)
        assert batch["pixel_values"].flatten(1).mean(1).tolist() == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize(("kind", "mark"), [("csv", ","), ("tsv", "\t")])
def test_labels_of_tables_are_numbers_or_classes(kind: str, mark: str, tmp_path: Path):
    """Cells are numbers, also where names of classes are; a mark inside a text is none."""
    sizes, named = {"vocab_size": 256, "num_labels": 2}, 'Review|Class|id\ngood|Pos|x\n"a, \t"|0|\n'
    by_name = build("bert", **sizes, label2id={"neg": 0, "pos": 1}, id2label={0: "neg", 1: "pos"})
    by_number = build("bert", **sizes, label2id={"1": 0, "0": 1}, id2label={0: "1", 1: "0"})
    for model, table, labels in ((by_name, named, [1, 0]), (by_number, "text| label\none| 1\n|\ntwo|+1\n", [1, 1])):
        data = read(table.replace("|", mark), tmp_path, model, LLAMA, kind)
        assert (data.task, data.batches[0]["labels"].tolist()) == ("class", labels)
    for line, message in {"good|bad|x": "no class 'bad'", "a|b|c|0": "row 4 has other columns", "a": "row 4"}.items():
        with pytest.raises(RotationMergeError, match=message):
            read(f"{named}{line}\n".replace("|", mark), tmp_path, by_name, LLAMA, kind)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_decoder_reads_labels_or_what_its_encoder_reads(labelled: bool, device: str, tmp_path: Path):
    """BART makes its own inputs where T5 needs labels; also of a model without weights (refit's)."""
    rows = [{"input_ids": [5, 6, 7, 8 + i], **({"labels": [5, 6]} if labelled else {})} for i in range(4)]
    for name in ("bart", "t5")[: 1 + labelled]:
        data = read(rows, tmp_path, family(name).to(device), batch_size=2)
        assert all(("decoder_input_ids" in batch) == ("labels" in batch) == labelled for batch in data.batches)


def test_tokens_that_a_decoder_writes_may_be_more_than_the_text_has(tmp_path: Path):
    rows = [{"input_ids": [5], "labels": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [8]}]
    [batch] = read(rows, tmp_path, family("t5")).batches
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["decoder_input_ids"].shape == (2, 3)
    assert [part["decoder_input_ids"].shape for part in unpadded([batch], "d")] == [(1, 3), (1, 3)]


def test_a_row_of_labels_is_as_long_as_the_outputs(tmp_path: Path):
    """Not as the text, to whose length the labels of tokens are padded."""
    model = build("bert", num_labels=3, problem_type="multi_label_classification")
    rows = [{"input_ids": list(range(3, 8 + i)), "labels": [1, 0, i % 2]} for i in range(4)]
    data = read(rows, tmp_path, model)
    assert (data.task, data.batches[0]["labels"].tolist()) == ("labels", [[1, 0, 0], [1, 0, 1]] * 2)
    assert score(model, data).figures


# --- arrays as processors give them ----------------------------------------------------------------------------------

IMAGE = 50
GRIDS = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])
"""Of three pictures: 16, 32 and 16 patches, which 4, 8 and 4 words stand for."""
SIZES = torch.tensor([[8, 8], [4, 8], [8, 8]])


def words(*texts: list[int]) -> torch.Tensor:
    """Texts of one length, in each of which so many words stand for its pictures."""
    rows = [[word for count in counts for word in (3, *[IMAGE] * count)] for counts in texts]
    long = max(map(len, rows)) + 3
    return torch.tensor([row + [4] * (long - len(row)) for row in rows])


def qwen() -> dict[str, torch.Tensor]:
    """Two pictures, none, and one."""
    ids, pixels = words([4, 8], [], [4]), torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    beside = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    return {"pixel_values": pixels, "image_grid_thw": GRIDS, "input_ids": ids, **beside}


def logits(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**{n: x for n, x in b.items() if n != "labels"}).logits for b in batches]


def test_patches_go_to_the_examples_whose_words_stand_for_them(models: dict[str, Any], tmp_path: Path):
    """Each example by itself, in order, says what it says among the others; so it does once padding is cut."""
    model, arrays = models["qwen2_5_vl"], qwen()
    arrays["attention_mask"][2, -3:] = 0
    data = read(arrays, tmp_path, model)
    assert data.task == "next token"
    assert [len(batch.get("pixel_values", ())) for batch in data.batches] == [48, 0, 16]
    whole = torch.cat(logits(model, [arrays]))
    for batches, lengths in ((data.batches, (17, 17, 17)), (unpadded(data.batches, "data"), (17, 17, 14))):
        for alone, together, length in zip(logits(model, batches), whole, lengths, strict=True):
            torch.testing.assert_close(alone[0], together[:length], rtol=1e-4, atol=1e-4)
    assert [batch["labels"].ne(-100).sum().item() for batch in data.batches] == [5, 17, 10]
    assert len(read(arrays, tmp_path, model, limit=2).batches) == 2


@pytest.mark.parametrize(
    ("name", "texts", "extra", "pictures"),
    [
        ("llava", ([16, 16], [16]), {}, [2, 1]),
        ("llava", ([16], [16], [16]), {}, [3]),
        ("llava", ([16, 16], [], [16]), {}, [2, 0, 1]),
        ("mistral3", ([4, 2], [4]), {"image_sizes": SIZES}, [2, 1]),
    ],
)
def test_pictures_take_words_by_their_size(
    name: str, texts: tuple, extra: dict, pictures: list[int], models: dict[str, Any], tmp_path: Path
):
    """Of one size they are shared out evenly; where each example has one, examples stay together."""
    arrays = {"input_ids": words(*texts), "pixel_values": torch.arange(192.0).view(3, 1, 8, 8), **extra}
    batches = read(arrays, tmp_path, models[name]).batches
    assert [len(batch.get("pixel_values", ())) for batch in batches] == pictures
    for key in ("pixel_values", *extra):
        assert torch.equal(torch.cat([batch[key] for batch in batches if key in batch]), arrays[key])


def qwen_with(**changes: Any) -> dict[str, Any]:
    return {name: array for name, array in {**qwen(), **changes}.items() if array is not None}


ROWS, PIXELS = np.ones((3, 4), int), np.zeros((2, 3, 8, 8), dtype=np.float32)
BAD: list[tuple[str, Any, str]] = [
    ("", [{"input_ids": [-1, 3]}], "token id -1 is outside"),
    ("", [{"input_ids": [3] * 9}], "9 tokens in a row, the model has positions for 8"),
    *[("", [{"input_ids": x}], "record 1: {") for x in ("abc", None, [1.5], [[1], [3]], [[1, 2], [3]], [])],
    ("", [{"input_ids": [1]}, {"answer": 42}], "record 2: {'answer': 42} cannot be read"),
    ("", [{"input_ids": [1]}, [1, 2]], "record 2: [1, 2] cannot be read"),
    ("", [{"input_ids": [1], "label": {"a": 1}}], "record 1: "),
    ("", [{"input_ids": [1], "labels": ["a"]}], "record 1: "),
    ("", '{"input_ids": [1], "label": NaN}', "'labels' holds NaN or infinity"),
    ("", [{"input_ids": [1], "label": i} for i in ([0.5], 1)], "examples whose 'labels' differ in shape"),
    ("", [{"input_ids": [1], "label": i} for i in ([0.5], [1.5, 2.5])], "examples whose 'labels' differ in shape"),
    ("", "", "holds no examples"),
    ("", {"input_ids": np.ones((3, 4))}, "'input_ids' is of float32, shape [3, 4]"),
    ("", {"input_ids": np.ones(3, int)}, "'input_ids' is of int64, shape [3]"),
    ("", {"input_ids": ROWS, "labels": np.array(3)}, "arrays of different lengths: "),
    ("", {"inputs_embeds": np.full((2, 3, 8), np.inf)}, "'inputs_embeds' holds NaN or infinity"),
    ("", {"input_ids": np.array(["a"])}, "cannot be read"),
    ("meta", {"pixel_values": PIXELS}, "cannot run on 'pixel_values' of shape [2, 3, 8, 8]"),
    (VIT, {"pixel_values": np.zeros((2, 16, 16), dtype=np.float32)}, "cannot run on 'pixel_values' of shape [2, 16"),
    (VIT, [{"image": __file__, "label": 0}], "record 1: {"),
    ("t5", [{"input_ids": [5, 6]}, {"input_ids": [5], "labels": [5]}], "holds nothing that the decoder of T5"),
    ("qwen2_5_vl", qwen_with(image_grid_thw=None), "'image_grid_thw' is missing, although there are images"),
    ("qwen2_5_vl", qwen_with(pixel_values=None), "'pixel_values' is missing, although there are images"),
    ("qwen2_5_vl", qwen_with(pixel_values=None, image_grid_thw=None), "'pixel_values' is missing, although there are"),
    ("qwen2_5_vl", qwen_with(mm_token_type_ids=None), "'mm_token_type_ids' is missing"),
    ("qwen2_5_vl", qwen_with(image_grid_th=GRIDS), "does not take image_grid_th; did you mean 'image_grid_thw'"),
    ("qwen2_5_vl", qwen_with(pixel_values=torch.zeros(63, 4)), "has 63 rows for images of [16, 32, 16] rows"),
    ("qwen2_5_vl", qwen_with(image_grid_thw=GRIDS[[0, 2, 1]]), "take [4, 4, 8] tokens; the texts have [12, 0, 4] tok"),
    (
        "qwen2_5_vl",
        qwen_with(image_grid_thw=GRIDS[[0, 1, 2, 2]], pixel_values=torch.zeros(80, 4)),
        "take [4, 8, 4, 4] tokens;",
    ),
    ("qwen2_5_vl", qwen_with(input_ids=words([], [], [4, 4, 4])), "the texts have [0, 0, 12] tokens"),
    ("qwen2_5_vl", qwen_with(attention_mask=torch.ones(2, 17)), "arrays of different lengths"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_a_model_cannot_take_is_one_line(
    name: str, content: Any, message: str, models: dict[str, Any], tmp_path: Path
):
    path = name if name in (LLAMA, VIT) else ""
    with pytest.raises(RotationMergeError, match=re.escape(message)) as caught:
        read(content, tmp_path, models[name], path)
    assert str(caught.value.where).startswith((str(tmp_path / "d."), "the model"))
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 7, 1], "label 7 is none of the model's 3 classes"),
        ([0, -1, 1], "label -1 is none of the model's 3 classes"),
        ([0.5, 1.5, 2.5], "1 numbers for each example, BertForSequenceClassification gives 3"),
        ([0, 1, None], "no loss on data without labels for every example"),
    ],
)
def test_labels_are_refused_where_they_are_used(
    labels: list[Any], message: str, models: dict[str, Any], tmp_path: Path
):
    """And only there; labels of some examples are labels of none."""
    rows = [{"input_ids": [3, 4], "label": label} for label in labels]
    data = read(rows, tmp_path, models["bert"], batch_size=2)
    with pytest.raises(RotationMergeError, match=message) as caught:
        score(models["bert"], data)
    assert caught.value.where == str(tmp_path / "d.jsonl")


@pytest.mark.parametrize("order", [("pixel_values", "labels"), ("labels", "pixel_values")])
def test_an_image_counts_once_wherever_its_label_stands(order: tuple[str, str]) -> None:
    """`merge` hands regmean arrays whose labels stand first."""
    arrays = {"pixel_values": torch.zeros(5, 3, 4, 4), "labels": torch.zeros(5, dtype=torch.long)}
    facts = described(Data([{name: arrays[name] for name in order}], "label", 5, "digits.npz"))
    assert (facts["samples"], facts["tokens"]) == (5, 5)


# --- samples that models make, batches without padding ---------------------------------------------------------------


@pytest.mark.slow
def test_a_language_model_writes_its_own_samples(models: dict[str, Any]):
    model = models[LLAMA]
    first, again, different = (read_samples(LLAMA, "self", 3, length=40, seed=s, module=model) for s in (0, 0, 1))
    ids = first.batches[0]["input_ids"]
    assert (ids.shape, first.task) == ((3, 40), "next token")
    assert torch.equal(ids, again.batches[0]["input_ids"])
    assert not torch.equal(ids, different.batches[0]["input_ids"])
    noise = torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss, random = (float(model(input_ids=x, labels=x).loss) for x in (ids, noise))
    assert loss < random - 3


def test_models_without_a_cache_write_the_same(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """As Mamba, which keeps what it has read in another way: the whole text goes through it for every token."""
    model = models[LLAMA]
    text, forward = self_written(model, LLAMA, 2, 12), model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: MambaCausalLMOutput(logits=forward(**inputs).logits))
    assert torch.equal(self_written(model, LLAMA, 2, 12), text)


@pytest.mark.parametrize("known", [256, 200])  # ids of the base: a fine-tune may have added some
@torch.no_grad()
def test_a_fine_tune_writes_what_it_has_learned(known: int, models: dict[str, Any]) -> None:
    """Beside its base it writes what itself finds likelier than its base does, by far more than all that it writes."""
    base, tuned, folder = load(LLAMA), load(LLAMA + "-english"), LLAMA + "-english"
    base.resize_token_embeddings(known, mean_resizing=False)
    everything, learned = (self_written(tuned, folder, 16, 32, base=of_base) for of_base in (None, base))
    gains = [float(models[LLAMA](ids, labels=ids).loss - tuned(ids, labels=ids).loss) for ids in (everything, learned)]
    assert gains[1] > gains[0] + 0.2
    chances = tuned(learned).logits[:, :-1].softmax(-1)
    written = chances.gather(-1, learned[:, 1:, None])[..., 0]
    assert bool((written >= 0.99 * PLAUSIBLE * chances.amax(-1)).all())


def test_synthetic_images_are_in_the_range_of_real_ones(models: dict[str, Any]):
    pixels = read_samples(VIT, "synthetic", 40, 40, module=models[VIT]).batches[0]["pixel_values"]
    assert pixels.shape == (40, 1, 8, 8)
    assert -0.5 <= float(pixels.min()) < -0.4
    assert 0.4 < float(pixels.max()) <= 0.5


@pytest.mark.parametrize(
    ("patches", "count", "sizes"), [(1, 6, ([4, 2], [2])), (2, 6, ([4, 4], [])), (2, 4, ([4], [4]))]
)
def test_examples_are_split(patches: int, count: int, sizes: tuple[list[int], list[int]]):
    """A batch whose tensors have different numbers of rows stays whole, and counts by its examples."""
    tokens, pixels = torch.arange(32).reshape(2, 4, 4), torch.arange(8 * patches).reshape(2, 4 * patches)
    batches = [{"input_ids": ids, "pixels": rows} for ids, rows in zip(tokens, pixels, strict=True)]
    sides = split_batches(Data(batches, "none", 8), count)
    assert tuple([len(batch["input_ids"]) for batch in side.batches] for side in sides) == sizes
    assert sum(side.examples for side in sides) == 8
    assert torch.equal(
        torch.cat([batch["input_ids"] for side in sides for batch in side.batches]), tokens.flatten(0, 1)
    )


def test_padding_is_cut_off_and_equal_lengths_stand_together():
    before = {"input_ids": torch.tensor([[0, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    after = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    cut = unpadded([after, before, {"input_ids": torch.tensor([[6, 7]])}], "data")
    assert [batch["input_ids"].tolist() for batch in cut] == [[[1, 2, 3]], [[4, 5], [8, 9]], [[6, 7]]]
    assert set(cut[0]) == {"input_ids"}
    pairs = {"input_ids": torch.tensor([[[1, 2], [3, 0]]]), "attention_mask": torch.tensor([[[1, 1], [1, 0]]])}
    first, second = unpadded([{**pairs, "labels": torch.tensor([0.5])}], "data")
    assert (first.keys(), first["input_ids"].tolist()) == ({"input_ids"}, [[1, 2]])
    assert (second.keys(), second["input_ids"].tolist()) == ({"input_ids"}, [[3]])
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
