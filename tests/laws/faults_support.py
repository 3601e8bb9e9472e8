"""Faults that merges are found with, planted in whole folders: by safetensors, JSON and the file system alone.

Nothing here is shared with the checks that find them. Steps that plant a fault spoil the current folder.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import ALL, make
from programs import run
from safetensors.torch import load_file, save_file
from spoiling import Step, both, gone, in_folder, put, step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

Tensors = dict[str, Tensor]
Entries = dict[str, Any]


class Absent(Exception):
    """A folder of this kind cannot have the fault."""


def needs(condition: object) -> None:
    if not condition:
        raise Absent


FAMILIES = (
    *("llama", "qwen3", "gemma", "gemma3", "mixtral", "olmo2", "cohere", "phi3", "gpt2", "gpt_neox"),
    *("bert", "t5", "opt", "vit", "qwen2_5_vl"),
)
UNSEEN = ("vit", "qwen2_5_vl")
"""Families whose sizes are too small for faults of numbers to be told from chance."""

TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE_TEXT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CONFIG, GENERATION, TEMPLATE = "config.json", "generation_config.json", "chat_template.jinja"
TOKENIZER, TOKENS, INDEX = "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"
MODULES, PROCESSOR = "modules.json", "preprocessor_config.json"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kinds: any of which it may be called by.
        spoil: plants it; raises `Absent`, or finds no file, where a folder of the kind cannot have the fault.
        weights: whether it shows only in numbers of tensors.
    """

    kinds: tuple[str, ...]
    spoil: Step
    weights: bool = False

    def plant(self, folder: Path, family: str = "") -> bool:
        """Whether the folder (of a family) now has the fault: not every kind of folder can."""
        if self.weights and family in UNSEEN:
            return False
        try:
            in_folder(self.spoil, folder)()
        except (Absent, FileNotFoundError):
            return False
        return True


# ------------------------------------------------------------------------------------------------ whole folders


def whole(family: str, folder: Path) -> Path:
    """A folder as a publisher leaves it: shards and index, tokenizer with a chat template, generation config."""
    model = make(next(case for case in ALL if case.family == family)).float()
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size // 2)
    if family == "vit" or "vision_config" in read(folder / CONFIG):
        write(folder / PROCESSOR, {"do_resize": True})
    if family == "vit":
        return folder
    if family == "bert":
        write(folder / MODULES, [{"path": "", "type": "sentence_transformers.models.Transformer"}])
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", TURN, END, *map(str, range(20))])}
    Tokenizer(WordLevel(words, unk_token="<pad>")).save(str(folder / TOKENIZER))
    special = {"bos_token": "<s>", "eos_token": END, "pad_token": "<pad>"}
    write(folder / TOKENS, {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / TEMPLATE).write_text(TEMPLATE_TEXT)
    write(folder / GENERATION, {"bos_token_id": 0, "eos_token_id": words[END], "pad_token_id": 2})
    return folder


def read(path: str | Path) -> Entries:
    return json.loads(Path(path).read_text())


def write(path: str | Path, content: Any) -> None:
    Path(path).write_text(json.dumps(content))


def shards() -> list[Path]:
    return sorted(Path().glob("model-*.safetensors"))


def state() -> Tensors:
    return {name: tensor for path in shards() for name, tensor in load_file(path).items()}


def rewrite(tensors: Tensors, paths: Sequence[str | Path]) -> None:
    """Spread tensors evenly over shards, with an index that agrees."""
    places = {name: str(paths[number * len(paths) // len(tensors)]) for number, name in enumerate(tensors)}
    for path in map(str, paths):
        inside = {name: t.contiguous().clone() for name, t in tensors.items() if places[name] == path}
        save_file(inside, path, {"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write(INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def entry(*names: str) -> tuple[str, Any]:
    """The first of some config entries that is there; the fault is absent where none is."""
    config = read(CONFIG)
    known = [(name, part[name]) for part in (config, config.get("text_config") or {}) for name in names if name in part]
    needs(known)
    return known[0]


def matrix(tensors: Tensors) -> str:
    """The largest matrix of a layer."""
    names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and any(s.isdigit() for s in name.split("."))]
    return max(names, key=lambda name: tensors[name].numel())


def stack(tensors: Tensors) -> tuple[str, int]:
    """The prefix of the layers in front of their number, and the last number."""
    steps = matrix(tensors).split(".")
    place = next(i for i, step in enumerate(steps) if step.isdigit())
    prefix = ".".join(steps[:place]) + "."
    return prefix, max(int(name[len(prefix) :].split(".")[0]) for name in tensors if name.startswith(prefix))


# ------------------------------------------------------------------------------------------------ ways to plant them


@step
def of_json(change: Callable[[Entries], object], file: str = CONFIG) -> None:
    """A fault of what a JSON file holds."""
    content = read(file)
    change(content)
    write(file, content)


def edited(file: str = CONFIG, /, **changes: Any) -> Step:
    """Other entries of a JSON file; those that a text config has stand there."""

    def change(content: Entries) -> None:
        text = content.get("text_config") or {}
        for name, value in changes.items():
            (text if name in text else content)[name] = value

    return of_json(change, file)


@step
def of_tensors(change: Callable[[Tensors], Tensors]) -> None:
    rewrite(change(state()), shards())


def of_map(change: Callable[[Entries], object]) -> Step:
    """A fault of the index's map of tensors to shards."""
    return of_json(lambda content: change(content["weight_map"]), INDEX)


def of_largest(change: Callable[[Tensor], Tensor]) -> Step:
    """A fault of the largest matrix of a layer."""
    return of_tensors(lambda tensors: {**tensors, matrix(tensors): change(tensors[matrix(tensors)])})


def of_all(change: Callable[[Tensor], Tensor] = Tensor.clone, prefix: str = "") -> Step:
    return of_tensors(lambda tensors: {prefix + name: change(tensor) for name, tensor in tensors.items()})


@step
def of_entry(change: Callable[[Any], Any], *names: str) -> None:
    """Another value of the first of some config entries that is there."""
    name, value = entry(*names)
    edited(**{name: change(value)})()


@step
def of_shard(change: Callable[[bytes], bytes], number: int = 0) -> None:
    path = shards()[number]
    path.write_bytes(change(path.read_bytes()))


def text_of(file: str, text: str) -> Step:
    """A file with another text, in folders that have this file."""
    return both(gone(file), put(file, text))


# --------------------------------------------------------------------------------------------------- weight files


def wider_header(content: bytes) -> bytes:
    """A tensor has fewer bytes than its shape takes."""
    (length,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + length])
    name = next(name for name in head if name != "__metadata__")
    head[name]["shape"][-1] += 1
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def other_shard(places: Entries) -> None:
    name, file = next(iter(places.items()))
    places[name] = next(place for place in places.values() if place != file)


@step
def copied(name: str) -> None:
    """The first shard a second time, under another name."""
    shutil.copy(shards()[0], name)


def without_format() -> None:
    for path in shards():
        save_file(load_file(path), path)


def without_weights() -> None:
    for path in (Path(INDEX), *shards()):
        path.unlink()


def in_two_shards() -> None:
    first, second = shards()[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, {"format": "pt"})


Rows = dict[str, tuple[str | tuple[str, ...], Step]]
"""By fault, the kinds that it may be called by, and how it is planted."""

OF_FILES: Rows = {
    "a shard is not there": ("missing shard", lambda: shards()[0].unlink()),
    "a shard ends early": ("damaged weight file", of_shard(lambda content: content[:-10])),
    "a shard's header is not JSON": ("damaged weight file", of_shard(lambda x: x[:8] + b"oops" + x[12:], -1)),
    "a tensor has fewer bytes than its shape takes": ("damaged weight file", of_shard(wider_header)),
    "the index names another shard for a tensor": ("index disagrees", of_map(other_shard)),
    "the index lacks a tensor": ("index disagrees", of_map(lambda places: places.popitem())),
    "the index names a tensor that nobody holds": (
        "index disagrees",
        of_map(lambda x: x.update(ghost=min(x.values()))),
    ),
    "total_size of another model": ("wrong total size", of_json(lambda x: x["metadata"].update(total_size=8), INDEX)),
    "the index is not JSON": ("damaged index", text_of(INDEX, "{")),
    "the index leads out of the folder": (
        "damaged index",
        of_map(lambda x: x.update({name: f"../{file}" for name, file in x.items()})),
    ),
    "there is no index": ("no index", gone(INDEX)),
    "a single file beside shards": ("two sets of weights", copied("model.safetensors")),
    "a shard of an earlier run": ("stray shard", copied("model-00007-of-00009.safetensors")),
    "headers without a format": ("no format", without_format),
    "no weights": ("no weights", without_weights),
    "a tensor in two shards": ("tensor twice", in_two_shards),
}

# ------------------------------------------------------------------------------------------------- names and shapes


def without_the_largest(tensors: Tensors) -> Tensors:
    largest = matrix(tensors)
    return {name: tensor for name, tensor in tensors.items() if name != largest}


def without_norms(tensors: Tensors) -> Tensors:
    stems = {name: name.rsplit(".", 2)[-2] for name in sorted(tensors)}
    norm = next((stem for name, stem in stems.items() if "norm" in stem and ".0." in name), None)
    needs(norm is not None)
    return {name: tensor for name, tensor in tensors.items() if stems[name] != norm}


def without_the_last_layer(tensors: Tensors) -> Tensors:
    prefix, last = stack(tensors)
    needs(last > 0 and entry(*LAYERS)[1] == last + 1)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}{last}.")}


def with_a_layer_more(tensors: Tensors) -> Tensors:
    prefix, last = stack(tensors)
    needs(entry(*LAYERS)[1] == last + 1)
    begin = f"{prefix}{last}."
    more = {f"{prefix}{last + 1}.{n[len(begin) :]}": t for n, t in tensors.items() if n.startswith(begin)}
    return {**tensors, **more}


def on_its_side(tensors: Tensors) -> Tensors:
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2 and len(set(tensors[n].shape)) == 2 and ".0." in n)
    return {**tensors, name: tensors[name].T}


def without_the_prefix(tensors: Tensors) -> Tensors:
    prefix = matrix(tensors).split(".")[0]
    plain = prefix in ("model", "transformer", "gpt_neox") and "vision_config" not in read(CONFIG)
    needs(plain and entry("architectures")[1][0].endswith(("ForCausalLM", "LMHeadModel")))
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}


def needs_a_tied_head() -> None:
    needs(entry("tie_word_embeddings")[1] and "ForCausalLM" in str(entry("architectures")[1]))


def with_a_head(tensors: Tensors) -> Tensors:
    ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "shared.weight")
    name = next((name for name in tensors if name.endswith(ends)), None)
    needs(name is not None)
    needs_a_tied_head()
    return {**tensors, "lm_head.weight": tensors[name]}


def without_its_head() -> None:
    needs_a_tied_head()
    needs("lm_head.weight" not in state())
    edited(tie_word_embeddings=False)()


def in_another_dtype() -> None:
    needs(stack(state())[1] > 0)
    of_largest(lambda tensor: tensor.bfloat16())()


OF_NAMES: Rows = {
    "a tensor left out": ("missing tensors", of_tensors(without_the_largest)),
    "a tensor that nobody reads": (
        "unexpected tensors",
        of_tensors(lambda tensors: {**tensors, f"{matrix(tensors)}_scale": torch.ones(1)}),
    ),
    "names of a compiled model": ("prefix", of_all(prefix="_orig_mod.")),
    "names of a model with an adapter": ("prefix", of_all(prefix="base_model.model.")),
    "codes without quantisation in the config": ("quantised weights", of_largest(lambda x: x.to(torch.int8))),
    "a norm left out of every layer": ("missing tensors", of_tensors(without_norms)),
    "the last layer left out": ("missing tensors", of_tensors(without_the_last_layer)),
    "a layer too many": ("unexpected tensors", of_tensors(with_a_layer_more)),
    "a tensor turned on its side": ("wrong shape", of_tensors(on_its_side)),
    "names without the base model's prefix": ("prefix", of_tensors(without_the_prefix)),
    "a tied head stored": ("tied head stored", of_tensors(with_a_head)),
    "a tied model that says it has a head": ("missing tensors", without_its_head),
    "one layer in another dtype": ("mixed dtypes", in_another_dtype),
}

# ---------------------------------------------------------------------------------------------------------- config


def number(change: Callable[[int], int], *names: str) -> Step:
    """Another value of an entry that holds a number."""

    def checked(value: Any) -> int:
        needs(isinstance(value, int))
        return change(value)

    return of_entry(checked, *names)


def rope(kind: str) -> Step:
    """Another type of a table of RoPE that holds for all layers."""

    def checked(value: Any) -> Any:
        needs(isinstance(value, dict) and "rope_theta" in value)
        return {**value, "rope_type": kind}

    return of_entry(checked, "rope_parameters")


def other_theta(value: Any) -> Any:
    """Another base of RoPE, of all layers or of the first type of them."""
    needs(isinstance(value, dict))
    inner = value if "rope_theta" in value else next((v for v in value.values() if isinstance(v, dict)), {})
    inner["rope_theta"] = 31337.0
    return value


def with_a_layer_in_the_config() -> None:
    needs("t5" not in str(entry("model_type")[1]))
    of_entry(lambda value: value + 1, *LAYERS)()


def with_more_heads() -> None:
    config = read(CONFIG)
    needs(all(part.get("head_dim") is None for part in (config, config.get("text_config") or {})))
    of_entry(lambda value: value * 2, "num_attention_heads", "n_head")()


def with_fewer_types() -> None:
    needs(entry("layer_types")[1])
    of_entry(lambda value: value[:-1], "layer_types")()


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
INNER = ("intermediate_size", "d_ff", "n_inner", "ffn_dim")
NO_MODEL, NOT_LOADED = "config that makes no model", "config that cannot be loaded"
SIZES = ("wrong shape", "head count", NO_MODEL)
OWN_CODE = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
OF_CONFIG: Rows = {
    "vocab_size too large": ("wrong shape", of_entry(lambda value: value + 8, "vocab_size")),
    "vocab_size too small": ("wrong shape", of_entry(lambda value: value - 3, "vocab_size")),
    "the config of a narrower model": (SIZES, number(lambda value: value // 2, *INNER)),
    "other KV groups": (SIZES, number(lambda value: 3 * value, "num_key_value_heads")),
    "another RoPE base": ("config unlike parents", of_entry(other_theta, "rope_parameters")),
    "a RoPE type that nobody knows": ((NO_MODEL, NOT_LOADED, "RoPE"), rope("bogus")),
    "a RoPE scaling without its factor": (("RoPE", NO_MODEL, NOT_LOADED), rope("yarn")),
    "another activation": (
        "config unlike parents",
        of_entry(lambda value: "gelu" if value == "relu" else "relu", *ACTIVATIONS),
    ),
    "another dtype in the config": ("dtype", edited(dtype="float16")),
    "no class in the config": ("no architecture", of_json(lambda config: config.pop("architectures"))),
    "a class that nobody knows": ("unknown architecture", edited(architectures=["LlamaForCasualLM"])),
    "a kind of model that nobody knows": (NOT_LOADED, of_json(lambda config: config.update(model_type="lamma"))),
    "config.json is not JSON": ("no config", text_of(CONFIG, "{'a': 1}")),
    "config.json is not there": ("no config", gone(CONFIG)),
    "quantisation in the config of plain weights": (
        "quantised weights",
        edited(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "code that the config names and nobody took along": ("no custom code", edited(auto_map=OWN_CODE)),
    "a layer more in the config": (("missing tensors", "layer types"), with_a_layer_in_the_config),
    "more heads, of fewer dimensions": (("config unlike parents", "wrong shape", NO_MODEL), with_more_heads),
    "types for fewer layers than there are": ("layer types", with_fewer_types),
}

# ----------------------------------------------------------------------------------- tokens and files left behind


def new_token(id_of: Callable[[int], int]) -> Step:
    """A token more in tokenizer.json; its id, of the number of rows of the embeddings."""

    def change(content: Entries) -> None:
        content["model"]["vocab"]["<new>"] = id_of(entry("vocab_size")[1])

    return of_json(change, TOKENIZER)


def added_token(content: Entries) -> None:
    rows = entry("vocab_size")[1]
    content["added_tokens"].append({"id": rows + 4, "content": "<tool>", "special": True})


def of_a_tokenizer(spoil: Step) -> Step:
    """A fault of folders that have a tokenizer."""
    return both(lambda: needs(Path(TOKENIZER).exists()), spoil)


OTHER_TEMPLATE = TEMPLATE_TEXT.replace(TURN, "<|start_header_id|>")
BROKEN_TEMPLATE = TEMPLATE_TEXT.removesuffix("{% endfor %}")
BEYOND = "special id beyond the vocabulary"
OF_TOKENS: Rows = {
    "a token behind the embeddings": ("token beyond the vocabulary", new_token(lambda rows: rows)),
    "an added token behind the embeddings": ("token beyond the vocabulary", of_json(added_token, TOKENIZER)),
    "two tokens with one id": ("id twice", new_token(lambda rows: 7)),
    "tokenizer.json is not JSON": ("damaged file", text_of(TOKENIZER, "version 1")),
    "eos_token_id of another vocabulary in generation_config.json": (
        BEYOND,
        edited(GENERATION, eos_token_id=[4, 128009]),
    ),
    "bos_token_id of another vocabulary in config.json": (BEYOND, of_a_tokenizer(edited(bos_token_id=151999))),
    "a special token that the tokenizer lacks": ("unknown special token", edited(TOKENS, pad_token="<|endoftext|>")),
    "a chat template that is no Jinja": ("broken chat template", text_of(TEMPLATE, BROKEN_TEMPLATE)),
    "the chat template of another tokenizer": ("template of other tokens", text_of(TEMPLATE, OTHER_TEMPLATE)),
    "eos_token_id of the base, tokenizer of the chat model": ("end of text", edited(GENERATION, eos_token_id=1)),
    "turns end with a token that ends nothing": (
        "end of text",
        both(edited(GENERATION, eos_token_id=1), edited(TOKENS, eos_token="</s>")),
    ),
    "no tokenizer": ("no tokenizer", both(gone(TOKENIZER), gone(TOKENS))),
    "no tokenizer config": ("no tokenizer config", gone(TOKENS)),
    "no chat template": ("no chat template", gone(TEMPLATE)),
    "no generation config": ("no generation config", gone(GENERATION)),
    "no preprocessor": ("no processor", gone(PROCESSOR)),
    "no modules of sentence-transformers": ("no sentence-transformers modules", gone(MODULES)),
}

# --------------------------------------------------------------------------------------------------------- numbers


def at_first(value: float) -> Step:
    first = torch.tensor([0])
    return of_largest(lambda tensor: tensor.flatten().index_fill(0, first, value).view(tensor.shape))


OF_NUMBERS: Rows = {
    "a NaN": ("NaN", at_first(float("nan"))),
    "an infinity": ("dtype overflow", at_first(float("inf"))),
    "a tensor of zeros": ("zero tensor", of_largest(torch.zeros_like)),
    "all weights three times as large": ("scale", of_all(lambda tensor: 3 * tensor)),
}

FAULTS = {
    name: Fault(kinds if isinstance(kinds, tuple) else (kinds,), spoil, rows is OF_NUMBERS)
    for rows in (OF_FILES, OF_NAMES, OF_CONFIG, OF_TOKENS, OF_NUMBERS)
    for name, (kinds, spoil) in rows.items()
}


def causes(merge: Path, parent: Path) -> set[str]:
    """Names of the causes that `rotation-merge doctor` finds."""
    ended = run("rotation-merge", "doctor", merge, parent, "--json")
    assert ended.code in (0, 1), ended.out + ended.err
    return {cause["name"] for cause in json.loads(ended.out)["causes"]}
