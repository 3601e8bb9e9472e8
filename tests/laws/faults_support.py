"""Faults that merges are found with, planted in whole folders: by safetensors, JSON and the file system alone.

Nothing here is shared with the checks that find them. `python tests/laws/faults_support.py` prints how many of them
`doctor` finds.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import ALL, make
from programs import run
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

Plant = Callable[[Path, Path], object]
"""Spoils a folder, whose parent is the second; raises `Absent` where a folder of the kind cannot have the fault."""
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
TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CONFIG, GENERATION, TOKENIZER, TOKENS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kinds: any of which it may be called by.
        spoil: plants it.
        weights: whether it shows only in numbers of tensors.
    """

    kinds: tuple[str, ...]
    spoil: Plant
    weights: bool = False

    def plant(self, folder: Path, parent: Path) -> bool:
        """Whether the folder now has the fault: not every kind of folder can."""
        try:
            self.spoil(folder, parent)
        except Absent:
            return False
        return True


FAULTS: dict[str, Fault] = {}


def fault(name: str, *kinds: str, weights: bool = False) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[name] = Fault(kinds, plant, weights)
        return plant

    return register


# ------------------------------------------------------------------------------------------------ whole folders


def whole(family: str, folder: Path) -> Path:
    """A folder as a publisher leaves it: shards and index, tokenizer with a chat template, generation config."""
    model = make(next(case for case in ALL if case.family == family)).float()
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size // 2)
    if family == "vit" or "vision_config" in read(folder / CONFIG):
        write(folder / "preprocessor_config.json", {"do_resize": True})
    if family == "vit":
        return folder
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", TURN, END, *map(str, range(20))])}
    Tokenizer(WordLevel(words, unk_token="<pad>")).save(str(folder / TOKENIZER))
    special = {"bos_token": "<s>", "eos_token": END, "pad_token": "<pad>"}
    write(folder / TOKENS, {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write(folder / GENERATION, {"bos_token_id": 0, "eos_token_id": words[END], "pad_token_id": 2})
    return folder


def read(path: Path) -> Entries:
    return json.loads(path.read_text())


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def state(folder: Path) -> Tensors:
    return {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}


def rewrite(folder: Path, tensors: Tensors) -> None:
    """Put other tensors into a folder: one file a shard was, an index that agrees."""
    old = {name: path.name for path in shards(folder) for name in load_file(path)}
    last = shards(folder)[-1].name
    places = {
        name: old.get(name) or next((old[o] for o in old if name.endswith(o) or o.endswith(name)), last)
        for name in tensors
    }
    for path in shards(folder):
        inside = {name: t.contiguous().clone() for name, t in tensors.items() if places[name] == path.name}
        save_file(inside, path, {"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write(index(folder), {"metadata": {"total_size": size}, "weight_map": places})


def edit(folder: Path, file: str = CONFIG, /, **changes: Any) -> None:
    """Other entries of a JSON file; those that a text config has stand there."""
    content = read(folder / file)
    text = content.get("text_config")
    for name, value in changes.items():
        part = text if isinstance(text, dict) and name in text else content
        part[name] = value
    write(folder / file, content)


def entry(folder: Path, *names: str) -> tuple[str, Any]:
    """The first of some config entries that is there; the fault is absent where none is."""
    config = read(folder / CONFIG)
    known = ((name, part[name]) for part in (config, config.get("text_config") or {}) for name in names if name in part)
    named = next(known, None)
    needs(named is not None)
    return named


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


def of_json(file: str, change: Callable[[Entries, Path], object]) -> Plant:
    """A fault of what a JSON file holds."""

    def plant(folder: Path, parent: Path) -> None:
        needs((folder / file).exists())
        content = read(folder / file)
        change(content, folder)
        write(folder / file, content)

    return plant


of_index, of_config = (partial(of_json, file) for file in (index(Path()).name, CONFIG))


def of_tensors(change: Callable[[Tensors, str, Path], Tensors]) -> Plant:
    """A fault of the tensors, of which one is named: the largest matrix of a layer."""

    def plant(folder: Path, parent: Path) -> None:
        tensors = state(folder)
        rewrite(folder, change(tensors, matrix(tensors), folder))

    return plant


def of_largest(change: Callable[[Tensor], Tensor]) -> Plant:
    return of_tensors(lambda tensors, largest, folder: {**tensors, largest: change(tensors[largest])})


def of_names(change: Callable[[str], str]) -> Plant:
    return of_tensors(lambda tensors, largest, folder: {change(name): tensor for name, tensor in tensors.items()})


def of_entry(change: Callable[[Any], Any], *names: str) -> Plant:
    """Another value of the first of some config entries that is there."""

    def plant(folder: Path, parent: Path) -> None:
        name, value = entry(folder, *names)
        edit(folder, **{name: change(value)})

    return plant


def bytes_of(change: Callable[[bytes], bytes], shard: int = 0) -> Plant:
    def plant(folder: Path, parent: Path) -> None:
        shards(folder)[shard].write_bytes(change(shards(folder)[shard].read_bytes()))

    return plant


def text_of(file: str, text: str, beside: str = "") -> Plant:
    """A file with another text, in folders that have this file, or another one."""

    def plant(folder: Path, parent: Path) -> None:
        needs((folder / (beside or file)).exists())
        (folder / file).write_text(text)

    return plant


def without(*names: str) -> Plant:
    def plant(folder: Path, parent: Path) -> None:
        needs(any((folder / name).exists() for name in names))
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return plant


def edited(file: str = CONFIG, beside: str = CONFIG, **changes: Any) -> Plant:
    """Other entries of a JSON file, in folders that have a file beside it."""

    def plant(folder: Path, parent: Path) -> None:
        needs((folder / beside).exists())
        edit(folder, file, **changes)

    return plant


# --------------------------------------------------------------------------------------------------- weight files


def wider_header(content: bytes) -> bytes:
    """A tensor has fewer bytes than its shape takes."""
    (length,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + length])
    name = next(name for name in head if name != "__metadata__")
    head[name]["shape"][-1] += 1
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def other_shard(content: Entries, folder: Path) -> None:
    name, file = next(iter(content["weight_map"].items()))
    content["weight_map"][name] = next(path.name for path in shards(folder) if path.name != file)


def out_of_the_folder(content: Entries, folder: Path) -> None:
    content["weight_map"] = {name: f"../{file}" for name, file in content["weight_map"].items()}


def ghost(content: Entries, folder: Path) -> None:
    content["weight_map"]["model.ghost.weight"] = shards(folder)[0].name


fault("a shard is not there", "missing shard")(lambda folder, parent: shards(folder)[0].unlink())
fault("a shard ends early", "damaged weight file")(bytes_of(lambda content: content[:-10]))
fault("a shard's header is not JSON", "damaged weight file")(
    bytes_of(lambda content: content[:8] + b"oops" + content[12:], shard=-1)
)
fault("a tensor has fewer bytes than its shape takes", "damaged weight file")(bytes_of(wider_header))
fault("the index names another shard for a tensor", "index disagrees")(of_index(other_shard))
fault("the index lacks a tensor", "index disagrees")(of_index(lambda content, folder: content["weight_map"].popitem()))
fault("the index names a tensor that nobody holds", "index disagrees")(of_index(ghost))
fault("total_size of another model", "wrong total size")(
    of_index(lambda content, folder: content["metadata"].update(total_size=content["metadata"]["total_size"] + 8))
)
fault("the index is not JSON", "damaged index")(text_of(index(Path()).name, "{"))
fault("the index leads out of the folder", "damaged index")(of_index(out_of_the_folder))
fault("there is no index", "no index")(lambda folder, parent: index(folder).unlink())
fault("a single file beside shards", "two sets of weights")(
    lambda folder, parent: save_file({"other": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
)
fault("a shard of an earlier run", "stray shard")(
    lambda folder, parent: shutil.copy(shards(folder)[0], folder / "model-00007-of-00009.safetensors")
)
fault("headers without a format", "no format")(
    lambda folder, parent: [save_file(load_file(path), path) for path in shards(folder)]
)
fault("no weights", "no weights")(lambda folder, parent: [path.unlink() for path in (index(folder), *shards(folder))])


@fault("a tensor in two shards", "tensor twice")
def _(folder: Path, parent: Path) -> None:
    first, second = shards(folder)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, {"format": "pt"})


# ------------------------------------------------------------------------------------------------- names and shapes


def without_norms(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    stems = {name: name.rsplit(".", 2)[-2] for name in sorted(tensors)}
    norm = next((stem for name, stem in stems.items() if "norm" in stem and ".0." in name), None)
    needs(norm is not None)
    return {name: tensor for name, tensor in tensors.items() if stems[name] != norm}


def without_the_last_layer(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    prefix, last = stack(tensors)
    needs(last > 0 and entry(folder, *LAYERS)[1] == last + 1)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}{last}.")}


def with_a_layer_more(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    prefix, last = stack(tensors)
    needs(entry(folder, *LAYERS)[1] == last + 1)
    begin = f"{prefix}{last}."
    more = {f"{prefix}{last + 1}.{n[len(begin) :]}": t for n, t in tensors.items() if n.startswith(begin)}
    return {**tensors, **more}


def on_its_side(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2 and len(set(tensors[n].shape)) == 2 and ".0." in n)
    return {**tensors, name: tensors[name].T}


def without_the_prefix(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    prefix = matrix(tensors).split(".")[0]
    plain = prefix in ("model", "transformer", "gpt_neox") and "vision_config" not in read(folder / CONFIG)
    needs(plain and entry(folder, "architectures")[1][0].endswith(("ForCausalLM", "LMHeadModel")))
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}


def needs_a_tied_head(folder: Path) -> None:
    needs(entry(folder, "tie_word_embeddings")[1] and "ForCausalLM" in str(entry(folder, "architectures")[1]))


def with_a_head(tensors: Tensors, largest: str, folder: Path) -> Tensors:
    ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "shared.weight")
    name = next((name for name in tensors if name.endswith(ends)), None)
    needs(name is not None)
    needs_a_tied_head(folder)
    return {**tensors, "lm_head.weight": tensors[name]}


fault("a tensor left out", "missing tensors")(
    of_tensors(lambda tensors, largest, folder: {name: t for name, t in tensors.items() if name != largest})
)
fault("a tensor that nobody reads", "unexpected tensors")(
    of_tensors(lambda tensors, largest, folder: {**tensors, f"{largest}_scale": torch.ones(1)})
)
fault("names of a compiled model", "prefix")(of_names(lambda name: f"_orig_mod.{name}"))
fault("names of a model with an adapter", "prefix")(of_names(lambda name: f"base_model.model.{name}"))
fault("codes without quantisation in the config", "quantised weights")(of_largest(lambda tensor: tensor.to(torch.int8)))
fault("a norm left out of every layer", "missing tensors")(of_tensors(without_norms))
fault("the last layer left out", "missing tensors")(of_tensors(without_the_last_layer))
fault("a layer too many", "unexpected tensors")(of_tensors(with_a_layer_more))
fault("a tensor turned on its side", "wrong shape")(of_tensors(on_its_side))
fault("names without the base model's prefix", "prefix")(of_tensors(without_the_prefix))
fault("a tied head stored", "tied head stored")(of_tensors(with_a_head))


@fault("a tied model that says it has a head", "missing tensors")
def _(folder: Path, parent: Path) -> None:
    needs_a_tied_head(folder)
    needs("lm_head.weight" not in state(folder))
    edit(folder, tie_word_embeddings=False)


@fault("one layer in another dtype", "mixed dtypes")
def _(folder: Path, parent: Path) -> None:
    needs(stack(state(folder))[1] > 0)
    of_largest(lambda tensor: tensor.bfloat16())(folder, parent)


# ---------------------------------------------------------------------------------------------------------- config


def number(change: Callable[[int], int]) -> Callable[[Any], int]:
    """A change of an entry that holds a number."""

    def checked(value: Any) -> int:
        needs(isinstance(value, int))
        return change(value)

    return checked


def rope(**changes: Any) -> Callable[[Any], Any]:
    """Other entries of a table of RoPE that holds for all layers."""

    def checked(value: Any) -> Any:
        needs(isinstance(value, dict) and "rope_theta" in value)
        return {**value, **changes}

    return checked


def other_theta(value: Any) -> Any:
    """Another base of RoPE, of all layers or of the first type of them."""
    needs(isinstance(value, dict))
    inner = value if "rope_theta" in value else next((v for v in value.values() if isinstance(v, dict)), {})
    inner["rope_theta"] = 31337.0
    return value


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
NO_MODEL, NOT_LOADED = "config that makes no model", "config that cannot be loaded"

fault("vocab_size too large", "wrong shape")(of_entry(lambda value: value + 8, "vocab_size"))
fault("vocab_size too small", "wrong shape")(of_entry(lambda value: value - 3, "vocab_size"))
fault("the config of a narrower model", "wrong shape", "head count", NO_MODEL)(
    of_entry(number(lambda value: value // 2), "intermediate_size", "d_ff", "n_inner", "ffn_dim")
)
fault("other KV groups", "wrong shape", "head count", NO_MODEL)(
    of_entry(number(lambda value: 3 * value), "num_key_value_heads")
)
fault("another RoPE base", "config unlike parents")(of_entry(other_theta, "rope_parameters"))
fault("a RoPE type that nobody knows", NO_MODEL, NOT_LOADED, "RoPE")(
    of_entry(rope(rope_type="bogus"), "rope_parameters")
)
fault("a RoPE scaling without its factor", "RoPE", NO_MODEL, NOT_LOADED)(
    of_entry(rope(rope_type="yarn"), "rope_parameters")
)
fault("another activation", "config unlike parents")(
    of_entry(lambda value: "relu" if value != "relu" else "gelu", *ACTIVATIONS)
)
fault("another dtype in the config", "dtype")(edited(dtype="float16"))
fault("no class in the config", "no architecture")(of_config(lambda config, folder: config.pop("architectures")))
fault("a class that nobody knows", "unknown architecture")(edited(architectures=["LlamaForCasualLM"]))
fault("a kind of model that nobody knows", NOT_LOADED)(of_config(lambda config, _: config.update(model_type="lamma")))
fault("config.json is not JSON", "no config")(text_of(CONFIG, "{'a': 1}"))
fault("config.json is not there", "no config")(without(CONFIG))
fault("quantisation in the config of plain weights", "quantised weights")(
    edited(quantization_config={"quant_method": "gptq", "bits": 4})
)
fault("code that the config names and nobody took along", "no custom code")(
    edited(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
)


@fault("a layer more in the config", "missing tensors", "layer types")
def _(folder: Path, parent: Path) -> None:
    needs("t5" not in str(entry(folder, "model_type")[1]))
    of_entry(lambda value: value + 1, *LAYERS)(folder, parent)


@fault("more heads, of fewer dimensions", "config unlike parents", "wrong shape", NO_MODEL)
def _(folder: Path, parent: Path) -> None:
    config = read(folder / CONFIG)
    needs(all(part.get("head_dim") is None for part in (config, config.get("text_config") or {})))
    of_entry(lambda value: value * 2, "num_attention_heads", "n_head")(folder, parent)


@fault("types for fewer layers than there are", "layer types")
def _(folder: Path, parent: Path) -> None:
    needs(entry(folder, "layer_types")[1])
    of_entry(lambda value: value[:-1], "layer_types")(folder, parent)


# ---------------------------------------------------------------------------------------------------------- tokens


def new_token(change: Callable[[Entries, int], object]) -> Plant:
    """A token more in tokenizer.json; the change is told the number of rows of the embeddings."""
    return of_json(TOKENIZER, lambda content, folder: change(content, entry(folder, "vocab_size")[1]))


fault("a token behind the embeddings", "token beyond the vocabulary")(
    new_token(lambda content, rows: content["model"]["vocab"].update({"<new>": rows}))
)
fault("an added token behind the embeddings", "token beyond the vocabulary")(
    new_token(
        lambda content, rows: content["added_tokens"].append({"id": rows + 4, "content": "<tool>", "special": True})
    )
)
fault("two tokens with one id", "id twice")(
    new_token(lambda content, rows: content["model"]["vocab"].update({"<new>": 7}))
)
fault("tokenizer.json is not JSON", "damaged file")(text_of(TOKENIZER, "version 1"))
fault("eos_token_id of another vocabulary in generation_config.json", "special id beyond the vocabulary")(
    edited(GENERATION, TOKENIZER, eos_token_id=[4, 128009])
)
fault("bos_token_id of another vocabulary in config.json", "special id beyond the vocabulary")(
    edited(CONFIG, TOKENIZER, bos_token_id=151999)
)
fault("a special token that the tokenizer lacks", "unknown special token")(
    edited(TOKENS, TOKENIZER, pad_token="<|endoftext|>")
)
fault("a chat template that is no Jinja", "broken chat template")(
    text_of("chat_template.jinja", "{% for m in messages %}{{ m.content }}")
)
fault("the chat template of another tokenizer", "template of other tokens")(
    text_of("chat_template.jinja", TEMPLATE.replace(TURN, "<|start_header_id|>"))
)
fault("eos_token_id of the base, tokenizer of the chat model", "end of text")(
    edited(GENERATION, TOKENIZER, eos_token_id=1)
)


@fault("turns end with a token that ends nothing", "end of text")
def _(folder: Path, parent: Path) -> None:
    edited(GENERATION, TOKENIZER, eos_token_id=1)(folder, parent)
    edit(folder, TOKENS, eos_token="</s>")


# ------------------------------------------------------------------------------------------------- files left behind

fault("no tokenizer", "no tokenizer")(without(TOKENIZER, TOKENS))
fault("no tokenizer config", "no tokenizer config")(without(TOKENS))
fault("no chat template", "no chat template")(without("chat_template.jinja"))
fault("no generation config", "no generation config")(without(GENERATION))
fault("no preprocessor", "no processor")(without("preprocessor_config.json"))


@fault("no modules of sentence-transformers", "no sentence-transformers modules")
def _(folder: Path, parent: Path) -> None:
    needs(entry(folder, "model_type")[1] == "bert")
    write(parent / "modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}])


# --------------------------------------------------------------------------------------------------------- numbers


def at_first(value: float) -> Plant:
    first = torch.tensor([0])
    return of_largest(lambda tensor: tensor.flatten().index_fill(0, first, value).view(tensor.shape))


fault("a NaN", "NaN", weights=True)(at_first(float("nan")))
fault("an infinity", "dtype overflow", weights=True)(at_first(float("inf")))
fault("a tensor of zeros", "zero tensor", weights=True)(of_largest(torch.zeros_like))
fault("all weights three times as large", "scale", weights=True)(
    of_tensors(lambda tensors, largest, folder: {name: 3 * tensor for name, tensor in tensors.items()})
)


# ----------------------------------------------------------------------------------------------------------- table


def causes(merge: Path, parent: Path) -> set[str]:
    """Names of the causes that `rotation-merge doctor` finds."""
    ended = run("rotation-merge", "doctor", merge, parent, "--json")
    assert ended.code in (0, 1), ended.out + ended.err
    return {cause["name"] for cause in json.loads(ended.out)["causes"]}


def table() -> None:
    """Plant every fault in every family, and print by kind what was planted and what was found."""
    from tempfile import TemporaryDirectory

    planted, detected, alarms = Counter[str](), Counter[str](), 0
    with TemporaryDirectory() as name:
        place = Path(name)
        folders = place / "merge", place / "parent"
        for family in FAMILIES:
            source = whole(family, place / family)
            alarms += len(causes(source, source))
            for title, kind in FAULTS.items():
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(source, folder)
                if not (kind.weights and family in ("vit", "qwen2_5_vl")) and kind.plant(*folders):
                    planted[title] += 1
                    detected[title] += bool(causes(*folders) & set(kind.kinds))
    print("| planted | found as | families | found |\n|---|---|---|---|")
    for title, count in planted.items():
        print(f"| {title} | {' or '.join(FAULTS[title].kinds)} | {count} | {detected[title]} |")
    sums = f"{len(planted)} faults, {planted.total()} times planted, {detected.total()} found"
    print(f"\n{sums}; {alarms} alarms on {len(FAMILIES)} whole folders.")


if __name__ == "__main__":
    table()
