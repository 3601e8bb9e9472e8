"""Stored files of every family in GGUF are read as they were when they were written and checked against their models.

The files were written with llama.cpp's names and order of numbers by the writer that this package had (commit
46596653), whose files were compared with those of llama.cpp's converter. `truth.json` holds the logits of the models
that they were written from.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_support import STORED, TEXT, byte_tokenizer, piece_tokenizer, stored_truth
from plugin_support import load
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rotation_merge.model.gguf import ORIGIN, decoded, quantised
from rotation_merge.model.gguf_checkpoint import open_gguf
from rotation_merge.model.open import on_base, open_model

TRUTH = stored_truth()

pytestmark = pytest.mark.usefixtures("gguf_home")


def stored(name: str) -> str:
    return str(STORED / f"{name}.gguf")


def facts(tensor: torch.Tensor) -> list[Any]:
    """Dtype, shape and checksum."""
    digest = hashlib.blake2b(tensor.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two values of configs are the same, numbers up to float32."""
    if isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(equal(ours[key], theirs[key]) for key in theirs)
    return math.isclose(ours, theirs, rel_tol=1e-6) if isinstance(theirs, float) else bool(ours == theirs)


@pytest.mark.parametrize("name", TRUTH)
def test_a_stored_file_is_read_as_before(name: str) -> None:
    """Its config, its tensors, and the outputs of the model that was written."""
    folder, truth = Path(decoded(stored(name))), TRUTH[name]
    assert equal(json.loads((folder / "config.json").read_text()), truth["config"])
    tensors = load_file(folder / "model.safetensors")
    assert {key: facts(tensor) for key, tensor in sorted(tensors.items())} == truth["tensors"]
    if "logits" in truth:
        ids = torch.tensor([[5, 17, 3, 39, 8, 25, 9, 1, 2, 37, 31, 6]])
        with torch.no_grad():
            logits = load(stored(name))(ids, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, torch.tensor(truth["logits"]), rtol=1e-4, atol=1e-4)


def test_types_are_read_as_ggml_reads_them() -> None:
    """K-quants and others, from a file that ggml's reference code made, with what it makes of each."""
    model = open_gguf([str(STORED.parent / "quantised.gguf")])
    kinds = [name for name in model.tensors if f"{name}.numbers" in model.tensors]
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= set(kinds)
    for name in kinds:
        assert model.tensors[name].tensor_type.name == name
        torch.testing.assert_close(model.read(name), model.read(f"{name}.numbers"), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "first"), [("tokens-bytes", byte_tokenizer()), ("tokens-pieces", piece_tokenizer())])
def test_the_tokenizer_comes_back(name: str, first: Any) -> None:
    ours = AutoTokenizer.from_pretrained(decoded(stored(name)))
    for text in (TEXT, "the fathers and   the other", ""):
        ids = first(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours.decode(ids) == first.decode(ids)
    for word in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, word) == getattr(first, word)
    assert ours.get_vocab() == first.get_vocab()
    assert name != "tokens-bytes" or "message" in ours.chat_template


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path) -> None:
    file, tokenizer = shutil.copyfile(stored("tokens-bytes"), tmp_path / "model.gguf"), byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path)
    assert "<more>" in AutoTokenizer.from_pretrained(decoded(str(file))).get_vocab()


def test_names_of_files_and_folders(tmp_path: Path) -> None:
    """Split files are one model; a checkpoint in a folder of such a name, also with such a file; capital letters."""
    (tmp_path / "split").mkdir()
    parts = [shutil.copy(part, tmp_path / "split") for part in sorted(STORED.glob("mixtral-split-*.gguf"))]
    assert len({decoded(path) for path in parts} | {open_model(str(tmp_path / "split")).folder}) == 1
    folder, first = shutil.copytree(decoded(stored("llama")), tmp_path / "model.gguf"), open_model(stored("llama"))
    assert open_model(str(folder)).folder == str(folder)
    shutil.copyfile(stored("llama"), folder / "beside.gguf")
    assert open_model(str(folder)).folder == str(folder)
    (tmp_path / "capital").mkdir()
    for name in (shutil.copyfile(stored("llama"), tmp_path / "capital" / "MODEL-F16.GGUF"), tmp_path / "capital"):
        again = open_model(str(name))
        assert (again.shapes, again.dtypes) == (first.shapes, first.dtypes)


def test_an_adapter_stands_on_the_file_that_it_names(tmp_path: Path) -> None:
    folder, lora = tmp_path / "alone", tmp_path / "lora"
    folder.mkdir()
    lora.mkdir()
    for base in (shutil.copyfile(stored("llama"), folder / "model-F16.gguf"), folder):
        (lora / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        assert on_base(str(lora)) == f"{base}+{lora}"


def test_a_file_is_decoded_once_until_it_changes(tmp_path: Path, gguf_home: str) -> None:
    """A killed process leaves nothing; the folder says what it was made of."""
    file = shutil.copyfile(stored("llama-q8_0"), tmp_path / "once.gguf")
    folder = Path(decoded(str(file)))
    assert json.loads((folder / ORIGIN).read_text())["files"] == [str(file)]
    assert "16 Q8_0" in (note := quantised(str(folder)))
    assert "quantised were read as float32" in note
    assert "quantised" not in quantised(decoded(stored("llama")))
    assert not quantised(str(STORED))
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert decoded(str(file)) == str(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    killed = folder.with_name(f".{folder.name}.partial")
    killed.mkdir()
    shutil.rmtree(folder)
    assert decoded(str(file)) == str(folder)
    assert not killed.exists()
    os.utime(file, (1, 1))
    again = Path(decoded(str(file)))
    assert again != folder
    assert [path for path in Path(gguf_home).rglob("once-*") if path.is_dir()] == [again]


def test_processes_decode_a_file_once(tmp_path: Path, gguf_home: str) -> None:
    file, children = shutil.copyfile(stored("mixtral"), tmp_path / "both.gguf"), list[int]()
    torch.set_num_threads(1)  # OpenMP waits forever for threads that are not forked
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            os._exit(not os.path.isdir(decoded(str(file))))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    (folder,) = Path(gguf_home).rglob("*both-*")
    assert decoded(str(file)) == str(folder)


def test_shards_are_as_large_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotation_merge.model.gguf_checkpoint.SHARD", 20_000)
    model = open_model(shutil.copyfile(stored("mixtral"), tmp_path / "large.gguf"))
    first, shards = open_model(stored("mixtral")), list(Path(model.folder).glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 25_000 for path in shards)
    assert all(torch.equal(model[name], first[name]) for name in first)
