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

Plant = Callable[[Path, Path], object]
"""Spoils a folder, whose parent is the second; raises `Absent` where a folder of the kind cannot have the fault."""


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


fault("a shard is not there", "missing shard")(lambda folder, parent: shards(folder)[0].unlink())


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


def of_index(change: Callable[[dict[str, Any], Path], object]) -> Plant:
    """A fault of what the index holds."""

    def plant(folder: Path, parent: Path) -> None:
        content = read(index(folder))
        change(content, folder)
        write(index(folder), content)

    return plant


def of_tensors(change: Callable[[dict[str, Tensor], str], dict[str, Tensor]]) -> Plant:
    """A fault of the tensors, of which one is named: the largest matrix of a layer."""

    def plant(folder: Path, parent: Path) -> None:
        tensors = state(folder)
        rewrite(folder, change(tensors, matrix(tensors)))

    return plant


fault("the index lacks a tensor", "index disagrees")(of_index(lambda content, folder: content["weight_map"].popitem()))
fault("the index names a tensor that nobody holds", "index disagrees")(
    of_index(lambda content, folder: content["weight_map"].update({"model.ghost.weight": shards(folder)[0].name}))
)
fault("total_size of another model", "wrong total size")(
    of_index(lambda content, folder: content["metadata"].update(total_size=content["metadata"]["total_size"] + 8))
)
fault("a tensor left out", "missing tensors")(
    of_tensors(lambda tensors, largest: {name: tensor for name, tensor in tensors.items() if name != largest})
)
fault("a tensor that nobody reads", "unexpected tensors")(
    of_tensors(lambda tensors, largest: {**tensors, f"{largest}_scale": torch.ones(1)})
)
fault("names of a compiled model", "prefix")(
    of_tensors(lambda tensors, largest: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()})
)
fault("names of a data-parallel model", "prefix")(
    of_tensors(lambda tensors, largest: {f"module.{name}": tensor for name, tensor in tensors.items()})
)
fault("codes without quantisation in the config", "quantised weights")(
    of_tensors(lambda tensors, largest: {**tensors, largest: tensors[largest].to(torch.int8)})
)
fault("the index is not JSON", "damaged index")(lambda folder, parent: index(folder).write_text("{"))


@fault("the index leads out of the folder", "damaged index")
def _(folder: Path, parent: Path) -> None:
    content = read(index(folder))
    content["weight_map"] = {name: f"../{file}" for name, file in content["weight_map"].items()}
    write(index(folder), content)


fault("there is no index", "no index")(lambda folder, parent: index(folder).unlink())


@fault("a single file beside shards", "two sets of weights")
def _(folder: Path, parent: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


@fault("a shard of an earlier run", "stray shard")
def _(folder: Path, parent: Path) -> None:
    shutil.copy(shards(folder)[0], folder / "model-00007-of-00009.safetensors")


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


@fault("a norm left out of every layer", "missing tensors")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    norm = next((n.rsplit(".", 2)[-2] for n in sorted(tensors) if "norm" in n.rsplit(".", 2)[-2] and ".0." in n), None)
    needs(norm is not None)
    rewrite(folder, {n: t for n, t in tensors.items() if n.rsplit(".", 2)[-2] != norm})


@fault("the last layer left out", "missing tensors")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    prefix, last = stack(tensors)
    needs(last > 0 and entry(folder, *LAYERS)[1] == last + 1)
    rewrite(folder, {name: t for name, t in tensors.items() if not name.startswith(f"{prefix}{last}.")})


@fault("a layer too many", "unexpected tensors")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    prefix, last = stack(tensors)
    needs(entry(folder, *LAYERS)[1] == last + 1)
    begin = f"{prefix}{last}."
    more = {f"{prefix}{last + 1}.{n[len(begin) :]}": t for n, t in tensors.items() if n.startswith(begin)}
    rewrite(folder, {**tensors, **more})


@fault("a tensor turned on its side", "wrong shape")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2 and len(set(tensors[n].shape)) == 2 and ".0." in n)
    rewrite(folder, {**tensors, name: tensors[name].T})


@fault("names without the base model's prefix", "prefix")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    prefix = matrix(tensors).split(".")[0]
    plain = prefix in ("model", "transformer", "gpt_neox") and "vision_config" not in read(folder / "config.json")
    needs(plain and entry(folder, "architectures")[1][0].endswith(("ForCausalLM", "LMHeadModel")))
    rewrite(folder, {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()})


def tied(folder: Path) -> bool:
    return bool(entry(folder, "tie_word_embeddings")[1])


def embedding(tensors: dict[str, Tensor]) -> str | None:
    ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "shared.weight")
    return next((name for name in tensors if name.endswith(ends)), None)


@fault("a tied head stored", "tied head stored")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    name = embedding(tensors)
    needs(tied(folder) and name is not None and "ForCausalLM" in str(entry(folder, "architectures")[1]))
    rewrite(folder, {**tensors, "lm_head.weight": tensors[name]})


@fault("a tied model that says it has a head", "missing tensors")
def _(folder: Path, parent: Path) -> None:
    needs(tied(folder) and "ForCausalLM" in str(entry(folder, "architectures")[1]))
    needs("lm_head.weight" not in state(folder))
    edit(folder, tie_word_embeddings=False)


# ---------------------------------------------------------------------------------------------------------- config


@fault("vocab_size too large", "wrong shape")
def _(folder: Path, parent: Path) -> None:
    name, value = entry(folder, "vocab_size")
    needs(name)
    edit(folder, vocab_size=value + 8)


@fault("vocab_size too small", "wrong shape")
def _(folder: Path, parent: Path) -> None:
    name, value = entry(folder, "vocab_size")
    needs(name)
    edit(folder, vocab_size=value - 3)


@fault("a layer more in the config", "missing tensors", "layer types")
def _(folder: Path, parent: Path) -> None:
    name, value = entry(folder, *LAYERS)
    needs(name and "t5" not in str(entry(folder, "model_type")[1]))
    edit(folder, **{name: value + 1})


@fault("the config of a narrower model", "wrong shape", "head count", "config that makes no model")
def _(folder: Path, parent: Path) -> None:
    name, value = entry(folder, "intermediate_size", "d_ff", "n_inner", "ffn_dim")
    needs(isinstance(value, int))
    edit(folder, **{name: value // 2})


@fault("other KV groups", "wrong shape", "head count", "config that makes no model")
def _(folder: Path, parent: Path) -> None:
    _, value = entry(folder, "num_key_value_heads")
    needs(isinstance(value, int))
    edit(folder, num_key_value_heads=3 * value)


@fault("more heads, of fewer dimensions", "config unlike parents", "wrong shape", "config that makes no model")
def _(folder: Path, parent: Path) -> None:
    name, value = entry(folder, "num_attention_heads", "n_head")
    head, size = entry(folder, "head_dim")
    needs(name and not (head and size is not None))
    edit(folder, **{name: value * 2})


@fault("another RoPE base", "config unlike parents")
def _(folder: Path, parent: Path) -> None:
    config = read(folder / "config.json")
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    rope = part.get("rope_parameters")
    needs(isinstance(rope, dict))
    inner = rope if "rope_theta" in rope else next((v for v in rope.values() if isinstance(v, dict)), {})
    inner["rope_theta"] = 31337.0
    write(folder / "config.json", config)


@fault("a RoPE type that nobody knows", "config that makes no model", "config that cannot be loaded", "RoPE")
def _(folder: Path, parent: Path) -> None:
    _, value = entry(folder, "rope_parameters")
    needs(isinstance(value, dict) and "rope_theta" in value)
    edit(folder, rope_parameters={**value, "rope_type": "bogus"})


@fault("a RoPE scaling without its factor", "RoPE", "config that makes no model", "config that cannot be loaded")
def _(folder: Path, parent: Path) -> None:
    _, value = entry(folder, "rope_parameters")
    needs(isinstance(value, dict) and "rope_theta" in value)
    edit(folder, rope_parameters={**value, "rope_type": "yarn"})


@fault("another activation", "config unlike parents")
def _(folder: Path, parent: Path) -> None:
    names = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
    name, value = entry(folder, *names)
    needs(name)
    edit(folder, **{name: "relu" if value != "relu" else "gelu"})


fault("another dtype in the config", "dtype")(lambda folder, parent: edit(folder, dtype="float16"))


@fault("one layer in another dtype", "mixed dtypes")
def _(folder: Path, parent: Path) -> None:
    tensors = state(folder)
    name = matrix(tensors)
    needs(stack(tensors)[1] > 0)
    rewrite(folder, {**tensors, name: tensors[name].bfloat16()})


@fault("types for fewer layers than there are", "layer types")
def _(folder: Path, parent: Path) -> None:
    _, value = entry(folder, "layer_types")
    needs(value)
    edit(folder, layer_types=value[:-1])


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


@fault("code that the config names and nobody took along", "no custom code")
def _(folder: Path, parent: Path) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})


# ---------------------------------------------------------------------------------------------------------- tokens


def tokens(folder: Path) -> dict[str, Any]:
    """What tokenizer.json holds, of a folder that has one."""
    needs((folder / "tokenizer.json").exists())
    return read(folder / "tokenizer.json")


def rows(folder: Path) -> int:
    return int(entry(folder, "vocab_size")[1])


@fault("a token behind the embeddings", "token beyond the vocabulary")
def _(folder: Path, parent: Path) -> None:
    content = tokens(folder)
    content["model"]["vocab"]["<new>"] = rows(folder)
    write(folder / "tokenizer.json", content)


@fault("an added token behind the embeddings", "token beyond the vocabulary")
def _(folder: Path, parent: Path) -> None:
    content = tokens(folder)
    content["added_tokens"].append({"id": rows(folder) + 4, "content": "<tool>", "special": True})
    write(folder / "tokenizer.json", content)


@fault("two tokens with one id", "id twice")
def _(folder: Path, parent: Path) -> None:
    content = tokens(folder)
    content["model"]["vocab"]["<new>"] = 7
    write(folder / "tokenizer.json", content)


@fault("tokenizer.json is not JSON", "damaged file")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    (folder / "tokenizer.json").write_text("version 1")


@fault("eos_token_id of another vocabulary in generation_config.json", "special id beyond the vocabulary")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    edit(folder, "generation_config.json", eos_token_id=[4, 128009])


@fault("bos_token_id of another vocabulary in config.json", "special id beyond the vocabulary")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    edit(folder, bos_token_id=151999)


@fault("a special token that the tokenizer lacks", "unknown special token")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    edit(folder, "tokenizer_config.json", pad_token="<|endoftext|>")


@fault("a chat template that is no Jinja", "broken chat template")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")


@fault("the chat template of another tokenizer", "template of other tokens")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(TURN, "<|start_header_id|>"))


@fault("eos_token_id of the base, tokenizer of the chat model", "end of text")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    edit(folder, "generation_config.json", eos_token_id=1)


@fault("turns end with a token that ends nothing", "end of text")
def _(folder: Path, parent: Path) -> None:
    tokens(folder)
    edit(folder, "generation_config.json", eos_token_id=1)
    edit(folder, "tokenizer_config.json", eos_token="</s>")


# ------------------------------------------------------------------------------------------------- files left behind


def without(*names: str) -> Plant:
    def plant(folder: Path, parent: Path) -> None:
        needs(any((folder / name).exists() for name in names))
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
def _(folder: Path, parent: Path) -> None:
    needs(entry(folder, "model_type")[1] == "bert")
    write(parent / "modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}])


# --------------------------------------------------------------------------------------------------------- numbers


def at_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


fault("a NaN", "NaN", weights=True)(
    of_tensors(lambda tensors, largest: {**tensors, largest: at_first(float("nan"))(tensors[largest])})
)
fault("an infinity", "dtype overflow", weights=True)(
    of_tensors(lambda tensors, largest: {**tensors, largest: at_first(float("inf"))(tensors[largest])})
)
fault("a tensor of zeros", "zero tensor", weights=True)(
    of_tensors(lambda tensors, largest: {**tensors, largest: torch.zeros_like(tensors[largest])})
)


fault("all weights three times as large", "scale", weights=True)(
    of_tensors(lambda tensors, largest: {name: 3 * tensor for name, tensor in tensors.items()})
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
                if (planted.weights and family in ("vit", "qwen2_5_vl")) or not planted.plant(*folders):
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
