"""What doctor needs no command for: every family is whole, and what is mended (laws plant every fault)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_support import output_of
from faults_support import (
    CONFIG,
    END,
    FAMILIES,
    FAULTS,
    GENERATION,
    INDEX,
    PROCESSOR,
    TEMPLATE,
    TOKENIZER,
    TOKENS,
    read,
    write,
)
from plugin_support import files_of, state, write_state
from safetensors.torch import load_file, save_file
from test_planted_faults import copies, sound
from tiny_models import ALL, Case, make
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotation_merge.model.open import open_model
from rotation_merge.report.integrity import Contents, check_folder
from rotation_merge.report.integrity.mending import mend

MENDED = (
    *("the index names another shard for a tensor", "the index lacks a tensor", "the index is not JSON"),
    *("there is no index", "total_size of another model", "headers without a format", "vocab_size too large"),
    *("names of a compiled model", "names without the base model's prefix", "another RoPE base", "no chat template"),
    *("a layer more in the config", "another dtype in the config", "no class in the config", "no tokenizer"),
    *("eos_token_id of the base, tokenizer of the chat model", "turns end with a token that ends nothing"),
    *("no tokenizer config", "no generation config", "quantisation in the config of plain weights"),
    *("the config of a narrower model", "names of a model with an adapter"),
)
IN_TENSORS = ("a tensor left out", "the last layer left out", "a tensor that nobody reads", "a tied head stored")


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_whole_models_raise_no_alarm(case: Case, tmp_path: Path) -> None:
    make(case).save_pretrained(tmp_path)
    assert check_folder(str(tmp_path), [str(tmp_path)]) == []


@pytest.mark.parametrize("name", [*IN_TENSORS, *(pytest.param(name, marks=pytest.mark.slow) for name in MENDED)])
def test_small_files_are_mended_and_tensors_are_not(name: str, tmp_path: Path) -> None:
    """Nothing is left to find, and what was done is said; or the folder stays, and the remedy is another merge."""
    for family in ("llama", "gemma"):
        merge, parent = copies(family, tmp_path)
        if FAULTS[name].plant(merge):
            before = {path.name: path.read_bytes() for path in merge.iterdir()}
            assert bool(mend(str(merge), [str(parent)])) == (name in MENDED)
            assert (before != {path.name: path.read_bytes() for path in merge.iterdir()}) == (name in MENDED)
            defects = check_folder(str(merge), [str(parent)])
            assert bool(defects) == (name in IN_TENSORS)
            assert defects or Contents(str(merge)).files.keys() == Contents(str(parent)).files.keys()
            assert all("merge again" in defect.remedy for defect in defects)


TWICE = "model.layers.1.mlp.up_proj.weight"


def overlaid(folder: Path) -> None:
    """A last file, which the index names for a tensor that a shard holds, too."""
    index = read(folder / INDEX)
    tensors = load_file(folder / index["weight_map"][TWICE])
    save_file({TWICE: tensors[TWICE] + 1}, folder / "overlay.safetensors", {"format": "pt"})
    index["weight_map"][TWICE] = "overlay.safetensors"
    write(folder / INDEX, index)


def prefixed(folder: Path) -> None:
    """Names of a compiled model, in files and index."""
    for file in folder.glob("*.safetensors"):
        save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    places = read(folder / INDEX)["weight_map"]
    write(folder / INDEX, {"metadata": {}, "weight_map": {f"_orig_mod.{name}": file for name, file in places.items()}})


def misplaced(folder: Path) -> None:
    """The index names a file that does not hold the tensor."""
    index = read(folder / INDEX)
    index["weight_map"][TWICE] = min(index["weight_map"].values())
    write(folder / INDEX, index)


@pytest.mark.parametrize(
    ("spoil", "clear"),
    [
        (lambda _: None, True),
        (FAULTS["the index lacks a tensor"].plant, True),
        (prefixed, True),
        (lambda folder: (folder / INDEX).unlink(), False),
        (lambda folder: (folder / INDEX).write_text("{"), False),
        (misplaced, False),
    ],
    ids=["sound", "lacks a tensor", "other names", "no index", "damaged index", "other shard"],
)
def test_a_correction_keeps_the_copy_that_the_index_names(
    spoil: Callable[[Path], object], clear: bool, tmp_path: Path
) -> None:
    """Which is the one that transformers reads; where the index names none of the copies, nothing is corrected."""
    merge, parent = copies("llama", tmp_path)
    overlaid(merge)
    spoil(merge)
    before = check_folder(str(merge), [str(parent)])
    assert bool(mend(str(merge), [str(parent)])) == bool(before and clear)
    defects = check_folder(str(merge), [str(parent)])
    assert bool(defects) != clear, defects
    assert all("in a single file" in defect.remedy for defect in defects)
    if clear:
        loaded = AutoModelForCausalLM.from_pretrained(merge).state_dict()[TWICE]
        assert torch.equal(loaded, open_model(merge)[TWICE])
        assert not torch.equal(loaded, open_model(parent)[TWICE])


def eight_bits(name: str, x: Tensor) -> dict[str, Tensor]:
    scale = x.abs().max() / 448
    return {name: (x / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(1, 1)}


def four_bits(name: str, x: Tensor) -> dict[str, Tensor]:
    stem, rows = name.removesuffix(".weight"), len(x)
    codes = {f"{stem}_blocks": torch.zeros(1, rows, 1, 16, dtype=torch.uint8)}
    return {**codes, f"{stem}_scales": torch.ones(1, rows, 1, dtype=torch.uint8)}


def packed(name: str, x: Tensor) -> dict[str, Tensor]:
    stem, size = name.removesuffix(".weight"), len(x)
    codes = {f"{stem}.{part}": torch.ones(2, size, dtype=torch.int32) for part in ("qweight", "qzeros")}
    return {**codes, f"{stem}.scales": torch.ones(1, size)}


QUANTISED: dict[str, Callable[[str, Tensor], dict[str, Tensor]]] = {
    "fp8": eight_bits,
    "mxfp4": four_bits,
    "gptq": packed,
    "bitsandbytes": lambda name, x: {name: x.to(torch.int8), f"{name.removesuffix('.weight')}.SCB": x[:, 0]},
    "compressed-tensors": lambda name, x: {f"{name}_packed": x.to(torch.int32), f"{name}_scale": x[:, :1]},
}
"""Layouts by method, of a matrix by its name."""


def quantised(model: Path, method: str, out: Path, scales: bool = True) -> Path:
    """A model with the matrices of its layers quantised; with `scales` false without those of the first layer."""
    tensors = state(model)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stored = QUANTISED[method](name, tensors.pop(name))
        kept = stored if scales or ".0." not in name else [key for key in stored if not re.search("scale|SCB", key)]
        tensors |= {key: stored[key].contiguous() for key in kept}
    write_state(tensors, model, out)
    write(out / "config.json", read(out / "config.json") | {"quantization_config": {"quant_method": method}})
    return out


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_models_are_sound_with_their_scales(method: str, tmp_path: Path) -> None:
    """No cause is found in one, and none of its tensors is examined; codes without scales are named."""
    model = copies("llama", tmp_path)[1]
    whole, lacking = (quantised(model, method, tmp_path / f"{scales}", scales) for scales in (True, False))
    assert check_folder(str(whole)) == []
    assert f"weights of {whole} were not examined: they are quantised" in output_of("doctor", whole)
    (defect,) = check_folder(str(lacking))
    assert re.search(r"tensors, 'model.layers.0.mlp.down_proj.* first, are quantised codes without scales", defect.what)
    assert mend(str(lacking)) == []


def test_a_copy_is_mended_and_the_folder_stays(tmp_path: Path) -> None:
    merge, parent = copies("llama", tmp_path)
    FAULTS["there is no index"].plant(merge)
    before = files_of(merge)
    assert "corrected model.safetensors.index.json: no index" in output_of(
        "doctor", merge, parent, "--mend", "--out", tmp_path / "out"
    )
    assert files_of(merge) == before
    assert files_of(tmp_path / "out").keys() == before.keys() | {INDEX}
    assert check_folder(str(tmp_path / "out"), [str(parent)]) == []


def test_a_small_file_that_is_damaged_stays(tmp_path: Path) -> None:
    """Others are mended beside it."""
    merge, parent = copies("llama", tmp_path)
    (merge / "generation_config.json").write_text("[]")
    assert mend(str(merge), [str(parent)]) == ["config.json: end of text"]
    assert [defect.kind for defect in check_folder(str(merge), [str(parent)])] == ["damaged file"]


ENDS = ("<turn|>", "<|return|>", "<|END_OF_TURN_TOKEN|>", "<|im_end|>", "<|eot_id|>", "</s>")
SPOKEN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"


def with_template(folder: Path, template: str, end: str = END, **generation: object) -> Path:
    """A whole folder whose turns end with a token that its config and tokenizer do not end text with."""
    shutil.copytree(sound("llama"), folder)
    for file in (TOKENIZER, TOKENS):
        text = (folder / file).read_text().replace("</s>", "</old>").replace(END, end)
        (folder / file).write_text(text)
    (folder / TEMPLATE).write_text(template)
    write(folder / TOKENS, {**read(folder / TOKENS), "eos_token": "</old>"})
    write(folder / CONFIG, {**read(folder / CONFIG), "eos_token_id": 1})
    write(folder / GENERATION, {"eos_token_id": 1, **generation})
    return folder


@pytest.mark.parametrize("end", ENDS)
def test_turns_end_with_the_last_special_token_that_the_template_writes(end: str, tmp_path: Path) -> None:
    """Whatever its name is; it is added to the ids that end text."""
    folder = with_template(tmp_path / "chat", SPOKEN.replace(END, end), end)
    (defect,) = check_folder(str(folder))
    assert (defect.kind, defect.where) == ("end of text", GENERATION)
    assert f"'{end}' (4), eos_token_id is 1" in defect.what
    mend(str(folder))
    assert [read(folder / file)["eos_token_id"] for file in (CONFIG, GENERATION)] == [[1, 4], [1, 4]]
    assert check_folder(str(folder)) == []


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (SPOKEN, [1, 4], None),
        (SPOKEN.replace(END, END + "</old>"), 1, None),
        (SPOKEN.replace(END, END + "<pad>"), 1, "'<pad>' (2), eos_token_id is 1"),
        (SPOKEN.replace(END, "{{ eos_token }}"), 1, None),
        (SPOKEN.replace(END, "{{ pad_token }}"), 1, "'<pad>' (2), eos_token_id is 1"),
        (SPOKEN.replace("m.content", "m.content[0].text"), 1, f"'{END}' (4), eos_token_id is 1"),
        (SPOKEN, None, f"'{END}' (4), eos_token_id is not set"),
        ("{{ raise_exception('no system turn') }}", 1, None),
        ("{{ messages[7].content.text }}", 1, "fails on a question with its answer"),
        ("{% endfor %}", 1, "unknown tag 'endfor'"),
    ],
)
def test_templates_are_rendered(template: str, ends: object, expected: str | None, tmp_path: Path) -> None:
    """One token after a turn that ends text is enough; turns may be lists of parts; a failure is a line."""
    folder = with_template(tmp_path / "chat", template, eos_token_id=ends)
    assert [expected in defect.what for defect in check_folder(str(folder))] == [True] * (expected is not None)


def test_several_ends_stay(tmp_path: Path) -> None:
    """An id that no row stands for is replaced alone."""
    folder = with_template(tmp_path / "chat", SPOKEN, eos_token_id=[4, 2, 128009])
    mend(str(folder))
    assert read(folder / GENERATION)["eos_token_id"] == [4, 2, 1]


VIDEO, LEGACY = "video_preprocessor_config.json", "tokenizer.model"
CODE = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}


@pytest.mark.parametrize(
    ("files", "kept", "expected"),
    [
        ({LEGACY: "", "vocab.json": "{}"}, (), {"vocab.json": "incomplete tokenizer", LEGACY: "incomplete tokenizer"}),
        (
            {"additional_chat_templates/rag.jinja": "{{ x }}"},
            (),
            {"additional_chat_templates/rag.jinja": "incomplete tokenizer"},
        ),
        ({PROCESSOR: "{}", VIDEO: "{}"}, (VIDEO,), {PROCESSOR: "incomplete processor"}),
        ({PROCESSOR: "{}", VIDEO: "{}"}, (), {PROCESSOR: "no processor", VIDEO: "no processor"}),
        ({TOKENS: json.dumps(CODE), "tokenization_x.py": ""}, (TOKENS,), {"tokenization_x.py": "no custom code"}),
        ({TOKENS: json.dumps({"chat_template": SPOKEN}), TEMPLATE: ""}, (TEMPLATE,), {TOKENS: "no chat template"}),
    ],
    ids=lambda value: ", ".join(value) or "none",
)
def test_what_a_parent_has_beside_its_weights(
    files: dict[str, str], kept: tuple[str, ...], expected: dict[str, str], tmp_path: Path
) -> None:
    """Files of the same tokenizer, of a processor, and of code are said to be missing one by one, and copied."""
    merge, parent = copies("llama", tmp_path)
    parent = shutil.copytree(parent, tmp_path / "parent")
    for name, text in files.items():
        (parent / name).parent.mkdir(exist_ok=True)
        whole = {**read(parent / TOKENS), **json.loads(text)} if name == TOKENS else None
        (parent / name).write_text(text if whole is None else json.dumps(whole))
        if name in kept:
            shutil.copy(parent / name, merge / name)
    said = [(defect.kind, defect.line) for defect in check_folder(str(merge), [str(parent)])]
    assert all(any(kind == of and name in line for of, line in said) for name, kind in expected.items())
    assert dict(line.split(": ") for line in mend(str(merge), [str(parent)])) == expected
    assert check_folder(str(merge), [str(parent)]) == []


def test_files_of_another_tokenizer_are_not_missing(tmp_path: Path) -> None:
    merge, parent = copies("llama", tmp_path)
    parent = shutil.copytree(parent, tmp_path / "parent")
    (parent / LEGACY).write_text("")
    content = read(parent / TOKENIZER)
    write(parent / TOKENIZER, {**content, "added_tokens": [{"id": 30, "content": "<tool>", "special": True}]})
    assert check_folder(str(merge), [str(parent)]) == []


def test_the_docs_count_the_faults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"plants {len(FAULTS)} kinds of faults in tiny models of {len(FAMILIES)} families" in page
