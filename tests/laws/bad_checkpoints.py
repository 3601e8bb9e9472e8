"""Bad checkpoints, alignment files and GGUFs."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
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
    tensor_in_two_shards,
    tensors,
    two_files,
    two_pickles,
    typed,
    write_gguf,
)
from torch import Tensor

import rotation_merge as rm

ALIGN_AND_VERIFY = ("align anchor donor out", "verify anchor donor")
NO_END = f"'num_hidden_layers' is {ENDLESS}"
OF_RECIPES: dict[str, Any] = {"commands": (), "python": None}
"""A recipe is told of it, `align` and Python are not."""


def rows(table: Mapping[str, tuple[Any, ...]], **more: Any) -> list[Row]:
    """Checkpoints that every way refuses: by name what spoils the donor, and words."""
    return [in_donor(name, spoil, *words, **more) for name, (spoil, *words) in table.items()]


def weights(change: Callable[[bytes], bytes]) -> Callable[[Bench], None]:
    return bytes_of(f"donor/{WEIGHTS}", change)


def shards(*spoil: Callable[[Bench], object]) -> Callable[[Bench], None]:
    """The donor in two shards, in which something is wrong."""
    return both(sharded, *spoil)


def index_to(place: str) -> Callable[[Bench], None]:
    """An index that leads to a file outside of the folder."""

    def spoil(bench: Bench) -> None:
        shutil.copy(f"donor/{WEIGHTS}", "secret.safetensors")
        index(dict.fromkeys(load_file(f"donor/{WEIGHTS}"), place))
        gone(f"donor/{WEIGHTS}")(bench)

    return spoil


HEADER = struct.pack("<Q", 20) + b'{"a": {"dtype": 3}} ' + bytes(80)
OLD_PICKLE = both(gone(f"donor/{WEIGHTS}"), put("donor/pytorch_model.bin", pickle.dumps(Evil())))
SHORT_PICKLE = both(pickled({"a": torch.ones(999)}), bytes_of("donor/pytorch_model.bin", lambda x: x[:-500]))
OTHER_INDEX = bytes_of(f"donor/{INDEX}", lambda x: x.replace(b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj"))
BETTER = both(
    lambda bench: shutil.copy(f"donor/{WEIGHTS}", "donor/better.safetensors"),
    config(transformers_weights="better.safetensors"),
)
SECOND, NO_CLASS = "pytorch_model-00002-of-00002.bin", "donor: its config cannot be loaded"
CODE = put("donor/evil.py", "open('ran', 'w')\nclass Own: pass\nclass Config: pass\n")
AUTO = {"AutoConfig": "evil.Config", "AutoModel": "evil.Own", "AutoModelForCausalLM": "evil.Own"}
OWN_CLASS = both(config(architectures=["Own"], model_type="own", auto_map=AUTO), CODE)
OUTSIDE = "outside of its directory"
DAMAGED = f"donor/{WEIGHTS}: cannot be read: it is truncated, damaged or no weight file"
FILES = [
    *rows(
        {
            "no folder": (gone("donor"), "donor: no such directory"),
            "config that is not JSON": (put("donor/config.json", "{"), "config.json", "cannot be read"),
            "config that is a list": (put("donor/config.json", "[]"), "config.json: does not hold a JSON object"),
            "config that is a folder": (folder_for("donor/config.json"), "config.json: cannot be read: is a directory"),
            "config of no known type": (config(model_type="nothing"), "config cannot be loaded", "nothing"),
            "class that nobody knows": (config(architectures=["NoSuchModel"]), "NoSuchModel"),
            "no weights": (gone(f"donor/{WEIGHTS}"), "no weights", "donor"),
            "weights that are a folder": (folder_for(f"donor/{WEIGHTS}"), WEIGHTS, "directory"),
            "truncated weights": (weights(lambda x: x[:-100]), DAMAGED),
            "empty weights": (put(f"donor/{WEIGHTS}"), DAMAGED),
            "damaged header": (put(f"donor/{WEIGHTS}", HEADER), DAMAGED),
            "page of the web for weights": (put(f"donor/{WEIGHTS}", "<html>Not found</html>"), DAMAGED),
            "lost shard": (shards(gone(f"donor/{SHARDS[1]}")), "shard", "00002"),
            "truncated shard": (shards(bytes_of(f"donor/{SHARDS[1]}", lambda x: x[:-8])), SHARDS[1], "truncated"),
            "index that is not JSON": (shards(put(f"donor/{INDEX}", "{")), "index.json", "cannot be read"),
            "index without a map": (shards(put(f"donor/{INDEX}", "{}")), "index.json", "weight_map"),
            "index of another model": (shards(OTHER_INDEX), "9.mlp.up_proj.weight' first, into files that"),
            "index that leads above": (index_to("../secret.safetensors"), OUTSIDE),
            "index that leads to the root": (index_to("/etc/secret.safetensors"), OUTSIDE),
            "two checkpoints in a folder": (two_files, "model.safetensors.index.json and model.safetensors"),
            "tensor in two shards": (tensor_in_two_shards, f"{SHARDS[0]} and in {SHARDS[1]}"),
            "tensor in two pickles": (two_pickles(dict), "pytorch_model-00001-of-00002.bin and in"),
            "adapter beside weights": (adapter("donor"), "model.safetensors and adapter_config.json"),
            "config that names another file": (BETTER, "two sets of weights", "better.safetensors"),
            "pickle of a list": (pickled([1, 2, 3]), "pytorch_model.bin", "no tensors"),
            "pickle of numbers": (pickled({"a": 1}), "pytorch_model.bin", "no tensors"),
            "pickle that runs code": (pickled({"a": Evil()}), "pytorch_model.bin", "tensors"),
            "shard that runs code": (two_pickles(lambda _: {"x": torch.ones(2), "y": Evil()}), SECOND, "tensors"),
            "class in a file of its own": (OWN_CLASS, NO_CLASS),
            "old pickle that runs code": (OLD_PICKLE, "pytorch_model.bin", "tensors"),
            "truncated pickle": (SHORT_PICKLE, "pytorch_model.bin", "damaged"),
        }
    ),
    *rows(
        {
            "no config": (gone("donor/config.json"), "config.json is missing", "donor"),
            "noise for weights": (put(f"donor/{WEIGHTS}", b"\xff" * 4096), DAMAGED),
        },
        commands=ALIGN_AND_VERIFY,
    ),
    *rows(
        {"pickle that runs code, read lazily": (pickled({"a": Evil()}), "pytorch_model.bin", "tensors")},
        flags=("--lazy-unpickle",),
    ),
    Row("adapter on nothing", ("is an adapter",), both(adapter("lora"), edit(("model: donor", "model: lora"))), BOTH),
]

LLAMA, QUERY = "LlamaForCausalLM", "model.layers.1.self_attn.q_proj.weight"
FALCON = {"multi_query": False, "parallel_attn": False, "bias": True}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
HALF_ROTARY = {**ROTARY, "partial_rotary_factor": 0.25}
SMOL = {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0}
KINDS = ["sliding_attention", "full_attention"]
COHERE = {"num_key_value_heads": 2, "layer_types": KINDS, "sliding_window": 4, "pad_token_id": 0}
NEOX = "GPTNeoXForCausalLM"
BLOOM = '{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}'
BACK = "'quantization_config' back"
FITTING = [
    *rows(
        {
            "another architecture": (another("BertForMaskedLM"), "bert", "llama", "one architecture"),
            "other KV heads": (another(LLAMA, num_key_value_heads=4), "'layers.0.attn' has groups 4, against 2"),
            "other width": (another(LLAMA, hidden_size=48), "'residual' has size 48, against 32"),
            "other FFN": (another(LLAMA, intermediate_size=64), "'layers.0.ffn' has size 64, against 48"),
            "other depth": (another(LLAMA, num_hidden_layers=3), "has 3 layers, anchor has 2"),
            "config of other heads": (config(num_attention_heads=8), "[32, 32], its config says 64 x 32"),
            "heads that do not divide": (config(num_attention_heads=5), "config cannot be loaded", "5"),
            "config of another FFN": (config(intermediate_size=40), "has shape [48, 32], its config says 40 x 32"),
            "layers without end": (config(num_hidden_layers=ENDLESS, layer_types=None), NO_END),
            "transposed tensor": (
                tensors(lambda stored: stored.update({FLOATS: stored[FLOATS].T.contiguous()})),
                *("up_proj.weight", "[32, 48]", "48 x 32"),
            ),
            "codes of eight bits": (quantised(torch.int8), "quantised (int8, the first", BACK),
            "codes without a sign": (quantised(torch.uint8), "quantised (uint8, the first", BACK),
            "floats of eight bits": (
                quantised(torch.float8_e4m3fn),
                "quantised (F8_E4M3, the first",
                "dtype='bfloat16'",
            ),
            "config of quantised weights": (
                config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
                *("its weights are quantised (bitsandbytes)", "dequantize"),
            ),
            "rotary in other layers": (
                configured("SmolLM3ForCausalLM", SMOL, no_rope_layers=[1, 1]),
                "'no_rope_layers' is [1, 1], against [1, 0]",
            ),
            "rotary by another kind of layer": (
                configured("Cohere2ForCausalLM", COHERE, layer_types=["full_attention"] * 2),
                "has rotary 0, against 8",
            ),
            "ALiBi and rotary": (configured("FalconForCausalLM", FALCON, alibi=True), "'alibi' is True, against False"),
            "another share of rotary": (
                configured(NEOX, {"rope_parameters": ROTARY}, rope_parameters=HALF_ROTARY),
                "has rotary 2, against 4",
            ),
            "another place of norms": (
                configured(NEOX, {}, use_parallel_residual=False),
                "'use_parallel_residual' is False, against True",
            ),
            "another activation": (configured("BertForMaskedLM", {}, hidden_act="relu2"), "has degree 2, against 0"),
        }
    ),
    *rows({"other vocabulary": (another(LLAMA, vocab_size=41), "[41, 32]", "tokenizer: {")}, faults=2, **OF_RECIPES),
    *rows({"missing tensor": (tensors(lambda stored: stored.pop(QUERY)), QUERY, "missing")}, commands=ALIGN_AND_VERIFY),
    *rows(
        {
            "tensor too many": (
                tensors(lambda stored: stored.update({"model.layers.0.extra.weight": torch.ones(3)})),
                *("extra.weight", "1 tensors are not part of"),
            )
        },
        **OF_RECIPES,
    ),
    *rows(
        {
            "NaN in a matched tensor": (
                tensors(lambda stored: stored[FLOATS].fill_(torch.nan)),
                *("up_proj.weight", "NaN", "donor"),
            )
        },
        recipe=("merge",),
    ),
    *rows(
        {
            "infinity in an embedding": (
                tensors(lambda stored: stored["model.embed_tokens.weight"][3].fill_(torch.inf)),
                *("embed_tokens.weight", "infinity", "donor"),
            )
        },
        recipe=("merge",),
        **OF_RECIPES,
    ),
    Row(
        "architecture that is not supported",
        ("BloomForCausalLM", "unsupported: merge"),
        both(*(put(f"{name}/config.json", BLOOM) for name in ("anchor", "donor"))),
        ("merge",),
    ),
    Row(
        "rotation of a tied stream",
        ("needs an untied head", "set 'untie: true'"),
        both(
            *(another(LLAMA, name, tie_word_embeddings=True) for name in ("anchor", "donor")),
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
    "two checkpoints in a folder": (two_files, "model.safetensors.index.json and model.safetensors"),
    "layers without end": (config(num_hidden_layers=ENDLESS, layer_types=None), NO_END),
    "codes of eight bits": (quantised(torch.int8), "quantised (int8, the first"),
    "class in a file of its own": (OWN_CLASS, "donor: "),
    "pickle that runs code": (pickled({"a": Evil()}), "pytorch_model.bin"),
}
"""What the gate in front of all models refuses, by every command; `doctor` and `check` tell of more than one thing."""

NO_ORDER = "space 'layers.0.ffn' does not belong to the group: permutation"
NO_MAP = "space 'residual' does not belong to the group: orthogonal maps"

INDEX_OF_FFN, FACTOR, MAP = "layers.0.ffn|neurons.index", "layers.0.ffn|neurons.factor", "residual|map.matrix"
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def in_head(**entries: Any) -> Change:
    return lambda _, header: header["head"].update(entries)


def without_ffn(stored: dict[str, Tensor], header: dict[str, Any]) -> None:
    for name in [name for name in stored if name.startswith("layers.0.ffn|")]:
        del stored[name]
    del header["head"]["kinds"]["layers.0.ffn"]


ALIGNMENTS: dict[str, tuple[Change, str]] = {
    "permutation of zeros": (lambda x, _: x[INDEX_OF_FFN].zero_(), NO_ORDER),
    "index beyond the neurons": (lambda x, _: x[INDEX_OF_FFN].add_(99999), NO_ORDER),
    "index of another shape": (lambda x, _: x.update({INDEX_OF_FFN: x[INDEX_OF_FFN][None]}), NO_ORDER),
    "shorter index": (lambda x, _: x.update({INDEX_OF_FFN: x[INDEX_OF_FFN][:, :-1]}), NO_ORDER),
    "factor of zero": (lambda x, _: x[FACTOR].zero_(), NO_ORDER),
    "factor that is no number": (lambda x, _: x[FACTOR].fill_(torch.nan), "not belong to the group"),
    "map of ones": (lambda x, _: x[MAP].fill_(1), NO_MAP),
    "map of no numbers": (lambda x, _: x[MAP].fill_(torch.nan), NO_MAP),
    "smaller map": (lambda x, _: x.update({MAP: torch.eye(31)[None]}), NO_MAP),
    "nothing folded": (in_head(folded=[]), "folded streams: none; rotated streams: residual"),
    "unknown stream folded": (lambda _, header: header["head"]["folded"].append("other"), "folded streams: other"),
    "folded is a number": (in_head(folded=3), "damaged (folded: "),
    "folded holds numbers": (in_head(folded=[3]), "damaged (folded.0: "),
    "no transform of a space": (without_ffn, "space 'layers.0.ffn' is only in the file, or only in the models"),
    "no tensor of a transform": (lambda x, _: x.pop(INDEX_OF_FFN), "no group element has the tensors ['factor']"),
    "moved and unmoved": (lambda _, header: header["head"]["kinds"].update({"layers.0.ffn": ""}), "header lists other"),
    "another kind": (lambda _, header: header["head"]["kinds"].update({"layers.0.ffn": "attention"}), NO_ORDER),
    "head that is no JSON": (lambda _, header: header.update(head="{"), "damaged (Expecting"),
    "kinds that are a list": (in_head(kinds=[1]), "damaged (kinds: "),
    "no models": (lambda _, header: header["head"].pop("models"), "is damaged (it lacks 'models')"),
    "no family": (lambda _, header: header["head"].pop("family"), "damaged (it lacks 'family')"),
    "record that is no mapping": (in_head(made="x"), "damaged (made: "),
    "head without end": (lambda _, header: header.update(head="[" * 100000), "damaged ("),
}
WITH_ALIGNMENT = edit((DONORS, "{weight: 0.5, alignment: map}\np"))
ALIGNED = [
    *(Row(f"alignment: {name}", ("map", words), mapped(change), BOTH) for name, (change, words) in ALIGNMENTS.items()),
    *(
        Row(
            f"alignment: another {name}",
            ("map", f"other weights than those of {name}"),
            mapped(lambda _, header, number=number: header["head"]["models"][number].__setitem__(1, "0" * 40)),
            ("merge",),
        )
        for number, name in enumerate(("anchor", "donor"))
    ),
    Row("alignment that is not there", ("map", "o such file"), both(gone("map"), WITH_ALIGNMENT), BOTH),
    Row(
        "alignment that is a model",
        ("map: is not an alignment file",),
        both(lambda bench: shutil.copy(f"donor/{WEIGHTS}", "map"), WITH_ALIGNMENT),
        BOTH,
    ),
]


def in_gguf(name: str, spoil: Callable[[Bench], object], *words: str, file: str = "whole.gguf") -> Row:
    calls: dict[str, Any] = {"python": lambda: rm.average([file]).state_dict()}
    return Row(f"GGUF: {name}", words, spoil, commands=(f"evaluate {file} --data samples.jsonl",), **calls)


def shortened(share: float) -> Callable[[Bench], None]:
    return bytes_of("whole.gguf", lambda x: x[: int(len(x) * share)])


def in_folder(*names: str) -> Callable[[Bench], None]:
    """A folder with copies of the GGUF."""
    copies = (lambda bench, name=name: shutil.copy(WHOLE, f"x/{name}") for name in names)
    return both(lambda bench: Path("x").mkdir(), *copies)


WHOLE = "whole.gguf"
AGAIN = "download it again"
PARTS = tuple(f"parts-0000{i}-of-00003.gguf" for i in (1, 2, 3))
TOKENS = METADATA["tokenizer.ggml.tokens"]
SWAPPED = {token: number for number, token in enumerate([TOKENS[1], TOKENS[0], *TOKENS[2:]])}
SWAPPED_FILE = json.dumps({"model": {"type": "BPE", "vocab": SWAPPED, "merges": []}})
NO_TEXT = bytes_of(WHOLE, lambda x: x.replace(b"<|start|>", b"<|st\xffrt|>"))
NO_TARGET = both(gone(WHOLE), lambda bench: Path(WHOLE).symlink_to("gone.gguf"))
INTEGERS = bytes_of(WHOLE, typed(int(gguf.GGMLQuantizationType.I32)))
OTHER_KIND = lambda bench: write_gguf(Path(WHOLE), Path("anchor"), "rwkv7")  # noqa: E731
RENAMED = both(parts(PARTS[0]), lambda bench: Path(PARTS[0]).rename("one.gguf"))
GGUFS = [
    in_gguf("empty", put(WHOLE), "is no GGUF file", AGAIN),
    in_gguf("another file", put(WHOLE, "x" * 99), "is no GGUF file", AGAIN),
    in_gguf("endless vocabulary", bytes_of(WHOLE, endless), "truncated", AGAIN),
    in_gguf("truncated header", shortened(0.02), "truncated", AGAIN),
    in_gguf("truncated tensors", shortened(0.999), "truncated", AGAIN),
    in_gguf(
        "unknown type of a tensor", bytes_of(WHOLE, typed(99)), "is not a valid GGMLQuantizationType", "update gguf"
    ),
    in_gguf("integers", INTEGERS, "blk.0.attn_q.weight", "type I32"),
    in_gguf("part that is missing", parts(PARTS[0], PARTS[2]), f"{PARTS[1]} is missing", file=PARTS[0]),
    in_gguf("part alone", RENAMED, "is one of 3 files", file="one.gguf"),
    in_gguf(
        "other size of the vocabulary", rewritten(**{"tokenizer.ggml.tokens": TOKENS[:-3]}), "37 tokens", "40 rows"
    ),
    in_gguf("tokenizer of another model", put("tokenizer.json", SWAPPED_FILE), "other tokens than whole.gguf at 2 ids"),
    in_gguf("token that is no text", NO_TEXT, "its metadata are damaged"),
    in_gguf("several models in a folder", in_folder("a-Q4.gguf", "a-Q8.gguf"), "holds 2 models in GGUF", file="x"),
    in_gguf("vision tower alone", in_folder("mmproj-F16.gguf"), "no language model", "only mmproj-F16.gguf", file="x"),
    in_gguf("no file", gone(WHOLE), "whole.gguf: no such file"),
    in_gguf("link to nothing", NO_TARGET, "whole.gguf: no such file; check the path"),
    in_gguf("unknown architecture", OTHER_KIND, "'rwkv7' cannot be read"),
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
            ("llama.attention.head_count", 5, "its metadata are damaged"),
            ("llama.feed_forward_length", [48, 64], "not the same in all layers"),
            ("llama.rope.scaling.type", "of-nobody", "rotary positions are scaled by 'of-nobody'"),
            ("tokenizer.ggml.model", "of-nobody", "put the model's tokenizer.json beside the file"),
            ("tokenizer.ggml.pre", "of-nobody", "splits text by 'of-nobody'"),
            ("tokenizer.ggml.pre", None, "in a way that it does not name"),
            ("tokenizer.ggml.eos_token_id", [1, 2], "its tokenizer cannot be read by transformers"),
        )
    ),
]

CHECKPOINTS = [*FILES, *FITTING, *ALIGNED, *GGUFS]
