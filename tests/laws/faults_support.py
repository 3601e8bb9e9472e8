"""Faults that merges are found with, planted in whole folders: by safetensors, JSON and the file system alone.

Nothing here is shared with the checks that find them. `python tests/laws/faults_support.py` prints how many of them
`doctor` finds.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import ALL, Case, make
from programs import run
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

Plant = Callable[[Path, Path], bool | None]
"""Spoils a folder, whose parent is the second; False where a folder of the kind cannot have the fault."""

FAMILIES = (
    *("llama", "qwen3", "gemma", "gemma3", "mixtral", "olmo2", "cohere", "phi3", "gpt2", "gpt_neox"),
    *("bert", "t5", "opt", "vit", "qwen2_5_vl"),
)
TURN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kinds: any of which it may be called by.
        weights: whether it shows only in numbers of tensors.
    """

    kinds: tuple[str, ...]
    plant: Plant
    weights: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, *kinds: str, weights: bool = False) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[name] = Fault(kinds, plant, weights)
        return plant

    return register


# ------------------------------------------------------------------------------------------------ whole folders


def case_of(family: str) -> Case:
    return next(case for case in ALL if case.family == family)


def whole(family: str, folder: Path) -> Path:
    """A folder as a publisher leaves it: shards and index, tokenizer with a chat template, generation config."""
    model = make(case_of(family)).float()
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size // 2)
    vision = "vision_config" in read(folder / "config.json") or family == "vit"
    if vision:
        write(folder / "preprocessor_config.json", {"do_resize": True})
    if family == "vit":
        return folder
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", TURN, END, *map(str, range(20))])}
    Tokenizer(WordLevel(words, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": END, "pad_token": "<pad>"}
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": words[END], "pad_token_id": 2})
    return folder


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def state(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
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


def edit(folder: Path, file: str = "config.json", /, **changes: Any) -> None:
    content = read(folder / file)
    text = content.get("text_config")
    for name, value in changes.items():
        part = text if isinstance(text, dict) and name in text else content
        part[name] = value
    write(folder / file, content)


def entry(folder: Path, *names: str) -> tuple[str, Any]:
    """The first of some config entries that is there."""
    config = read(folder / "config.json")
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if name in part:
                return name, part[name]
    return "", None


def matrix(tensors: dict[str, Tensor]) -> str:
    """The largest matrix of a layer."""
    names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and any(s.isdigit() for s in name.split("."))]
    return max(names, key=lambda name: tensors[name].numel())


def stack(tensors: dict[str, Tensor]) -> tuple[str, int]:
    """The prefix of the layers in front of their number, and the last number."""
    steps = matrix(tensors).split(".")
    place = next(i for i, step in enumerate(steps) if step.isdigit())
    prefix = ".".join(steps[:place]) + "."
    last = max(int(name[len(prefix) :].split(".")[0]) for name in tensors if name.startswith(prefix))
    return prefix, last


LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

# --------------------------------------------------------------------------------------------------- weight files


@fault("a shard is not there", "missing shard")
def _(folder: Path, parent: Path) -> None:
    shards(folder)[0].unlink()


@fault("a shard ends early", "damaged weight file")
def _(folder: Path, parent: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:-10])


@fault("a shard's header is not JSON", "damaged weight file")
def _(folder: Path, parent: Path) -> None:
    path = shards(folder)[-1]
    content = bytearray(path.read_bytes())
    content[8:12] = b"oops"
    path.write_bytes(content)


@fault("a tensor has fewer bytes than its shape takes", "damaged weight file")
def _(folder: Path, parent: Path) -> None:
    path = shards(folder)[0]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + length])
    name = next(name for name in head if name != "__metadata__")
    head[name]["shape"] = [*head[name]["shape"][:-1], head[name]["shape"][-1] + 1]
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@fault("the index names another shard for a tensor", "index disagrees")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    name, file = next(iter(content["weight_map"].items()))
    content["weight_map"][name] = next(path.name for path in shards(folder) if path.name != file)
    write(index(folder), content)


@fault("the index lacks a tensor", "index disagrees")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    content["weight_map"].pop(next(iter(content["weight_map"])))
    write(index(folder), content)


@fault("the index names a tensor that nobody holds", "index disagrees")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    content["weight_map"]["model.ghost.weight"] = shards(folder)[0].name
    write(index(folder), content)


@fault("the index is not JSON", "damaged index")
def _(folder: Path, parent: Path) -> None:
    index(folder).write_text("{")


@fault("the index leads out of the folder", "damaged index")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    content["weight_map"] = {name: f"../{file}" for name, file in content["weight_map"].items()}
    write(index(folder), content)


@fault("there is no index", "no index")
def _(folder: Path, parent: Path) -> None:
    index(folder).unlink()


@fault("a single file beside shards", "two sets of weights")
def _(folder: Path, parent: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


@fault("a shard of an earlier run", "stray shard")
def _(folder: Path, parent: Path) -> None:
    shutil.copy(shards(folder)[0], folder / "model-00007-of-00009.safetensors")


@fault("total_size of another model", "wrong total size")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    content["metadata"]["total_size"] += 8
    write(index(folder), content)


@fault("a tensor in two shards", "tensor twice")
def _(folder: Path, parent: Path) -> None:
    first, second = shards(folder)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, {"format": "pt"})


@fault("headers without a format", "no format")
def _(folder: Path, parent: Path) -> None:
    for path in shards(folder):
        save_file(load_file(path), path)


@fault("no weights", "no weights")
def _(folder: Path, parent: Path) -> None:
    index(folder).unlink()
    for path in shards(folder):
        path.unlink()


# ------------------------------------------------------------------------------------------------- names and shapes


@fault("a tensor left out", "missing tensors")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    del tensors[matrix(tensors)]
    rewrite(folder, tensors)


@fault("a norm left out of every layer", "missing tensors")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    norm = next((n.rsplit(".", 2)[-2] for n in sorted(tensors) if "norm" in n.rsplit(".", 2)[-2] and ".0." in n), None)
    if norm is None:
        return False
    rewrite(folder, {n: t for n, t in tensors.items() if n.rsplit(".", 2)[-2] != norm})
    return None


@fault("the last layer left out", "missing tensors")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    prefix, last = stack(tensors)
    if last == 0 or entry(folder, *LAYERS)[1] != last + 1:
        return False
    rewrite(folder, {name: t for name, t in tensors.items() if not name.startswith(f"{prefix}{last}.")})
    return None


@fault("a layer too many", "unexpected tensors")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    prefix, last = stack(tensors)
    if entry(folder, *LAYERS)[1] != last + 1:
        return False
    begin = f"{prefix}{last}."
    more = {f"{prefix}{last + 1}.{n[len(begin) :]}": t for n, t in tensors.items() if n.startswith(begin)}
    rewrite(folder, {**tensors, **more})
    return None


@fault("a tensor that nobody reads", "unexpected tensors")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    rewrite(folder, {**tensors, f"{matrix(tensors)}_scale": torch.ones(1)})


@fault("a tensor turned on its side", "wrong shape")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2 and len(set(tensors[n].shape)) == 2 and ".0." in n)
    rewrite(folder, {**tensors, name: tensors[name].T})


@fault("names of a compiled model", "prefix")
def _(folder: Path, parent: Path) -> None:
    rewrite(folder, {f"_orig_mod.{name}": tensor for name, tensor in state(folder).items()})


@fault("names of a data-parallel model", "prefix")
def _(folder: Path, parent: Path) -> None:
    rewrite(folder, {f"module.{name}": tensor for name, tensor in state(folder).items()})


@fault("names without the base model's prefix", "prefix")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    prefix = matrix(tensors).split(".")[0]
    plain = prefix in ("model", "transformer", "gpt_neox") and "vision_config" not in read(folder / "config.json")
    if not plain or not entry(folder, "architectures")[1][0].endswith(("ForCausalLM", "LMHeadModel")):
        return False
    rewrite(folder, {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()})
    return None


def tied(folder: Path) -> bool:
    return bool(entry(folder, "tie_word_embeddings")[1])


def embedding(tensors: dict[str, Tensor]) -> str | None:
    ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "shared.weight")
    return next((name for name in tensors if name.endswith(ends)), None)


@fault("a tied head stored", "tied head stored")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    name = embedding(tensors)
    if not tied(folder) or name is None or "ForCausalLM" not in str(entry(folder, "architectures")[1]):
        return False
    rewrite(folder, {**tensors, "lm_head.weight": tensors[name]})
    return None


@fault("a tied model that says it has a head", "missing tensors")
def _(folder: Path, parent: Path) -> bool | None:
    if not tied(folder) or "ForCausalLM" not in str(entry(folder, "architectures")[1]):
        return False
    if "lm_head.weight" in state(folder):
        return False
    edit(folder, tie_word_embeddings=False)
    return None


# ---------------------------------------------------------------------------------------------------------- config


@fault("vocab_size too large", "wrong shape")
def _(folder: Path, parent: Path) -> bool | None:
    name, value = entry(folder, "vocab_size")
    if not name:
        return False
    edit(folder, vocab_size=value + 8)
    return None


@fault("vocab_size too small", "wrong shape")
def _(folder: Path, parent: Path) -> bool | None:
    name, value = entry(folder, "vocab_size")
    if not name:
        return False
    edit(folder, vocab_size=value - 3)
    return None


@fault("a layer more in the config", "missing tensors", "layer types")
def _(folder: Path, parent: Path) -> bool | None:
    name, value = entry(folder, *LAYERS)
    if not name or "t5" in str(entry(folder, "model_type")[1]):
        return False
    edit(folder, **{name: value + 1})
    return None


@fault("the config of a narrower model", "wrong shape", "head count", "config that makes no model")
def _(folder: Path, parent: Path) -> bool | None:
    name, value = entry(folder, "intermediate_size", "d_ff", "n_inner", "ffn_dim")
    if not isinstance(value, int):
        return False
    edit(folder, **{name: value // 2})
    return None


@fault("other KV groups", "wrong shape", "head count", "config that makes no model")
def _(folder: Path, parent: Path) -> bool | None:
    _, value = entry(folder, "num_key_value_heads")
    if not isinstance(value, int):
        return False
    edit(folder, num_key_value_heads=3 * value)
    return None


@fault("more heads, of fewer dimensions", "config unlike parents", "wrong shape", "config that makes no model")
def _(folder: Path, parent: Path) -> bool | None:
    name, value = entry(folder, "num_attention_heads", "n_head")
    head, size = entry(folder, "head_dim")
    if not name or (head and size is not None):
        return False
    edit(folder, **{name: value * 2})
    return None


@fault("another RoPE base", "config unlike parents")
def _(folder: Path, parent: Path) -> bool | None:
    config = read(folder / "config.json")
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    rope = part.get("rope_parameters")
    if not isinstance(rope, dict):
        return False
    inner = rope if "rope_theta" in rope else next((v for v in rope.values() if isinstance(v, dict)), {})
    inner["rope_theta"] = 31337.0
    write(folder / "config.json", config)
    return None


@fault("a RoPE type that nobody knows", "config that makes no model", "config that cannot be loaded", "RoPE")
def _(folder: Path, parent: Path) -> bool | None:
    _, value = entry(folder, "rope_parameters")
    if not isinstance(value, dict) or "rope_theta" not in value:
        return False
    edit(folder, rope_parameters={**value, "rope_type": "bogus"})
    return None


@fault("a RoPE scaling without its factor", "RoPE", "config that makes no model", "config that cannot be loaded")
def _(folder: Path, parent: Path) -> bool | None:
    _, value = entry(folder, "rope_parameters")
    if not isinstance(value, dict) or "rope_theta" not in value:
        return False
    edit(folder, rope_parameters={**value, "rope_type": "yarn"})
    return None


@fault("another activation", "config unlike parents")
def _(folder: Path, parent: Path) -> bool | None:
    names = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
    name, value = entry(folder, *names)
    if not name:
        return False
    edit(folder, **{name: "relu" if value != "relu" else "gelu"})
    return None


@fault("another dtype in the config", "dtype")
def _(folder: Path, parent: Path) -> None:
    edit(folder, dtype="float16")


@fault("one layer in another dtype", "mixed dtypes")
def _(folder: Path, parent: Path) -> bool | None:
    tensors = state(folder)
    name = matrix(tensors)
    if stack(tensors)[1] == 0:
        return False
    rewrite(folder, {**tensors, name: tensors[name].bfloat16()})
    return None


@fault("types for fewer layers than there are", "layer types")
def _(folder: Path, parent: Path) -> bool | None:
    _, value = entry(folder, "layer_types")
    if not value:
        return False
    edit(folder, layer_types=value[:-1])
    return None


@fault("no class in the config", "no architecture")
def _(folder: Path, parent: Path) -> None:
    config = read(folder / "config.json")
    del config["architectures"]
    write(folder / "config.json", config)


@fault("a class that nobody knows", "unknown architecture")
def _(folder: Path, parent: Path) -> None:
    edit(folder, architectures=["LlamaForCasualLM"])


@fault("a kind of model that nobody knows", "config that cannot be loaded")
def _(folder: Path, parent: Path) -> None:
    write(folder / "config.json", {**read(folder / "config.json"), "model_type": "lamma"})


@fault("config.json is not JSON", "no config")
def _(folder: Path, parent: Path) -> None:
    (folder / "config.json").write_text("{'a': 1}")


@fault("config.json is not there", "no config")
def _(folder: Path, parent: Path) -> None:
    (folder / "config.json").unlink()


@fault("quantisation in the config of plain weights", "quantised weights")
def _(folder: Path, parent: Path) -> None:
    edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})


@fault("codes without quantisation in the config", "quantised weights")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    name = matrix(tensors)
    rewrite(folder, {**tensors, name: tensors[name].to(torch.int8)})


@fault("code that the config names and nobody took along", "no custom code")
def _(folder: Path, parent: Path) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})


# ---------------------------------------------------------------------------------------------------------- tokens


def tokens(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    return read(path) if path.exists() else None


def rows(folder: Path) -> int:
    return int(entry(folder, "vocab_size")[1])


@fault("a token behind the embeddings", "token beyond the vocabulary")
def _(folder: Path, parent: Path) -> bool | None:
    content = tokens(folder)
    if content is None:
        return False
    content["model"]["vocab"]["<new>"] = rows(folder)
    write(folder / "tokenizer.json", content)
    return None


@fault("an added token behind the embeddings", "token beyond the vocabulary")
def _(folder: Path, parent: Path) -> bool | None:
    content = tokens(folder)
    if content is None:
        return False
    content["added_tokens"].append({"id": rows(folder) + 4, "content": "<tool>", "special": True})
    write(folder / "tokenizer.json", content)
    return None


@fault("two tokens with one id", "id twice")
def _(folder: Path, parent: Path) -> bool | None:
    content = tokens(folder)
    if content is None:
        return False
    content["model"]["vocab"]["<new>"] = 7
    write(folder / "tokenizer.json", content)
    return None


@fault("tokenizer.json is not JSON", "damaged file")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    (folder / "tokenizer.json").write_text("version 1")
    return None


@fault("eos_token_id of another vocabulary in generation_config.json", "special id beyond the vocabulary")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    edit(folder, "generation_config.json", eos_token_id=[4, 128009])
    return None


@fault("bos_token_id of another vocabulary in config.json", "special id beyond the vocabulary")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    edit(folder, bos_token_id=151999)
    return None


@fault("a special token that the tokenizer lacks", "unknown special token")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    edit(folder, "tokenizer_config.json", pad_token="<|endoftext|>")
    return None


@fault("a chat template that is no Jinja", "broken chat template")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    return None


@fault("the chat template of another tokenizer", "template of other tokens")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(TURN, "<|start_header_id|>"))
    return None


@fault("eos_token_id of the base, tokenizer of the chat model", "end of text")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    edit(folder, "generation_config.json", eos_token_id=1)
    return None


@fault("turns end with a token that ends nothing", "turns do not end")
def _(folder: Path, parent: Path) -> bool | None:
    if tokens(folder) is None:
        return False
    edit(folder, "generation_config.json", eos_token_id=1)
    edit(folder, "tokenizer_config.json", eos_token="</s>")
    return None


# ------------------------------------------------------------------------------------------------- files left behind


def without(*names: str) -> Plant:
    def plant(folder: Path, parent: Path) -> bool | None:
        if not any((folder / name).exists() for name in names):
            return False
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return None

    return plant


fault("no tokenizer", "no tokenizer")(without("tokenizer.json", "tokenizer_config.json"))
fault("no tokenizer config", "no tokenizer config")(without("tokenizer_config.json"))
fault("no chat template", "no chat template")(without("chat_template.jinja"))
fault("no generation config", "no generation config")(without("generation_config.json"))
fault("no preprocessor", "no processor")(without("preprocessor_config.json"))


@fault("no modules of sentence-transformers", "no sentence-transformers modules")
def _(folder: Path, parent: Path) -> bool | None:
    if entry(folder, "model_type")[1] != "bert":
        return False
    write(parent / "modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}])
    return None


# --------------------------------------------------------------------------------------------------------- numbers


def changed(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(folder: Path, parent: Path) -> None:
        tensors = state(folder)
        name = matrix(tensors)
        rewrite(folder, {**tensors, name: change(tensors[name])})

    return plant


def at_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


fault("a NaN", "NaN", weights=True)(changed(at_first(float("nan"))))
fault("an infinity", "dtype overflow", weights=True)(changed(at_first(float("inf"))))
fault("a tensor of zeros", "zero tensor", weights=True)(changed(torch.zeros_like))


@fault("all weights three times as large", "scale", weights=True)
def _(folder: Path, parent: Path) -> None:
    rewrite(folder, {name: 3 * tensor for name, tensor in state(folder).items()})


# ----------------------------------------------------------------------------------------------------------- table


def causes(merge: Path, parent: Path) -> set[str]:
    """Names of the causes that `rotation-merge doctor` finds."""
    ended = run("rotation-merge", "doctor", merge, parent, "--json")
    assert ended.code in (0, 1), ended.out + ended.err
    return {cause["name"] for cause in json.loads(ended.out)["causes"]}


def table() -> None:
    """Plant every fault in every family, and print by kind what was planted and what was found."""
    from tempfile import TemporaryDirectory

    counts: dict[str, list[int]] = {}
    alarms = 0
    with TemporaryDirectory() as name:
        place = Path(name)
        for family in FAMILIES:
            source = whole(family, place / family)
            alarms += len(causes(source, source))
            for title, planted in FAULTS.items():
                folders = place / "merge", place / "parent"
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(source, folder)
                if (planted.weights and family in ("vit", "qwen2_5_vl")) or planted.plant(*folders) is False:
                    continue
                kinds = causes(*folders)
                count = counts.setdefault(title, [0, 0])
                count[0] += 1
                count[1] += bool(kinds & set(planted.kinds))
    print("| planted | found as | families | found |\n|---|---|---|---|")
    for title, (made, seen) in counts.items():
        print(f"| {title} | {' or '.join(FAULTS[title].kinds)} | {made} | {seen} |")
    made, seen = (sum(column) for column in zip(*counts.values(), strict=True))
    print(
        f"\n{len(counts)} faults, {made} times planted, {seen} found; {alarms} alarms on {len(FAMILIES)} whole folders."
    )


if __name__ == "__main__":
    table()
