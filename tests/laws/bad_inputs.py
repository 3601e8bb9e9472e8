"""The table of bad inputs: how each is made from good ones, how it is given, and what its one line holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from bad_checkpoints import CHECKPOINTS, CODE, EVERY_READER, READERS, WITH_ALIGNMENT, index
from bad_recipes import RECIPES
from safetensors.torch import load_file
from spoiling import WEIGHTS, Row, Step, adapter, another, both, call, config, edit, model, put, python, tokenizer

import rotation_merge as rm

STATISTICS = "donor/statistics.safetensors"
OUTPUTS = [
    *(
        Row(f"output {out}", (words,), recipe=("merge",), out=out)
        for out, words in {
            "file/out": "file: a file stands in the way",
            "file": "file: is a file, which is in the way",
            "donor": "donor: is one of the inputs",
            "donor/out": "donor/out: is inside one of the inputs",
            ".": ".: holds one of the inputs",
            "/proc/none/out": "/proc/none/out: cannot be written",
        }.items()
    ),
    call("align anchor donor /proc/none/out", "/proc/none/out: cannot be written"),
    call("align anchor donor donor", "donor: is one of the inputs"),
    *(call(f"{line} ''", "no such directory") for line in ("align anchor donor", "align anchor donor --alignment")),
    call("barrier anchor donor --data self --save ''", "no such directory"),
    call("align anchor donor recipe.yml", "recipe.yml: is a file, which is in the way", "--force"),
    call("align anchor donor vit", "vit: already exists", "--force"),
    call("align anchor donor --alignment file", "file: already exists", "--force"),
    call("align anchor donor --learn --data demo:python --alignment file", "file: already exists", "--force"),
    call("measure anchor --data self --out file", "file: already exists", "--force"),
    call("measure donor --data self", f"{STATISTICS}: is inside one of the inputs", spoil=put(STATISTICS, "[]")),
    call("carry anchor vit --from anchor --to donor", "vit: already exists", "--force"),
    call("polish anchor vit --teachers donor", "vit: already exists", "--force"),
    call("barrier anchor donor --data self --save list", "list/barrier.json: already exists", "--force"),
    call("barrier anchor donor --data self --plot plot.svg", "plot.svg: already exists", "--force"),
]

NAMES = re.compile(r"\b(anchor|donor|recipe\.yml)\b")
NOWHERE = {
    **{line.split()[0]: NAMES.sub("nowhere", line.partition(" ")[2]) for line in READERS.values()},
    "lora": "nowhere nowhere out",
    "push": "nowhere org/name",
    "demo": "--only nowhere",
}
"""Every command, given what is not there."""

ASKED = '{"prompt": "one",\n "answer": "two"}'
NEW_TOKEN = both(tokenizer("anchor", "AB"), tokenizer("donor", "AB", "new"))
LINES = [
    *(call(f"{name} {words}", "nowhere") for name, words in NOWHERE.items()),
    call("align anchor donor --steps 3", "--steps needs --learn"),
    call("align anchor donor --learn --data text.txt", "--learn needs --data, and OUT or --alignment"),
    call("align anchor donor out --learn", "--learn needs --data, and OUT or --alignment"),
    call("align anchor donor --dtype bfloat16", "--dtype needs OUT"),
    call("compare anchor donor", "there is no command 'compare'"),
    call("fit anchor donor", "there is no command 'fit'"),
    call("align anchor donor out --dtype float23", "'float23'", "'float32'"),
    call("align anchor donor out --shard-size x", "is not a size"),
    call("align anchor donor out --shard-size 500 MB", "'MB' behind '--shard-size 500'", "write --shard-size 500M"),
    call("merge anchor donor out --budget 6 minutes", "'minutes' behind '--budget 6'", "write --budget 6m"),
    call("merge anchor donor --samples=64 samples out", "write --samples 64"),
    call("merge anchor donor out --budget '6 minutes'", "write --budget 6m"),
    call("barrier anchor donor --data text.txt --limit 64 samples", "write --limit 64"),
    call("align anchor donor out --layers x", "'--layers' is 'x'; it must be all, or ranges"),
    call("align anchor donor out --layers 9", "the model has no layer 9"),
    call("align anchor donor out --heads permute", "'--heads' is 'permute'; did you mean 'permutation'?"),
    call("align anchor donor out --device cuda:99", "'cuda:99' cannot be used"),
    call("align anchor donor out --device gpu", "'gpu' cannot be used"),
    call("align anchor donor out --device meta", "use --device cpu, or auto"),
    call("align anchor vit out", "vit: architecture is vit, that of anchor is llama"),
    call("align anchor donor out --samples 8", "uses no samples"),
    call("align anchor donor out --match-on both --data nowhere.txt", "nowhere.txt"),
    call("align anchor donor out --nonsense", "No such option '--nonsense'"),
    call("align anchor donor out --backend spark", "'--backend' is 'spark'; it must be one of: threads, ray, dask"),
    call("carry donor --from anchor --to anchor out", "donor: has 1 token", "remove the tokens that", spoil=NEW_TOKEN),
    call("carry anchor --from anchor --to donor out", "anchor: lacks 1 token", "(`new`)", spoil=NEW_TOKEN),
    call("mearge", "mearge", "did you mean 'merge'?"),
    call("inspct anchor", "did you mean 'inspect'?"),
    call("inspect ./nothing", "./nothing", "no such directory"),
    call("inspect", "name a model, a recipe or a file"),
    call("inspect anchor --report", "anchor/rotation_merge.json: no such file"),
    call("inspect anchor --layers 9", "the model has no layer 9"),
    call("inspect anchor --methods", "takes no model"),
    call("inspect anchor --draft --fingerprint", "use one at a time"),
    call("inspect anchor --config file", "--config needs --prove"),
    call("inspect --prove nowhere", "nowhere: no such file"),
    call("inspect anchor/model.safetensors", "neither an alignment nor statistics"),
    call("inspect junk.safetensors", "junk.safetensors: cannot be read"),
    call("inspect junk.safetensors --fingerprint", "junk.safetensors: cannot be read"),
    call("inspect half.yml --fingerprint", "nor a report (.json)"),
    call("inspect half.yml", "not valid YAML"),
    call("inspect bytes.yml", "bytes.yml: cannot be read"),
    call("inspect list/rotation_merge.json", "is not a report"),
    call("inspect bad.json", "bad.json: is not a report"),
    call("inspect list --report", "is not a report"),
    call("inspect list --fingerprint", "config.json is missing"),
    call("inspect other --report", "it lacks 'anchor'"),
    call("inspect nowhere --draft", "nowhere: no such directory"),
    call("inspect none.yml --heads permutation", "an option of aligning a model"),
    call("inspect lora --fingerprint", "is an adapter, not a model", spoil=adapter("lora")),
    call("inspect junk.npz", "junk.npz: its merge_method is not rotation_merge"),
    call("barrier anchor donor", "Missing option '--data'"),
    call("barrier anchor --data demo:python", "give a recipe (a YAML file), or two models"),
    call("barrier anchor donor --data ./gone.txt", "./gone.txt: no such file"),
    call("barrier anchor donor --data demo:latin", "the demo has no data 'latin'", "demo:english"),
    call("barrier anchor donor --data bad.jsonl", "bad.jsonl", "is not JSON"),
    call("barrier anchor donor --data text.txt", "anchor: no tokenizer can be loaded"),
    call("barrier anchor donor vit --data samples.jsonl --alignment file", "two"),
    call("barrier anchor donor vit --data samples.jsonl --heads permutation", "measure more of them two by two"),
    *(
        call(f"barrier anchor donor --data samples.jsonl --plot p.{words}", problem)
        for words, problem in {
            "xyz": "end the name in .png",
            "png --compare locals": "did you mean 'local'?",
            "png --compare learned=": "names no file",
            "png --compare local,local": "'local' is named twice",
            f"png --compare {','.join(f'm{i}=file' for i in range(8))}": "holds 8 curves",
            "png --compare made=./gone": "gone",
            "png --compare local --residual rotation": "need the curve 'aligned'",
        }.items()
    ),
    call("barrier anchor anchor --data demo:digits", "LlamaForCausalLM takes input_ids"),
    call("barrier vit vit --data demo:python", "ViTForImageClassification takes pixel_values"),
    call("evaluate anchor --data junk.npz", "is not an archive of arrays"),
    call("evaluate anchor --data few.txt", "give more text", spoil=tokenizer("anchor", "AB")),
    call("evaluate anchor --data ./none.txt", "./none.txt: no such file"),
    call("evaluate anchor --data a.csv", "a.csv: holds no column of texts", "but one, two"),
    call("evaluate anchor --data x.json", "but prompt, answer; rename", spoil=put("x.json", ASKED)),
    call("polish anchor out --teachers donor --data x.jsonl", "prompt, answer", spoil=put("x.jsonl", f"{ASKED}\n")),
    call("evaluate lora --data demo:english", "is an adapter, not a model; write org/base+", spoil=adapter("lora")),
    call("verify anchor ./nothing", "./nothing: no such directory"),
    call("verify anchor vit", "vit: is of another class than anchor"),
    call("verify vit anchor", "anchor: is of another class than vit"),
    call("doctor vit/preprocessor", "vit/preprocessor: no such file or directory"),
    call("doctor empty", "config.json is missing", spoil=Path("empty").mkdir),
    *(call(f"doctor {name}", "names no merge_method") for name in ("file", "list.yml")),
    call("doctor none.yml", "none.yml"),
    call("doctor half.yml", "not valid YAML"),
    call("doctor absent.yml", "absent.yml: no such file"),
    call("doctor bytes.yml", "bytes.yml: cannot be read"),
    call("push anchor a/b/c", "names no repository"),
    call("push anchor org/name", "anchor/rotation_merge.json: no such file"),
    call("push file org/name", "file/rotation_merge.json: no such file"),
]

IDS, THERE_AND_BACK = torch.arange(60).view(6, 10) % 40, ("donor", "donor", "anchor")
FURTHER = both(
    adapter("one", "anchor"), adapter("two", "anchor"), lambda: model("LlamaForCausalLM", "deep", num_hidden_layers=3)
)
CALLS: list[tuple[str, Callable[[], object]]] = [
    ("the model has no layer 2", lambda: rm.align("anchor", "donor", layers="0-99")),
    ("'slices'", lambda: rm.align("anchor", "deep")),
    ("another width or depth", lambda: rm.transfer("deep", "deep", "anchor")),
    ("name its own base", lambda: rm.transfer("one", "donor", "anchor")),
    ("no effect beside", lambda: rm.transfer(*THERE_AND_BACK, alignment=rm.align("anchor", "donor"), ffn="none")),
    ("carrying by weights takes no steps", lambda: rm.transfer(*THERE_AND_BACK, steps=4)),
    ("already exists", lambda: rm.transfer("one", "anchor", "donor").save_pretrained("vit")),
    ("add 't'", lambda: rm.average(["anchor", "donor"], "slerp")),
    ("write somewhere else", lambda: rm.merge(["anchor", "donor"], "vit")),
    ("one data source is of type dict", lambda: rm.merge(["anchor", "donor"], "out", [{"input_ids": IDS}])),
    ("no such directory", lambda: rm.merge(["one", "two"], "out", config=rm.MergeConfig(base="none"))),
    ("give one number for each adapter", lambda: rm.merge_adapters(["one", "two"], weights=["x", 1])),
    ("already exists", lambda: rm.merge_adapters(["one", "two"]).save("vit")),
    ("teacher 1: 1 batches", lambda: rm.polish("anchor", ["anchor", "donor"], [{"input_ids": IDS[:1]}])),
    ("'synthetic' is for image models", lambda: rm.evaluate("anchor", "synthetic")),
    ("ViTForImageClassification does not write text; give a file", lambda: rm.evaluate("vit", "self")),
    ("are no batches", lambda: rm.evaluate("anchor", IDS)),
    ("are no batches", lambda: rm.evaluate("anchor", (batch for batch in [IDS]))),
    ("are no batches", lambda: rm.evaluate("anchor", [])),
    ("not a tensor", lambda: rm.evaluate("anchor", [{"input_ids": "text"}])),
    ("no example has a label", lambda: rm.evaluate("anchor", [{"input_ids": IDS[:, :1]}])),
    ("labels have shape", lambda: rm.evaluate("anchor", [{"input_ids": IDS, "labels": IDS[:, 0]}])),
    ("'attention_mask' has", lambda: rm.evaluate("anchor", [{"input_ids": IDS, "attention_mask": IDS[:, :3]}])),
    ("takes input_ids", lambda: rm.evaluate("anchor", [{"pixel_values": torch.zeros(1, 3, 4, 4)}])),
    ("outside the model's vocabulary", lambda: rm.evaluate("anchor", [{"input_ids": torch.tensor([[400]])}])),
]
"""Calls from Python beside two adapters and a deeper model, and words of their lines."""

PYTHON = [
    python("models of two architectures", lambda: rm.align("anchor", "vit"), "vit: architecture is vit, that of"),
    python("no model", lambda: rm.align("anchor", 3), "donor: is of type int, which is not a model"),
    python(
        "unknown option", lambda: rm.align("anchor", "donor", hedas=""), "no option 'hedas'", "did you mean 'heads'?"
    ),
    python("unknown value", lambda: rm.AlignConfig(heads="permute"), "'heads' is 'permute'", "permutation"),
    python("another config", lambda: rm.align("anchor", "donor", rm.MergeConfig()), "type MergeConfig", "AlignConfig"),
    python("groups of no stream", lambda: rm.align("anchor", "donor", residual="no=none"), "no stream 'no'"),
    python("no group of a stream", lambda: rm.AlignConfig(residual="decoder=turning"), "is 'decoder=turning'"),
    python("one model to merge", lambda: rm.merge(["anchor"], "out"), "1 models are given"),
    python("text for models", lambda: rm.merge("anchor", "out"), "one str stands where models belong"),
    python("object for a model", lambda: rm.merge([object(), "donor"], "out"), "one model is of type object"),
    python("number for data", lambda: rm.merge(["anchor", "donor"], "out", 3), "one int stands where data sources"),
    python(
        "data that are not there", lambda: rm.merge(["anchor", "donor"], "out", "none.txt"), "none.txt: no such file"
    ),
    python("unknown method", lambda: rm.average(["anchor", "donor"], "lienar"), "did you mean 'linear'?"),
    python("no alignment", lambda: rm.Alignment.load("file"), "file: cannot be read"),
    *(python(f"call {i}", function, words, spoil=FURTHER) for i, (words, function) in enumerate(CALLS)),
]

ON_THE_HUB = [
    Row(
        *(f"hub: {name}", (words,), both(spoil, edit("model: donor", "model: org/donor"))),
        recipe=("merge",),
        commands=("verify anchor org/donor",),
        hub=True,
    )
    for name, (spoil, words) in EVERY_READER.items()
]

ROWS = [*RECIPES, *CHECKPOINTS, *OUTPUTS, *LINES, *ON_THE_HUB, *PYTHON]

OWN_TOKENIZER = '{"auto_map": {"AutoTokenizer": ["evil.Own", "evil.Own"]}, "tokenizer_class": "Own"}'
BESIDE: dict[str, Step] = {
    "code for a class that transformers has": both(config(auto_map={"AutoConfig": "evil.Config"}), CODE),
    "code for tokenizers that are compared": both(
        another("LlamaForCausalLM", vocab_size=44),
        *(put(f"{name}/tokenizer_config.json", OWN_TOKENIZER) for name in ("anchor", "donor")),
        CODE,
        edit("delegate: linear", "delegate: linear\n  residual: permutation\n  exclude: embed,lm_head"),
    ),
}
"""Code beside a checkpoint, which is used as if the file were not there."""

GOOD: dict[str, Step] = {
    "as it is": lambda: None,
    "known chat template": edit("dtype:", "chat_template: chatml\ndtype:"),
    "chat template": edit("dtype:", 'chat_template: "{% for message in messages %}{{ message }}{% endfor %}"\ndtype:'),
    "few aliases": both(
        edit("base_model: anchor", "base_model: &base anchor"), edit("- model: anchor", "- model: *base")
    ),
    "index of the one file, a pickle beside": both(
        index(WEIGHTS), lambda: torch.save(load_file(f"donor/{WEIGHTS}"), "donor/pytorch_model.bin")
    ),
    "config that names the file of its weights": config(transformers_weights=WEIGHTS),
    "alignment file": WITH_ALIGNMENT,
    "code for a class that transformers has": BESIDE["code for a class that transformers has"],
}
"""Inputs near to bad ones, which are good."""
