"""Bad checkpoints and alignment files."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bad_ggufs import GGUFS
from faults_support import in_two_shards, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spoiling import (
    BOTH,
    DONORS,
    WEIGHTS,
    Row,
    Step,
    adapter,
    another,
    both,
    bytes_of,
    call,
    config,
    copied,
    edit,
    folder_for,
    gone,
    in_donor,
    in_folder,
    put,
    step,
    tensors,
)
from torch import Tensor

import rotation_merge as rm

ALIGN_AND_VERIFY = ("align anchor donor out", "verify anchor donor")
ENDLESS = 400_000_000
NO_END = f"'num_hidden_layers' is {ENDLESS}"
FLOATS = "model.layers.0.mlp.up_proj.weight"
OF_RECIPES: dict[str, Any] = {"commands": (), "python": None}
"""A recipe is told of it, `align` and Python are not."""


def rows(table: Mapping[str, tuple[Any, ...]], **more: Any) -> list[Row]:
    """Checkpoints that every way refuses: by name what spoils the donor, and words."""
    return [in_donor(name, spoil, *words, **more) for name, (spoil, *words) in table.items()]


# --- files -------------------------------------------------------------------------------------------------------

ANCHOR = f"anchor/{WEIGHTS}"
DONOR, PICKLE, INDEX = f"donor/{WEIGHTS}", "donor/pytorch_model.bin", f"donor/{WEIGHTS}.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@step
def index(place: str) -> None:
    """An index that says of every tensor that it lies in one file."""
    places = dict.fromkeys(load_file(DONOR), place)
    Path(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def shards(*spoil: Step) -> Step:
    """The donor in two shards, in which something is wrong."""
    return both(in_folder(lambda: rewrite(load_file(WEIGHTS), SHARDS)), gone(DONOR), *spoil)


def pickled(content: Any) -> Step:
    """A pickle in the place of the donor's weights."""
    return both(gone(DONOR), lambda: torch.save(content, PICKLE))


@step
def two_pickles(second: Callable[[dict[str, Tensor]], dict[str, Any]]) -> None:
    """The donor in one pickle, and another one beside it, from which the index takes its first entry."""
    stored = load_file(DONOR)
    Path(DONOR).unlink()
    parts = {f"pytorch_model-0000{number}-of-00002.bin": part for number, part in ((1, stored), (2, second(stored)))}
    for name, part in parts.items():
        torch.save(part, f"donor/{name}")
    first, last = parts
    places = dict.fromkeys(stored, first) | {min(parts[last]): last}
    Path(f"{PICKLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


OLD_PICKLE = both(gone(DONOR), put(PICKLE, pickle.dumps(Evil())))
SHORT_PICKLE = both(pickled({"a": torch.ones(999)}), bytes_of(PICKLE, lambda x: x[:-500]))
OTHER_INDEX = bytes_of(INDEX, lambda x: x.replace(b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj"))
TWO_FILES = both(copied(DONOR, "whole"), shards(), copied("whole", DONOR))
BETTER = both(copied(DONOR, "donor/better.safetensors"), config(transformers_weights="better.safetensors"))
CODE = put("donor/evil.py", "open('ran', 'w')\nclass Own: pass\nclass Config: pass\n")
AUTO = {"AutoConfig": "evil.Config", "AutoModel": "evil.Own", "AutoModelForCausalLM": "evil.Own"}
OWN_CLASS = both(config(architectures=["Own"], model_type="own", auto_map=AUTO), CODE)
OUTSIDE = "outside of its directory"
DAMAGED = f"{DONOR}: cannot be read: it is truncated, damaged or no weight file"
FILES = [
    *rows(
        {
            "no folder": (gone("donor"), "donor: no such directory"),
            "config that is not JSON": (put("donor/config.json", "{"), "config.json", "cannot be read"),
            "config that is a list": (put("donor/config.json", "[]"), "config.json: does not hold a JSON object"),
            "config that is a folder": (folder_for("donor/config.json"), "config.json: cannot be read: is a directory"),
            "config of no known type": (config(model_type="nothing"), "config cannot be loaded", "nothing"),
            "class that nobody knows": (config(architectures=["NoSuchModel"]), "NoSuchModel"),
            "no weights": (gone(DONOR), "no weights", "donor"),
            "weights that are a folder": (folder_for(DONOR), WEIGHTS, "directory"),
            "truncated weights": (bytes_of(DONOR, lambda x: x[:-100]), DAMAGED),
            "empty weights": (put(DONOR), DAMAGED),
            "page of the web for weights": (put(DONOR, "<html>Not found</html>"), DAMAGED),
            "lost shard": (shards(gone(f"donor/{SHARDS[1]}")), "shard", "00002"),
            "truncated shard": (shards(bytes_of(f"donor/{SHARDS[1]}", lambda x: x[:-8])), SHARDS[1], "truncated"),
            "index that is not JSON": (shards(put(INDEX, "{")), "index.json", "cannot be read"),
            "index without a map": (shards(put(INDEX, "{}")), "index.json", "weight_map"),
            "index of another model": (shards(OTHER_INDEX), "9.mlp.up_proj.weight' first, into files that"),
            "index that leads above": (both(index("../secret.safetensors"), gone(DONOR)), OUTSIDE),
            "index that leads to the root": (both(index("/etc/secret.safetensors"), gone(DONOR)), OUTSIDE),
            "two checkpoints in a folder": (TWO_FILES, "model.safetensors.index.json and model.safetensors"),
            "tensor in two shards": (shards(in_folder(in_two_shards)), f"{SHARDS[0]} and in {SHARDS[1]}"),
            "tensor in two pickles": (two_pickles(dict), "pytorch_model-00001-of-00002.bin and in"),
            "adapter beside weights": (adapter("donor"), "model.safetensors and adapter_config.json"),
            "config that names another file": (BETTER, "two sets of weights", "better.safetensors"),
            "pickle of a list": (pickled([1, 2, 3]), "pytorch_model.bin", "no tensors"),
            "pickle of numbers": (pickled({"a": 1}), "pytorch_model.bin", "no tensors"),
            "pickle that runs code": (pickled({"a": Evil()}), "pytorch_model.bin", "tensors"),
            "shard that runs code": (two_pickles(lambda _: {"x": torch.ones(2), "y": Evil()}), "00002.bin", "tensors"),
            "class in a file of its own": (OWN_CLASS, "donor: ", "its config cannot be loaded"),
            "old pickle that runs code": (OLD_PICKLE, "pytorch_model.bin", "tensors"),
            "truncated pickle": (SHORT_PICKLE, "pytorch_model.bin", "damaged"),
        }
    ),
    in_donor("no config", gone("donor/config.json"), "config.json is missing", "donor", commands=ALIGN_AND_VERIFY),
    in_donor("pickle that runs code, lazily", pickled({"a": Evil()}), ".bin", "tensors", flags=("--lazy-unpickle",)),
    Row("adapter on nothing", ("is an adapter",), both(adapter("lora"), edit("model: donor", "model: lora")), BOTH),
]

# --- models that do not fit --------------------------------------------------------------------------------------


def change(name: str, to: Callable[[Tensor], Tensor]) -> Step:
    return tensors(lambda stored: stored.update({name: to(stored[name])}))


def configured(kind: str, common: dict[str, Any], **change: Any) -> Step:
    """Two models of a class, the donor's config another one than that of its weights."""
    return both(*(another(kind, folder, **common) for folder in ("anchor", "donor")), config(**change))


def quantised(dtype: torch.dtype) -> Step:
    """Codes in the place of numbers; the config does not tell."""
    return tensors(lambda stored: stored.update({n: (10 * x).to(dtype) for n, x in stored.items() if x.ndim == 2}))


NO_NUMBER = ("would hold NaN or infinity", "weight'")
LLAMA, QUERY = "LlamaForCausalLM", "model.layers.1.self_attn.q_proj.weight"
FALCON = "FalconForCausalLM", {"multi_query": False, "parallel_attn": False, "bias": True}
NEOX = "GPTNeoXForCausalLM", {}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
SMOL = "SmolLM3ForCausalLM", {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
COHERE = "Cohere2ForCausalLM", {"num_key_value_heads": 2, **KINDS, "pad_token_id": 0}
FINE = {"id2label": {"0": "bad", "1": "fine"}, "label2id": {"bad": 0, "fine": 1}}
BLOOM = '{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}'
CODES = {"quant_method": "bitsandbytes", "load_in_8bit": True}
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
            "transposed tensor": (change(FLOATS, lambda x: x.T.contiguous()), "up_proj.weight", "[32, 48]", "48 x 32"),
            "codes of eight bits": (quantised(torch.int8), "quantised (int8, the first", BACK),
            "codes without a sign": (quantised(torch.uint8), "quantised (uint8, the first", BACK),
            "floats of eight bits": (quantised(torch.float8_e4m3fn), "quantised (F8_E4M3, the", "dtype='bfloat16'"),
            "config of quantised weights": (config(quantization_config=CODES), "(bitsandbytes)", "dequantize"),
            "rotary in other layers": (
                configured(*SMOL, no_rope_layers=[1, 1]),
                "'no_rope_layers' is [1, 1], against [1, 0]",
            ),
            "rotary by another kind of layer": (
                configured(*COHERE, layer_types=["full_attention"] * 2),
                "rotary 0, against 8",
            ),
            "ALiBi and rotary": (configured(*FALCON, alibi=True), "'alibi' is True, against False"),
            "another share of rotary": (
                configured(
                    NEOX[0], {"rope_parameters": ROTARY}, rope_parameters={**ROTARY, "partial_rotary_factor": 0.25}
                ),
                "has rotary 2, against 4",
            ),
            "another place of norms": (
                configured(*NEOX, use_parallel_residual=False),
                "'use_parallel_residual' is False, against",
            ),
            "other names of classes": (
                configured("BertForSequenceClassification", {"id2label": {0: "bad", 1: "good"}}, **FINE),
                "'id2label' is ('bad', 'fine')",
            ),
            "another activation": (configured("BertForMaskedLM", {}, hidden_act="relu2"), "has degree 2, against 0"),
        }
    ),
    *rows(
        {
            "another factor of the embedding": (
                config(model_type="granite", architectures=["GraniteForCausalLM"], embedding_multiplier=12.0),
                "'embedding_multiplier' is 12.0, against 1.0",
            ),
            "another window": (
                config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16),
                "'sliding_window' is 16, against None",
            ),
            "activation of another kind": (
                config(model_type="mistral", architectures=["MistralForCausalLM"], hidden_act="gelu"),
                "'hidden_act' is 'gelu', against 'silu'",
            ),
        },
        **OF_RECIPES,
    ),
    in_donor("other vocabulary", another(LLAMA, vocab_size=41), "[41, 32]", "tokenizer: {", faults=2, **OF_RECIPES),
    in_donor("missing tensor", tensors(lambda stored: stored.pop(QUERY)), QUERY, "missing", commands=ALIGN_AND_VERIFY),
    in_donor(
        "tensor too many",
        tensors(lambda stored: stored.update({"model.layers.0.extra.weight": torch.ones(3)})),
        *("extra.weight", "1 tensors are not part of"),
        **OF_RECIPES,
    ),
    in_donor(
        "NaN in a tensor", change(FLOATS, lambda x: x.fill_(torch.nan)), "up_proj.weight", "NaN", recipe=("merge",)
    ),
    in_donor(
        "infinity in an embedding",
        change("model.embed_tokens.weight", lambda x: x.fill_(torch.inf)),
        *("embed_tokens.weight", "infinity", "donor"),
        **{**OF_RECIPES, "recipe": ("merge",)},
    ),
    *(
        Row(
            f"NaN in {place}, {option}",
            (place.partition("/")[0], f"tensor '{name}'", "holds NaN"),
            both(
                tensors(lambda stored, name=name: stored[name].view(-1)[3].fill_(torch.nan), place),
                edit("delegate: linear", f"delegate: linear\n  {option}"),
            ),
            ("merge",),
        )
        for place, name, option in (
            (ANCHOR, FLOATS, "heads: none"),
            (ANCHOR, "model.norm.weight", "residual: permutation"),
            (ANCHOR, "model.embed_tokens.weight", "anchor: mean"),
            (DONOR, FLOATS, "residual: permutation"),
        )
    ),
    Row(
        "weights that add up to nothing in one layer",
        NO_NUMBER,
        edit(DONORS, "{weight: [{filter: layers.1, value: -0.5}, {value: 0.5}]}\np"),
        ("merge",),
    ),
    Row(
        "a type that cannot hold the values",
        (FLOATS, *NO_NUMBER),
        both(
            change(FLOATS, lambda x: 1e6 * x),
            edit("delegate: linear", "delegate: linear\n  scaling: false"),
            edit("dtype:", "out_dtype: float16\ndtype:"),
        ),
        ("merge",),
    ),
    Row(
        "architecture that is not supported",
        ("BloomForCausalLM", "unsupported: merge"),
        both(*(put(f"{name}/config.json", BLOOM) for name in ("anchor", "donor"))),
        ("merge",),
    ),
    Row(
        "head that differs from the embedding to which its config ties it",
        ("'lm_head.weight' is missing, donor has it", "set 'untie: true'"),
        both(another(LLAMA, "anchor", tie_word_embeddings=True), config(tie_word_embeddings=True)),
        BOTH,
    ),
    Row(
        "rotation of a tied stream",
        ("needs an untied head", "set 'untie: true'"),
        both(
            *(another(LLAMA, name, tie_word_embeddings=True) for name in ("anchor", "donor")),
            edit("delegate: linear", "delegate: linear\n  residual: rotation"),
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

OF_THE_GATE = (
    *("two checkpoints in a folder", "layers without end", "codes of eight bits", "class in a file of its own"),
    "pickle that runs code",
)
EVERY_READER = {row.name: (row.spoil, row.words[0]) for row in (*FILES, *FITTING) if row.name in OF_THE_GATE}
"""What the gate in front of all models refuses, by every command; `doctor` and `check` tell of more than one thing."""

# --- adapters ------------------------------------------------------------------------------------------------------

ENTRIES, FACTORS = "lora/adapter_config.json", "lora/adapter_model.safetensors"
PLACE = "base_model.model.model.layers.0.mlp.up_proj.lora_"
entries = partial(config, "lora", "adapter_config.json")


def without(factor: str) -> Step:
    return tensors(lambda stored: stored.pop(f"{PLACE}{factor}.weight"), FACTORS)


def with_tensor(name: str, *shape: int) -> Step:
    return tensors(lambda stored: stored.update({name: torch.ones(shape)}), FACTORS)


SPOILT: dict[str, tuple[Step, str]] = {
    "no LoRA": (entries(peft_type="IA3"), "IA3"),
    "pissa": (entries(init_lora_weights="pissa_niter_4"), "pissa"),
    "single tokens": (entries(trainable_token_indices=[1]), "trainable_token_indices"),
    "routed": (entries(arrow_config={"top_k": 2}), "arrow_config"),
    "no alpha": (entries(lora_alpha=None), "lora_alpha"),
    "alpha is a list": (entries(lora_alpha=[1]), "lora_alpha"),
    "patterns are a list": (entries(alpha_pattern=["q_proj"]), "alpha_pattern"),
    "an open bracket": (entries(alpha_pattern={"(q_proj": 1}), "alpha_pattern"),
    "no config": (gone(ENTRIES), "adapter_config.json"),
    "config is a list": (put(ENTRIES, "[]"), "JSON object"),
    "no weights": (gone(FACTORS), "adapter_model.safetensors"),
    "truncated": (bytes_of(FACTORS, lambda content: content[:-10]), "cannot be read"),
    "empty": (tensors(dict.clear, FACTORS), "no tensors"),
    "no B": (without("B"), "up_proj"),
    "no A": (without("A"), "up_proj"),
    "ranks differ": (with_tensor(f"{PLACE}B.weight", 48, 3), "[48, 3]"),
    "magnitudes of another size": (with_tensor(f"{PLACE}magnitude_vector", 47), "[47]"),
    "a number": (with_tensor(f"{PLACE}B.weight"), "up_proj"),
    "another size": (with_tensor(f"{PLACE}B.weight", 47, 2), "[47, 32]"),
    "another model": (with_tensor("base_model.model.v.weight", 2), "'v.weight'"),
    "foreign": (with_tensor(f"{PLACE}E", 3), "lora_E"),
    "whole, another size": (with_tensor("base_model.model.lm_head.weight", 41, 32), "[41, 32]"),
}
"""What makes an adapter damaged, or more than W + s B A, and a word of its line."""

OF_DONOR = adapter("lora", "donor")
ELSEWHERE = "is an adapter of donor, not of anchor"
ON_ANCHOR: dict[str, Step] = {
    "model": edit("model: donor", "model: anchor+lora"),
    "base_model": edit(
        "base_model: anchor\nmodels:\n  - model: anchor", "base_model: anchor+lora\nmodels:\n  - model: anchor+lora"
    ),
    "finetuned_from": both(
        edit(DONORS, "{weight: 0.5, finetuned_from: anchor+lora}\np"),
        edit("delegate: linear", "delegate: task_arithmetic"),
    ),
}
"""Where a recipe names an adapter of another base."""
ADAPTERS = [
    *(
        Row(
            f"adapter: {name}",
            (word,),
            both(OF_DONOR, spoil, edit("model: donor", "model: donor+lora")),
            BOTH,
            ("verify donor donor+lora",),
        )
        for name, (spoil, word) in SPOILT.items()
    ),
    *(
        Row(f"adapter of another base: {name}", (ELSEWHERE,), both(OF_DONOR, place), BOTH)
        for name, place in ON_ANCHOR.items()
    ),
    *(
        call(READERS[name].replace("donor", "anchor+lora"), ELSEWHERE, spoil=OF_DONOR)
        for name in ("align", "align --learn", "barrier", "evaluate", "measure", "polish", "verify")
    ),
]

# --- alignment files ---------------------------------------------------------------------------------------------

WITH_ALIGNMENT = edit(DONORS, "{weight: 0.5, alignment: map}\np")


def mapped(change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Step:
    """The recipe takes the donor's transforms from a file, in which something is wrong.

    Args:
        change: is given the tensors and the entries of the header, `head` parsed.
    """

    def spoil() -> None:
        with safe_open("map", "pt") as file:
            stored, header = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
        entries = {**header, "head": json.loads(header["head"])}
        change(stored, entries)
        header = {name: value if isinstance(value, str) else json.dumps(value) for name, value in entries.items()}
        save_file({name: x.contiguous() for name, x in stored.items()}, "map", header)

    return both(spoil, WITH_ALIGNMENT)


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
    "class twice": (in_head(rows={"lm_head.weight": [0, [0, 0]]}), "'lm_head.weight' loses classes"),
    "figure that is no number": (lambda _, header: header["head"]["figures"][0][0].update(seconds=math.nan), "finite"),
    "another family": (in_head(family="vit"), "was made for vit models, not for llama"),
    "another version": (lambda _, header: header.update(format="rotation_merge.alignment.1"), "another version"),
}
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
    Row(
        "alignment of layers without end",
        (f"map: its config says {ENDLESS} layers",),
        mapped(lambda _, header: header["head"]["config"].update(num_hidden_layers=ENDLESS)),
        python=lambda: rm.Alignment.load("map"),
    ),
    Row("alignment that is not there", ("map", "o such file"), both(gone("map"), WITH_ALIGNMENT), BOTH),
    Row("alignment that is a model", ("map: is not an al",), both(copied(DONOR, "map"), WITH_ALIGNMENT), BOTH),
]

CHECKPOINTS = [*FILES, *FITTING, *ADAPTERS, *ALIGNED, *GGUFS]
