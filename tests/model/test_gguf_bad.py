"""Reading GGUF files: entries of every type; those that are no model are told in one line, with what helps."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cli_support import run
from gguf_support import case_of, saved, written

from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapter_base import on_base
from rotation_merge.model.checkpoint import open_model
from rotation_merge.model.gguf.file import open_gguf
from rotation_merge.model.gguf.writer import plan_gguf

CASE = case_of("llama", "llama")

pytestmark = pytest.mark.usefixtures("gguf_home")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    saved(CASE, folder / "model")
    return written(folder / "model", folder / "whole.gguf")


def _first_tensor(path: Path) -> Any:
    model = open_model(str(path))
    model.check_files()
    assert model.architecture.family
    return model[model.names[0]]


def _refused(path: Path) -> str:
    """What is said of a file; one line that names it."""
    with pytest.raises(CheckpointError) as caught:
        _first_tensor(path)
    words = str(caught.value)
    assert "\n" not in words
    assert str(path.parent) in words
    return words


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.02, 0.5, 0.999])
def test_a_truncated_file(share: float, file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    words = _refused(path)
    assert "truncated" in words or "is not a GGUF file" in words
    assert "download it again" in words


def _with(path: Path, out: Path, **changes: Any) -> Path:
    """A copy of a file with other metadata."""
    old = open_gguf(str(path))
    writer = gguf.GGUFWriter(str(out), old.architecture)
    for key, value in {**old.metadata, **changes}.items():
        if key != "general.architecture" and value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, entry in old.entries.items():
        writer.add_tensor(name, entry.read().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_type_that_nobody_reads_is_named(file: Path, tmp_path: Path) -> None:
    whole = bytearray(file.read_bytes())
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    dims = struct.unpack_from("<I", whole, at)[0]
    for kind, name in ((99, "type 99"), (gguf.GGMLQuantizationType.I32, "type I32")):
        struct.pack_into("<I", whole, at + 4 + 8 * dims, kind)
        path = tmp_path / f"{int(kind)}.gguf"
        path.write_bytes(whole + bytes(1 << 16))
        with pytest.raises(CheckpointError, match=name) as caught:
            open_model(str(path))["model.layers.0.self_attn.q_proj.weight"]
        assert "blk.0.attn_q.weight" in str(caught.value)


def test_split_files_are_one_model(file: Path, tmp_path: Path) -> None:
    old, first = open_gguf(str(file)), open_model(str(file))
    writer = gguf.GGUFWriter(str(tmp_path / "parts.gguf"), old.architecture, split_max_tensors=9)
    for key, value in old.metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, entry in old.entries.items():
        writer.add_tensor(name, entry.read().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(paths) == 3
    for name in (paths[0], paths[2], tmp_path):  # any of them, or their folder
        again = open_model(str(name))
        assert set(again.names) == set(first.names)
        assert all((again[key] == first[key]).all() for key in first.names)
    paths[1].unlink()
    assert f"{paths[1].name} is missing" in _refused(paths[0])
    alone = tmp_path / "alone" / "one.gguf"
    alone.parent.mkdir()
    shutil.copyfile(paths[0], alone)
    assert "is one of 3 files" in _refused(alone)


def test_a_vocabulary_of_another_size(file: Path, tmp_path: Path) -> None:
    tokens = open_gguf(str(file)).metadata["tokenizer.ggml.tokens"]
    path = _with(file, tmp_path / "short.gguf", **{"tokenizer.ggml.tokens": tokens[:-3]})
    assert f"has {len(tokens) - 3} tokens, its embedding {len(tokens)} rows" in _refused(path)


def test_a_tokenizer_beside_it_that_is_another_models(file: Path, tmp_path: Path) -> None:
    path = shutil.copyfile(file, tmp_path / "whole.gguf")
    beside = tmp_path / "tokenizer.json"
    shutil.copyfile(file.parent / "model" / "tokenizer.json", beside)
    open_model(str(path)).check_files()
    content = json.loads(beside.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    beside.write_text(json.dumps(content))
    assert "has other tokens than whole.gguf at 2 ids" in _refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.type": "adapter"}, "a LoRA adapter, not a model"),
        ({"general.type": "mmproj"}, "not a language model"),
        ({"llama.block_count": None}, "lack 'llama.block_count'"),
        ({"tokenizer.ggml.pre": "of-nobody"}, "'of-nobody'"),
        ({"tokenizer.ggml.pre": None}, "in a way that it does not name"),
        ({"llama.rope.scaling.type": "of-nobody"}, "'of-nobody'"),
        ({"llama.feed_forward_length": [48, 64]}, "not the same in all layers"),
        ({"llama.block_count": 2_000_000_000}, "2000000000 layers, but no tensor is named 'blk.1999999999...'"),
        ({"llama.block_count": 0}, "'llama.block_count' is 0, which is no size"),
        ({"llama.block_count": "two"}, "'llama.block_count' is 'two', which is no size"),
        ({"llama.expert_count": 2_000_000_000}, "2000000000 experts, its tensors hold none"),
        ({"llama.attention.head_count": 5}, "heads (5).); download it again"),
        ({"llama.attention.head_count": 16, "llama.attention.head_count_kv": 16}, "its metadata are damaged"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, "its metadata are damaged"),
    ],
)
def test_what_is_no_model_that_is_read(changes: dict[str, Any], words: str, file: Path, tmp_path: Path) -> None:
    assert words in _refused(_with(file, tmp_path / "other.gguf", **changes))


def test_a_token_that_is_no_text(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    path.write_bytes(file.read_bytes().replace(b"<|start|>", b"<|st\xffrt|>"))
    assert "its metadata are damaged" in _refused(path)


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(path), "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'rwkv7' cannot be read" in _refused(path)


def test_several_models_in_a_folder(file: Path, tmp_path: Path) -> None:
    for name in ("model-Q4.gguf", "model-Q8.gguf"):
        shutil.copyfile(file, tmp_path / name)
    words = _refused(tmp_path)
    assert "holds 2 models in GGUF: model-Q4.gguf, model-Q8.gguf" in words


def test_a_folder_with_a_vision_tower_alone(file: Path, tmp_path: Path) -> None:
    shutil.copyfile(file, tmp_path / "mmproj-F16.gguf")
    assert "holds no language model in GGUF, only mmproj-F16.gguf" in _refused(tmp_path)


def test_a_checkpoint_in_a_folder_of_such_a_name(file: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(file.parent / "model", tmp_path / "model.gguf")
    assert open_model(str(folder)).folder == str(folder)
    shutil.copyfile(file, folder / "beside.gguf")  # where both lie, transformers' own files count
    assert open_model(str(folder)).folder == str(folder)


def test_a_tokenizer_that_joins_nothing(file: Path, tmp_path: Path) -> None:
    """As the models of bytes that the package ships have it; any rule cuts text alike for it."""
    folder = shutil.copytree(file.parent / "model", tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    plan = plan_gguf(open_model(str(folder)))
    assert "has no merges" in plan.notes[0]
    plan.write(str(tmp_path / "out.gguf"))
    assert open_model(str(tmp_path / "out.gguf")).folder


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in _refused(tmp_path / "gone.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    assert "check the path" in _refused(tmp_path / "link.gguf")


def test_names_in_capital_letters(file: Path, tmp_path: Path) -> None:
    path = shutil.copyfile(file, tmp_path / "MODEL-F16.GGUF")
    for name in (path, tmp_path):
        again, first = open_model(str(name)), open_model(str(file))
        assert (again.shapes, again.dtypes) == (first.shapes, first.dtypes)


def test_an_adapter_without_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for arguments in (("gguf", tmp_path, tmp_path / "x" / "out.gguf"), ("evaluate", tmp_path, "--data", "demo:bytes")):
        assert f"is an adapter, not a model; write org/base+{tmp_path}" in run(*arguments).output


@pytest.mark.parametrize(
    ("family", "name", "config", "words"),
    [
        ("gpt_neox", None, {}, "GPTNeoXForCausalLM cannot be written to GGUF"),
        ("llama", "llama, classifier", {}, "LlamaForSequenceClassification cannot be written"),
        ("gpt2", "untied", {}, "'activation_function'"),
        ("gemma3", "tied", {}, "'query_pre_attn_scalar'"),
        ("falcon", "alibi, sequential", {}, "has no place"),
    ],
)
def test_what_gguf_would_lose_is_refused(
    family: str, name: str | None, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    from tiny_models import ALL

    name = name or next(case.name for case in ALL if case.family == family)
    saved(case_of(family, name, **config), tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        plan_gguf(open_model(str(tmp_path / "model")))
    assert words in str(caught.value)
    assert "convert_hf_to_gguf.py" in str(caught.value)


@pytest.mark.parametrize(("family", "name"), [("llama", "qwen2"), ("phi3", "grouped"), ("mixtral", "untied")])
def test_headers_say_what_is_read(family: str, name: str, tmp_path: Path) -> None:
    saved(case_of(family, name), tmp_path / "model")
    first = open_model(str(tmp_path / "model"))
    again = open_model(str(written(tmp_path / "model", tmp_path / "out.gguf")))
    for key in again.names:
        assert again.dtypes[key] == again[key].dtype
        assert again.shapes[key] == first.shapes[key] == tuple(again[key].shape)


def test_types_that_are_not_written_here_are_read_as_ggml_reads_them() -> None:
    """K-quants and others, from a file that ggml's reference code made, with what it makes of each."""
    entries = open_gguf(str(Path(__file__).with_name("quantised.gguf"))).entries
    kinds = [name for name in entries if f"{name}.numbers" in entries]
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= set(kinds)
    for name in kinds:
        assert entries[name].kind == name
        torch.testing.assert_close(entries[name].read(), entries[f"{name}.numbers"].read(), rtol=0, atol=0)


def test_one_expert_is_read_without_the_others(tmp_path: Path) -> None:
    saved(case_of("mixtral", "untied"), tmp_path / "model")
    whole = open_gguf(str(written(tmp_path / "model", tmp_path / "out.gguf"))).entries["blk.0.ffn_up_exps.weight"]
    assert whole.part(2).size * 4 == whole.size
    assert (whole.part(2).read() == whole.read()[2]).all()


def test_an_adapter_stands_on_the_file_that_it_names(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copyfile(file, folder / "model-F16.gguf")
    for base in (file, folder):
        config = tmp_path / "lora" / "adapter_config.json"
        config.parent.mkdir(exist_ok=True)
        config.write_text(json.dumps({"base_model_name_or_path": str(base)}))
        assert on_base(str(config.parent)) == f"{base}+{config.parent}"
