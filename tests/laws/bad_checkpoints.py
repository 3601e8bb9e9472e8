"""Bad checkpoints, alignment files and GGUFs."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from spoiling import (
    BOTH,
    DONORS,
    ENDLESS,
    FLOATS,
    INDEX,
    METADATA,
    SHARDS,
    WEIGHTS,
    Bench,
    Evil,
    Row,
    adapter,
    another,
    both,
    bytes_of,
    config,
    configured,
    edit,
    endless,
    folder_for,
    gone,
    in_donor,
    index,
    mapped,
    parts,
    pickled,
    put,
    quantised,
    rewritten,
    sharded,
    tensor_in_two_pickles,
    tensor_in_two_shards,
    tensors,
    two_files,
    typed,
    write_gguf,
)
from torch import Tensor

import rotation_merge as rm

ALIGN_AND_VERIFY = ("align anchor donor out", "verify anchor donor")
FILES = [
    in_donor("no folder", gone("donor"), "donor", "no such directory"),
    in_donor("no config", gone("donor/config.json"), "config.json is missing", "donor", commands=ALIGN_AND_VERIFY),
    in_donor("config that is not JSON", put("donor/config.json", "{"), "config.json", "cannot be read"),
    in_donor("config that is a list", put("donor/config.json", "[]"), "config.json", "JSON object"),
    in_donor("config that is a folder", folder_for("donor/config.json"), "config.json", "directory"),
    in_donor("config of no known type", config(model_type="nothing"), "donor", "config"),
    in_donor("class that nobody knows", config(architectures=["NoSuchModel"], model_type="none"), "donor"),
    in_donor("no weights", gone(f"donor/{WEIGHTS}"), "no weights", "donor"),
    in_donor("weights that are a folder", folder_for(f"donor/{WEIGHTS}"), WEIGHTS, "directory"),
    in_donor("truncated weights", bytes_of(f"donor/{WEIGHTS}", lambda x: x[:-100]), WEIGHTS, "ownload"),
    in_donor("empty weights", put(f"donor/{WEIGHTS}"), "donor", "ownload"),
    in_donor(
        "noise for weights", put(f"donor/{WEIGHTS}", b"\xff" * 4096), "donor", "ownload", commands=ALIGN_AND_VERIFY
    ),
    in_donor(
        "damaged header",
        put(f"donor/{WEIGHTS}", struct.pack("<Q", 20) + b'{"a": {"dtype": 3}} ' + bytes(80)),
        "ownload",
    ),
    in_donor("page of the web for weights", put(f"donor/{WEIGHTS}", "<html>Not found</html>"), "donor", "ownload"),
    in_donor("lost shard", both(sharded, gone(f"donor/{SHARDS[1]}")), "shard", "00002"),
    in_donor(
        "truncated shard", both(sharded, bytes_of(f"donor/{SHARDS[1]}", lambda x: x[:-8])), SHARDS[1], "truncated"
    ),
    in_donor("index that is not JSON", both(sharded, put(f"donor/{INDEX}", "{")), "index.json", "cannot be read"),
    in_donor("index without a map", both(sharded, put(f"donor/{INDEX}", "{}")), "index.json", "weight_map"),
    in_donor(
        "index of another model",
        both(
            sharded, bytes_of(f"donor/{INDEX}", lambda x: x.replace(b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj"))
        ),
        "mlp.up_proj",
    ),
    *(
        in_donor(
            f"index that leads to {place}",
            both(
                lambda bench: shutil.copy(f"donor/{WEIGHTS}", "secret.safetensors"),
                lambda bench, place=place: index(dict.fromkeys(load_file(f"donor/{WEIGHTS}"), place)),
                gone(f"donor/{WEIGHTS}"),
            ),
            "outside of its directory",
        )
        for place in ("../secret.safetensors", "/etc/secret.safetensors")
    ),
    in_donor("two checkpoints in a folder", two_files, "model.safetensors and model.safetensors.index.json"),
    in_donor("tensor in two shards", tensor_in_two_shards, f"{SHARDS[0]} and in {SHARDS[1]}"),
    in_donor("tensor in two pickles", tensor_in_two_pickles, "pytorch_model-00001-of-00002.bin and in"),
    in_donor("adapter beside weights", adapter("donor"), "model.safetensors and adapter_config.json"),
    in_donor(
        "config that names another file",
        both(
            lambda bench: shutil.copy(f"donor/{WEIGHTS}", "donor/better.safetensors"),
            config(transformers_weights="better.safetensors"),
        ),
        "better.safetensors",
    ),
    in_donor("pickle of a list", pickled([1, 2, 3]), "pytorch_model.bin", "no tensors"),
    in_donor("pickle of numbers", pickled({"a": 1}), "pytorch_model.bin", "no tensors"),
    in_donor("pickle that runs code", pickled({"a": Evil()}), "pytorch_model.bin", "tensors"),
    in_donor(
        "old pickle that runs code",
        both(gone(f"donor/{WEIGHTS}"), put("donor/pytorch_model.bin", pickle.dumps(Evil()))),
        "pytorch_model.bin",
        "tensors",
    ),
    in_donor(
        "pickle that runs code, read lazily",
        pickled({"a": Evil()}),
        "pytorch_model.bin",
        "tensors",
        flags=("--lazy-unpickle",),
    ),
    in_donor(
        "truncated pickle",
        both(pickled({"a": torch.ones(999)}), bytes_of("donor/pytorch_model.bin", lambda x: x[:-500])),
        "pytorch_model.bin",
        "damaged",
    ),
    Row("adapter on nothing", ("adapter",), both(adapter("lora"), edit(("model: donor", "model: lora"))), BOTH),
]

FALCON = {"multi_query": False, "parallel_attn": False, "bias": True}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
FITTING = [
    in_donor("another architecture", another("BertForMaskedLM"), "bert", "llama", "one architecture"),
    in_donor("other KV heads", another("LlamaForCausalLM", num_key_value_heads=4), "groups 4", "2"),
    in_donor("other width", another("LlamaForCausalLM", hidden_size=48), "48", "32"),
    in_donor("other FFN", another("LlamaForCausalLM", intermediate_size=64), "64", "48"),
    in_donor("other depth", another("LlamaForCausalLM", num_hidden_layers=3), "3", "2"),
    in_donor(
        "other vocabulary",
        another("LlamaForCausalLM", vocab_size=41),
        "41",
        "tokenizer",
        commands=(),
        python=None,
        faults=2,
    ),
    in_donor("config of other heads", config(num_attention_heads=8), "config"),
    in_donor("heads that do not divide", config(num_attention_heads=5), "donor", "5"),
    in_donor("config of another FFN", config(intermediate_size=40), "donor", "40"),
    in_donor(
        "layers without end", config(num_hidden_layers=ENDLESS, layer_types=None), f"'num_hidden_layers' is {ENDLESS}"
    ),
    in_donor(
        "transposed tensor",
        tensors(lambda stored: stored.update({FLOATS: stored[FLOATS].T.contiguous()})),
        "up_proj.weight",
        "[32, 48]",
        "48 x 32",
    ),
    in_donor(
        "missing tensor",
        tensors(lambda stored: stored.pop("model.layers.1.self_attn.q_proj.weight")),
        "layers.1.self_attn.q_proj.weight",
        "missing",
        commands=ALIGN_AND_VERIFY,
    ),
    in_donor(
        "tensor too many",
        tensors(lambda stored: stored.update({"model.layers.0.extra.weight": torch.ones(3)})),
        "extra.weight",
        "not part",
        commands=(),
        python=None,
    ),
    in_donor(
        "NaN in a matched tensor",
        tensors(lambda stored: stored[FLOATS].fill_(torch.nan)),
        "up_proj.weight",
        "NaN",
        "donor",
        recipe=("merge",),
    ),
    in_donor(
        "infinity in an embedding",
        tensors(lambda stored: stored["model.embed_tokens.weight"][3].fill_(torch.inf)),
        "embed_tokens.weight",
        "infinity",
        "donor",
        recipe=("merge",),
        commands=(),
        python=None,
    ),
    in_donor("codes of eight bits", quantised(torch.int8), "quantised (int8, the first", "'quantization_config' back"),
    in_donor(
        "codes without a sign", quantised(torch.uint8), "quantised (uint8, the first", "'quantization_config' back"
    ),
    in_donor(
        "floats of eight bits", quantised(torch.float8_e4m3fn), "quantised (F8_E4M3, the first", "dtype='bfloat16'"
    ),
    in_donor(
        "config of quantised weights",
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "its weights are quantised (bitsandbytes)",
        "dequantize",
    ),
    in_donor(
        "rotary in other layers",
        configured(
            "SmolLM3ForCausalLM",
            {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
            no_rope_layers=[1, 1],
        ),
        "against",
        "no_rope_layers",
    ),
    in_donor(
        "rotary by another kind of layer",
        configured(
            "Cohere2ForCausalLM",
            {
                "num_key_value_heads": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 4,
                "pad_token_id": 0,
            },
            layer_types=["full_attention"] * 2,
        ),
        "against",
        "rotary",
    ),
    in_donor("ALiBi and rotary", configured("FalconForCausalLM", FALCON, alibi=True), "against", "alibi"),
    in_donor(
        "another share of rotary",
        configured(
            "GPTNeoXForCausalLM", {"rope_parameters": ROTARY}, rope_parameters={**ROTARY, "partial_rotary_factor": 0.25}
        ),
        "against",
        "rotary",
    ),
    in_donor(
        "another place of norms",
        configured("GPTNeoXForCausalLM", {}, use_parallel_residual=False),
        "against",
        "use_parallel_residual",
    ),
    in_donor(
        "another activation",
        configured("BertForMaskedLM", {}, hidden_act="relu2"),
        "against",
        "degree",
    ),
    Row(
        "architecture that is not supported",
        ("BloomForCausalLM", "unsupported: merge"),
        both(
            *(
                put(f"{name}/config.json", '{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}')
                for name in ("anchor", "donor")
            )
        ),
        ("merge",),
    ),
    Row(
        "rotation of a tied stream",
        ("tied", "untie"),
        both(
            *(another("LlamaForCausalLM", name, tie_word_embeddings=True) for name in ("anchor", "donor")),
            edit(("delegate: linear", "delegate: linear\n  residual: rotation")),
        ),
        BOTH,
        ("align anchor donor out --residual rotation",),
        lambda: rm.align("anchor", "donor", residual="rotation"),
    ),
]

READERS = {
    "align": "align anchor donor out",
    "align --learn": "align anchor donor --learn --data samples.jsonl --alignment out",
    "align without OUT": "align anchor donor",
    "barrier": "barrier anchor donor --data synthetic",
    "carry": "carry donor --from anchor --to anchor out",
    "check": "check recipe.yml",
    "doctor": "doctor anchor anchor donor",
    "evaluate": "evaluate anchor donor --data samples.jsonl",
    "inspect": "inspect donor",
    "measure": "measure donor --data samples.jsonl --out out",
    "merge": "merge anchor donor out --data samples.jsonl",
    "polish": "polish anchor out --teachers anchor donor --data samples.jsonl",
    "verify": "verify anchor donor",
}
"""By command, a call that reads the donor."""

NO_READERS = {"demo", "lora", "push"}

EVERY_READER: dict[str, tuple[Callable[[Bench], object], str]] = {
    "two checkpoints in a folder": (two_files, "model.safetensors and model.safetensors.index.json"),
    "layers without end": (config(num_hidden_layers=ENDLESS, layer_types=None), f"'num_hidden_layers' is {ENDLESS}"),
    "codes of eight bits": (quantised(torch.int8), "quantised (int8, the first"),
}
"""What the gate in front of all models refuses, by every command; `doctor` and `check` tell of more than one thing."""

NO_ORDER = "space 'layers.0.ffn' does not belong to the group: permutation"
NO_MAP = "space 'residual' does not belong to the group: orthogonal maps"

ALIGNMENTS: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "permutation of zeros": (
        lambda x, _: x["layers.0.ffn|neurons.index"].zero_(),
        NO_ORDER,
    ),
    "index beyond the neurons": (lambda x, _: x["layers.0.ffn|neurons.index"].add_(99999), NO_ORDER),
    "index of another shape": (
        lambda x, _: x.update({"layers.0.ffn|neurons.index": x["layers.0.ffn|neurons.index"][None]}),
        NO_ORDER,
    ),
    "shorter index": (
        lambda x, _: x.update({"layers.0.ffn|neurons.index": x["layers.0.ffn|neurons.index"][:, :-1]}),
        NO_ORDER,
    ),
    "factor of zero": (lambda x, _: x["layers.0.ffn|neurons.factor"].zero_(), NO_ORDER),
    "factor that is no number": (
        lambda x, _: x["layers.0.ffn|neurons.factor"].fill_(torch.nan),
        "not belong to the group",
    ),
    "map of ones": (lambda x, _: x["residual|map.matrix"].fill_(1), NO_MAP),
    "map of no numbers": (
        lambda x, _: x["residual|map.matrix"].fill_(torch.nan),
        NO_MAP,
    ),
    "smaller map": (
        lambda x, _: x.update({"residual|map.matrix": torch.eye(31)[None]}),
        NO_MAP,
    ),
    "nothing folded": (lambda _, header: header["head"].update(folded=[]), "folded"),
    "unknown stream folded": (lambda _, header: header["head"]["folded"].append("other"), "folded"),
    "folded is a number": (lambda _, header: header["head"].update(folded=3), "damaged"),
    "folded holds numbers": (lambda _, header: header["head"].update(folded=[3]), "damaged"),
    "no transform of a space": (
        lambda x, header: (
            [x.pop(name) for name in list(x) if name.startswith("layers.0.ffn|")],
            header["head"]["kinds"].pop("layers.0.ffn"),
        ),
        "space 'layers.0.ffn' is only in the file, or only in the models",
    ),
    "no tensor of a transform": (lambda x, _: x.pop("layers.0.ffn|neurons.index"), "no group element"),
    "moved and unmoved": (lambda _, header: header["head"]["kinds"].update({"layers.0.ffn": ""}), "damaged"),
    "another kind": (
        lambda _, header: header["head"]["kinds"].update({"layers.0.ffn": "attention"}),
        NO_ORDER,
    ),
    "head that is no JSON": (lambda _, header: header.update(head="{"), "damaged"),
    "kinds that are a list": (lambda _, header: header["head"].update(kinds=[1]), "damaged"),
    "no models": (lambda _, header: header["head"].pop("models"), "is damaged (it lacks 'models')"),
    "no family": (lambda _, header: header["head"].pop("family"), "damaged"),
    "record that is no mapping": (lambda _, header: header["head"].update(made="x"), "damaged"),
    "head without end": (lambda _, header: header.update(head="[" * 100000), "damaged"),
}
WITH_ALIGNMENT = edit((DONORS, "{weight: 0.5, alignment: map}\np"))
ALIGNED = [
    *(Row(f"alignment: {name}", ("map", words), mapped(change), BOTH) for name, (change, words) in ALIGNMENTS.items()),
    *(
        Row(
            f"alignment: another {name}",
            ("map", "other weights"),
            mapped(lambda _, header, number=number: header["head"]["models"][number].__setitem__(1, "0" * 40)),
            ("merge",),
        )
        for number, name in enumerate(("anchor", "donor"))
    ),
    Row("alignment that is not there", ("map", "o such file"), both(gone("map"), WITH_ALIGNMENT), BOTH),
    Row(
        "alignment that is a model",
        ("map", "alignment"),
        both(lambda bench: shutil.copy(f"donor/{WEIGHTS}", "map"), WITH_ALIGNMENT),
        BOTH,
    ),
]


def in_gguf(name: str, spoil: Callable[[Bench], object], *words: str, file: str = "whole.gguf") -> Row:
    return Row(
        f"GGUF: {name}",
        words,
        spoil,
        python=lambda: rm.average([file]).state_dict(),
        commands=(f"evaluate {file} --data samples.jsonl",),
    )


def shortened(share: float) -> Callable[[Bench], None]:
    return bytes_of("whole.gguf", lambda x: x[: int(len(x) * share)])


WHOLE = "whole.gguf"
PARTS = tuple(f"parts-0000{i}-of-00003.gguf" for i in (1, 2, 3))
TOKENS = METADATA["tokenizer.ggml.tokens"]
SWAPPED = {token: number for number, token in enumerate([TOKENS[1], TOKENS[0], *TOKENS[2:]])}
GGUFS = [
    in_gguf("empty", put(WHOLE), "is no GGUF file", "download it again"),
    in_gguf("another file", put(WHOLE, "x" * 99), "is no GGUF file", "download it again"),
    in_gguf("endless vocabulary", bytes_of(WHOLE, endless), "truncated", "download it again"),
    in_gguf("truncated header", shortened(0.02), "truncated", "download it again"),
    in_gguf("truncated tensors", shortened(0.999), "truncated", "download it again"),
    in_gguf(
        "unknown type of a tensor", bytes_of(WHOLE, typed(99)), "is not a valid GGMLQuantizationType", "update gguf"
    ),
    in_gguf("integers", bytes_of(WHOLE, typed(int(gguf.GGMLQuantizationType.I32))), "blk.0.attn_q.weight", "type I32"),
    in_gguf("part that is missing", parts(PARTS[0], PARTS[2]), f"{PARTS[1]} is missing", file=PARTS[0]),
    in_gguf(
        "part alone",
        both(parts(PARTS[0]), lambda bench: Path(PARTS[0]).rename("one.gguf")),
        "is one of 3 files",
        file="one.gguf",
    ),
    in_gguf(
        "another size of the vocabulary",
        rewritten(**{"tokenizer.ggml.tokens": TOKENS[:-3]}),
        "has 37 tokens, its embedding 40 rows",
    ),
    in_gguf(
        "tokenizer of another model",
        put("tokenizer.json", json.dumps({"model": {"type": "BPE", "vocab": SWAPPED, "merges": []}})),
        "has other tokens than whole.gguf at 2 ids",
    ),
    in_gguf(
        "token that is no text",
        bytes_of(WHOLE, lambda x: x.replace(b"<|start|>", b"<|st\xffrt|>")),
        "its metadata are damaged",
    ),
    in_gguf(
        "several models in a folder",
        both(
            *(
                lambda bench, name=name: (Path("x").mkdir(exist_ok=True), shutil.copy(WHOLE, f"x/{name}"))
                for name in ("a-Q4.gguf", "a-Q8.gguf")
            )
        ),
        "holds 2 models in GGUF",
        file="x",
    ),
    in_gguf(
        "vision tower alone",
        lambda bench: (Path("x").mkdir(), shutil.copy(WHOLE, "x/mmproj-F16.gguf")),
        "holds no language model in GGUF, only mmproj-F16.gguf",
        file="x",
    ),
    in_gguf("no file", gone(WHOLE), "no such file"),
    in_gguf("link to nothing", both(gone(WHOLE), lambda bench: Path(WHOLE).symlink_to("gone.gguf")), "check the path"),
    in_gguf(
        "unknown architecture", lambda bench: write_gguf(Path(WHOLE), Path("anchor"), "rwkv7"), "'rwkv7' cannot be read"
    ),
    *(
        in_gguf(f"{key} {value}", rewritten(**{key: value}), words)
        for key, value, words in (
            ("general.type", "imatrix", "is of type 'imatrix'"),
            ("general.type", "adapter", "in peft's format"),
            ("general.type", "mmproj", "not a language model"),
            ("llama.block_count", None, "'llama.block_count' is None, which is no size"),
            ("llama.block_count", 2_000_000_000, "'num_hidden_layers' is 2000000000 in config.json, but"),
            ("llama.block_count", 0, "'llama.block_count' is 0, which is no size"),
            ("llama.block_count", "two", "'llama.block_count' is 'two', which is no size"),
            ("llama.expert_count", 2_000_000_000, "has no place in a MixtralForCausalLM"),
            ("llama.attention.head_count", 5, "download it again"),
            ("llama.feed_forward_length", [48, 64], "not the same in all layers"),
            ("llama.rope.scaling.type", "of-nobody", "'of-nobody'"),
            ("tokenizer.ggml.model", "of-nobody", "put the model's tokenizer.json beside the file"),
            ("tokenizer.ggml.pre", "of-nobody", "'of-nobody'"),
            ("tokenizer.ggml.pre", None, "in a way that it does not name"),
            ("tokenizer.ggml.eos_token_id", [1, 2], "its tokenizer cannot be read by transformers"),
        )
    ),
]

CHECKPOINTS = [*FILES, *FITTING, *ALIGNED, *GGUFS]
