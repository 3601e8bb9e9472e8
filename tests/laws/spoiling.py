"""Good inputs of every kind, and the ways to spoil them: what the table of bad inputs (`bad_inputs.py`) is written in.

A folder of good inputs is made once (`make_good_inputs`); each row of the table spoils a copy of it, which is the
current folder. Nothing here imports an internal module of the package.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import gguf
import numpy as np
import torch
import transformers
from gguf_support import name_in_gguf
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import rotation_merge as rm

ENDLESS = 400_000_000
FLOATS = "model.layers.0.mlp.up_proj.weight"
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"

RECIPE = """merge_method: rotation_merge
base_model: anchor
models:
  - model: anchor
    parameters: {weight: 0.5}
  - model: donor
    parameters: {weight: 0.5}
parameters:
  delegate: linear
dtype: float32
"""
ANCHORS, DONORS = "{weight: 0.5}\n  -", "{weight: 0.5}\np"
"""In the recipe, the parameters of the anchor and those of the donor, with what follows them."""
MODELS = RECIPE[RECIPE.index("models:") : RECIPE.index("dtype:")]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 40, "max_position_embeddings": 32}


class Bench:
    """A folder of good inputs, to be spoilt; it is the current folder.

    Attributes:
        recipe: a good recipe of `anchor` and `donor`, as text or bytes.
    """

    def __init__(self, hub: Any = None) -> None:
        self.recipe: str | bytes = RECIPE
        self._hub = hub

    @property
    def hub(self) -> Any:
        """The stand-in; without it the hub cannot be reached."""
        constants.HF_HUB_OFFLINE = False
        return self._hub


@dataclass(frozen=True)
class Row:
    """A bad input.

    Attributes:
        name: what is bad.
        words: what its line holds, whichever way it is given.
        spoil: makes it from good inputs.
        recipe: how it is given as a recipe: to `check`, to `merge` (mergekit-yaml), or to both.
        commands: command lines of `rotation-merge` that are given it.
        python: a call that is given it.
        flags: of mergekit-yaml.
        out: what mergekit-yaml is asked to write.
        faults: how many `check` tells of; one of them holds the words.
    """

    name: str
    words: tuple[str, ...]
    spoil: Callable[[Bench], object] = lambda bench: None
    recipe: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    python: Callable[[], object] | None = None
    flags: tuple[str, ...] = ()
    out: str = "out"
    faults: int = 1


BOTH = ("check", "merge")


# --- good inputs -------------------------------------------------------------------------------------------------


def model(kind: str, folder: str | Path, seed: int = 0, **config: Any) -> None:
    """A tiny random checkpoint of a transformers class, such as `LlamaForCausalLM`."""
    model_class = getattr(transformers, kind)
    sizes = {"num_key_value_heads": 2} if "Llama" in kind else {}
    torch.manual_seed(seed)
    made = model_class(model_class.config_class(**{**SIZES, **sizes, **config}))
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    made.save_pretrained(folder)


def llama(folder: str | Path, seed: int = 0, **config: Any) -> None:
    model("LlamaForCausalLM", folder, seed, **config)


def make_good_inputs(folder: Path) -> None:
    """Two Llamas, a ViT, an alignment file of the Llamas, samples, a GGUF; and files that no command takes."""
    llama(folder / "anchor")
    llama(folder / "donor", 1)
    model("ViTForImageClassification", folder / "vit", image_size=16, patch_size=8)
    aligned = rm.align(str(folder / "anchor"), str(folder / "donor"), residual="rotation", heads="permutation")
    aligned.save(folder / "map")
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(16)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_gguf(folder / "whole.gguf", folder / "anchor")
    files = {"file": b"x", "bad.jsonl": b"{", "text.txt": b"words " * 300, "junk.npz": b"x", "a.csv": b"one,two\n1,2\n"}
    files |= {"few.txt": b"x", "junk.safetensors": b"x", "list.yml": b"- 1", "half.yml": b"a: [1"}
    files |= {"none.yml": b"merge_method: linear\nmodels: []", "bytes.yml": b"\xff\xfe\x00"}
    files |= {"list/rotation_merge.json": b"[]", "other/rotation_merge.json": b'{"version": 99}'}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


# --- spoiling ----------------------------------------------------------------------------------------------------

Step = Callable[[Bench], object]
P = ParamSpec("P")


def step(spoil: Callable[P, object]) -> Callable[P, Step]:
    """A function that spoils the current folder, as one that gives the step of doing so."""
    return lambda *values, **named: lambda bench: spoil(*values, **named)


def both(*steps: Step) -> Step:
    return lambda bench: [spoil(bench) for spoil in steps]


def edit(*pairs: tuple[str, str]) -> Step:
    """Replace texts of the recipe."""

    def change(bench: Bench) -> None:
        for old, new in pairs:
            assert isinstance(bench.recipe, str)
            assert old in bench.recipe, old
            bench.recipe = bench.recipe.replace(old, new, 1)

    return change


def texts(content: str | bytes) -> Step:
    """Another recipe."""
    return lambda bench: setattr(bench, "recipe", content)


@step
def tensors(change: Callable[[dict[str, Tensor]], object], folder: str = "donor") -> None:
    """Other tensors in a checkpoint."""
    stored = load_file(Path(folder, WEIGHTS))
    change(stored)
    save_file(stored, Path(folder, WEIGHTS), {"format": "pt"})


@step
def config(folder: str = "donor", **changes: Any) -> None:
    """Other entries of a config; None leaves one out."""
    path = Path(folder, CONFIG)
    entries = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))


@step
def put(name: str, content: str | bytes = "") -> None:
    """A file with this content."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@step
def gone(name: str) -> None:
    """Remove a file or folder."""
    shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


def folder_for(name: str) -> Step:
    """A folder in the place of a file."""
    return both(gone(name), lambda bench: Path(name).mkdir())


@step
def bytes_of(name: str, change: Callable[[bytes], bytes]) -> None:
    Path(name).write_bytes(change(Path(name).read_bytes()))


@step
def another(kind: str, folder: str = "donor", **changes: Any) -> None:
    """Another model in the place of one."""
    shutil.rmtree(folder)
    model(kind, folder, 2, **changes)


def configured(kind: str, common: dict[str, Any], **change: Any) -> Step:
    """Two models of a class, the donor's config another one than that of its weights."""
    return both(*(another(kind, folder, **common) for folder in ("anchor", "donor")), config(**change))


def index(weight_map: Mapping[str, str], name: str = INDEX) -> None:
    Path("donor", name).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(bench: Bench) -> None:
    """The donor in two shards."""
    stored = load_file(f"donor/{WEIGHTS}")
    Path("donor", WEIGHTS).unlink()
    places = {name: SHARDS[number % 2] for number, name in enumerate(sorted(stored))}
    for shard in SHARDS:
        save_file({n: x for n, x in stored.items() if places[n] == shard}, f"donor/{shard}", {"format": "pt"})
    index(places)


def two_files(bench: Bench) -> None:
    stored = load_file(f"donor/{WEIGHTS}")
    sharded(bench)
    save_file({name: tensor + 1 for name, tensor in stored.items()}, f"donor/{WEIGHTS}", {"format": "pt"})


def tensor_in_two_shards(bench: Bench) -> None:
    sharded(bench)
    first, second = (load_file(f"donor/{shard}") for shard in SHARDS)
    save_file({**second, **dict([first.popitem()])}, f"donor/{SHARDS[1]}", {"format": "pt"})


def pickled(content: Any) -> Step:
    """A pickle in the place of the donor's weights."""
    return both(gone(f"donor/{WEIGHTS}"), lambda bench: torch.save(content, "donor/pytorch_model.bin"))


@step
def two_pickles(second: Callable[[dict[str, Tensor]], dict[str, Any]]) -> None:
    """The donor in one pickle, and another one beside it, from which the index takes its first entry."""
    stored = load_file(f"donor/{WEIGHTS}")
    Path("donor", WEIGHTS).unlink()
    names, parts = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)], (stored, second(stored))
    for name, part in zip(names, parts, strict=True):
        torch.save(part, f"donor/{name}")
    index(dict.fromkeys(stored, names[0]) | {min(parts[1]): names[1]}, "pytorch_model.bin.index.json")


@step
def adapter(folder: str, base: str = "org/base") -> None:
    """An adapter on one map of the first layer."""
    Path(folder).mkdir(exist_ok=True)
    entries = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 2}
    Path(folder, "adapter_config.json").write_text(json.dumps({**entries, "target_modules": ["up_proj"]}))
    key = "base_model.model.model.layers.0.mlp.up_proj"
    factors = {f"{key}.lora_A.weight": torch.ones(2, 32), f"{key}.lora_B.weight": torch.ones(48, 2)}
    save_file(factors, Path(folder, "adapter_model.safetensors"))


@step
def tokenizer(folder: str, *words: str) -> None:
    """A tokenizer that knows these words."""
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, words[0])).save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def quantised(dtype: torch.dtype) -> Step:
    """Codes in the place of numbers; the config does not tell."""
    return tensors(lambda stored: stored.update({n: (10 * x).to(dtype) for n, x in stored.items() if x.ndim == 2}))


def mapped(change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Step:
    """The recipe takes the donor's transforms from a file, in which something is wrong.

    Args:
        change: is given the tensors and the entries of the header, `head` parsed.
    """

    def spoil(bench: Bench) -> None:
        with safe_open("map", "pt") as file:
            stored, header = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
        entries = {**header, "head": json.loads(header["head"])}
        change(stored, entries)
        header = {name: value if isinstance(value, str) else json.dumps(value) for name, value in entries.items()}
        save_file({name: x.contiguous() for name, x in stored.items()}, "map", header)
        edit((DONORS, "{weight: 0.5, alignment: map}\np"))(bench)

    return spoil


# --- GGUF --------------------------------------------------------------------------------------------------------

METADATA: dict[str, Any] = {
    "llama.context_length": 32,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<|start|>", "<|end|>", *(chr(ord("A") + i) for i in range(38))],
    "tokenizer.ggml.token_type": [3, 3, *[1] * 38],
    "tokenizer.ggml.merges": ["A B"],
    "tokenizer.ggml.eos_token_id": 1,
}
METADATA["tokenizer.ggml.tokens"][-1] = "AB"


def write_gguf(path: Path, folder: Path, architecture: str = "llama", split: int = 0, **metadata: Any) -> None:
    """A Llama as a GGUF.

    Args:
        split: tensors in a part; 0: all in one file.
        metadata: in the place of the right ones; None leaves one out.
    """
    writer = gguf.GGUFWriter(str(path), architecture, **({"split_max_tensors": split} if split else {}))
    for key, value in {**METADATA, **metadata}.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in load_file(folder / WEIGHTS).items():
        writer.add_tensor(name_in_gguf(name), tensor.numpy().astype(np.float16 if tensor.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@step
def rewritten(**metadata: Any) -> None:
    write_gguf(Path("whole.gguf"), Path("anchor"), **metadata)


def typed(code: int) -> Callable[[bytes], bytes]:
    """The first query map of a GGUF is said to be of another type."""

    def change(whole: bytes) -> bytes:
        content, name = bytearray(whole), b"blk.0.attn_q.weight"
        at = whole.index(name) + len(name)
        struct.pack_into("<I", content, at + 4 + 8 * struct.unpack_from("<I", whole, at)[0], code)
        return bytes(content) + bytes(1 << 16)

    return change


def endless(whole: bytes) -> bytes:
    """The list of types of tokens in a GGUF is said to be of 2^60 entries."""
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    return whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :]


@step
def parts(*names: str) -> None:
    """The GGUF in three files, of which some are there."""
    write_gguf(Path("parts.gguf"), Path("anchor"), split=9)
    for path in Path().glob("parts-*.gguf"):
        if path.name not in names:
            path.unlink()


# --- rows --------------------------------------------------------------------------------------------------------


def in_recipe(name: str, old: str, new: str, *words: str, **more: Any) -> Row:
    """A text of the recipe replaced by another."""
    return Row(name, words, edit((old, new)), **{"recipe": BOTH, **more})


def misspelt(old: str, new: str, **more: Any) -> Row:
    return in_recipe(f"{new} for {old}", old, new, new, f"did you mean '{old}'", **more)


def at_top(text: str, *words: str, **more: Any) -> Row:
    """A line more at the top of the recipe."""
    return in_recipe(text, "dtype:", f"{text}\ndtype:", *words, **more)


def option(text: str, *words: str, **more: Any) -> Row:
    """A line more under the recipe's parameters."""
    return in_recipe(text, "delegate: linear", f"delegate: linear\n  {text}", *words, **more)


def of_anchor(text: str, *words: str, **more: Any) -> Row:
    return in_recipe(f"anchor: {text}", ANCHORS, f"{text}\n  -", *words, **more)


def of_donor(text: str, *words: str, **more: Any) -> Row:
    return in_recipe(f"donor: {text}", DONORS, f"{text}\np", *words, **more)


def models(text: str, *words: str, **more: Any) -> Row:
    """Something in the place of the recipe's models and parameters."""
    return in_recipe(text, MODELS, f"{text}\n", *words, **more)


def in_donor(name: str, spoil: Callable[[Bench], object], *words: str, **more: Any) -> Row:
    """A checkpoint that recipe, `align` and Python refuse alike."""
    ways = {"recipe": BOTH, "commands": ("align anchor donor out",), "python": lambda: rm.align("anchor", "donor")}
    return Row(name, words, spoil, **{**ways, **more})


def call(line: str, *words: str, spoil: Callable[[Bench], object] = lambda bench: None) -> Row:
    """A command line."""
    return Row(line, words, spoil, commands=(line,))


def python(name: str, function: Callable[[], object], *words: str) -> Row:
    return Row(name, words, python=function)
