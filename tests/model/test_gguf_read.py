"""Reading GGUF files: parts, names, entries of every type; what cannot be written to one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_support import case_of, saved, written

from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapter_base import on_base
from rotation_merge.model.checkpoint import open_model
from rotation_merge.model.gguf import open_gguf
from rotation_merge.model.gguf.writer import plan_gguf

CASE = case_of("llama", "llama")

pytestmark = pytest.mark.usefixtures("gguf_home")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    saved(CASE, folder / "model")
    return written(folder / "model", folder / "whole.gguf")


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


def test_names_in_capital_letters(file: Path, tmp_path: Path) -> None:
    path = shutil.copyfile(file, tmp_path / "MODEL-F16.GGUF")
    for name in (path, tmp_path):
        again, first = open_model(str(name)), open_model(str(file))
        assert (again.shapes, again.dtypes) == (first.shapes, first.dtypes)


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
