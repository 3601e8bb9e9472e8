"""The table of bad inputs: how each is made from good ones, how it is given, and what its one line holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from bad_checkpoints import CHECKPOINTS, EVERY_READER, WITH_ALIGNMENT
from bad_recipes import RECIPES
from safetensors.torch import load_file
from spoiling import WEIGHTS, Bench, Row, adapter, both, call, config, edit, index, put, python, tokenizer

import rotation_merge as rm

OUTPUTS = [
    Row("output under a file", ("file", "in the way"), recipe=("merge",), out="file/out"),
    Row("output that is a file", ("file", "in the way"), recipe=("merge",), out="file"),
    Row("output that is an input", ("donor", "one of the inputs"), recipe=("merge",), out="donor"),
    Row("output inside an input", ("donor", "one of the inputs"), recipe=("merge",), out="donor/out"),
    Row("output around the inputs", ("one of the inputs",), recipe=("merge",), out="."),
    Row(
        "output that cannot be made",
        ("/proc",),
        recipe=("merge",),
        commands=("align anchor donor /proc/none/out",),
        out="/proc/none/out",
    ),
    call("align anchor donor donor", "is one of the inputs"),
    call("align anchor donor recipe.yml", "is a file"),
    call("align anchor donor vit", "already exists", "--force"),
    call("align anchor donor --alignment file", "already exists", "--force"),
]

LINES = [
    call("align anchor donor --steps 3", "--steps needs --learn"),
    call("align anchor donor --learn --data text.txt", "--learn needs --data, and OUT or --alignment"),
    call("align anchor donor out --learn", "--learn needs --data, and OUT or --alignment"),
    call("align anchor donor --dtype bfloat16", "--dtype needs OUT"),
    call("align anchor donor out --by layer", "--by is for models that are only compared"),
    call("compare anchor donor", "there is no command 'compare'"),
    call("fit anchor donor", "there is no command 'fit'"),
    call("align anchor donor out --dtype float23", "'float23'", "'float32'"),
    call("align anchor donor out --shard-size x", "is not a size"),
    call("align anchor donor out --layers x", "ranges"),
    call("align anchor donor out --layers 9", "layer 9"),
    call("align anchor donor out --heads permute", "permute", "permutation"),
    call("align anchor donor out --device cuda:99", "'cuda:99' cannot be used"),
    call("align anchor donor out --device gpu", "'gpu' cannot be used"),
    call("align anchor donor out --device meta", "use --device cpu, or auto"),
    call("align anchor vit out", "one architecture"),
    call("align anchor donor out --nonsense", "--nonsense"),
    call("align anchor donor out --backend spark", "'spark'", "ray"),
    call(
        "carry donor --from anchor --to anchor out",
        "donor: has 1 token",
        "(`new`)",
        "remove the tokens that it added",
        spoil=both(tokenizer("anchor", "AB"), tokenizer("donor", "AB", "new")),
    ),
    call(
        "carry anchor --from anchor --to donor out",
        "anchor: lacks 1 token",
        "(`new`)",
        "carry between bases of one vocabulary",
        spoil=both(tokenizer("anchor", "AB"), tokenizer("donor", "AB", "new")),
    ),
    call("mearge", "mearge", "did you mean 'merge'?"),
    call("inspect ./nothing", "./nothing", "no such directory"),
    call("inspect", "name a model, a recipe or a file"),
    call("inspect anchor --report", "no such file"),
    call("inspect anchor --layers 9", "the model has no layer 9"),
    call("inspect anchor --methods", "takes no model"),
    call("inspect anchor --draft --fingerprint", "use one at a time"),
    call("inspect anchor --config file", "--config needs --prove"),
    call("inspect --prove nowhere", "nowhere", "o such file"),
    call("inspect anchor/model.safetensors", "neither an alignment nor statistics"),
    call("inspect junk.npz", "junk.npz"),
    call("barrier anchor donor", "--data"),
    call("barrier anchor --data demo:python", "two models"),
    call("barrier anchor donor --data ./gone.txt", "no such file"),
    call("barrier anchor donor --data demo:latin", "demo:english"),
    call("barrier anchor donor --data bad.jsonl", "bad.jsonl", "is not JSON"),
    call("barrier anchor donor --data text.txt", "tokenizer"),
    call("barrier anchor anchor --data demo:digits", "input_ids"),
    call("barrier vit vit --data demo:python", "pixel_values"),
    call("evaluate anchor --data junk.npz", "is not an archive of arrays"),
    call("evaluate anchor --data a.csv", "a.csv"),
    call("evaluate lora --data demo:bytes", "is an adapter, not a model; write org/base+", spoil=adapter("lora")),
    call("verify anchor ./nothing", "no such directory"),
    call("verify anchor vit", "one class"),
    call("verify vit anchor", "one class"),
    call("doctor vit/preprocessor", "vit/preprocessor"),
    call("doctor empty", "config.json is missing", spoil=lambda bench: Path("empty").mkdir()),
    call("doctor file", "names no merge_method"),
    call("push anchor a/b/c", "names no repository"),
    call("push anchor org/name", "no such file"),
    call("push file org/name", "no such file"),
    Row(
        "code of a checkpoint",
        ("donor",),
        both(
            config(architectures=["Own"], model_type="own", auto_map={"AutoModel": "evil.Own"}),
            put("donor/evil.py", "open('ran', 'w')"),
        ),
        commands=("verify donor donor",),
    ),
]

PYTHON = [
    python("models of two architectures", lambda: rm.align("anchor", "vit"), "one architecture"),
    python("no model", lambda: rm.align("anchor", 3), "int"),
    python(
        "unknown option",
        lambda: rm.align("anchor", "donor", hedas="permutation"),
        "there is no option 'hedas'",
        "did you mean 'heads'?",
    ),
    python("unknown value", lambda: rm.AlignConfig(heads="permute"), "'heads' is 'permute'", "permutation"),
    python(
        "another config",
        lambda: rm.align("anchor", "donor", rm.MergeConfig()),
        "the config is of type MergeConfig",
        "AlignConfig",
    ),
    python(
        "groups of no stream", lambda: rm.align("anchor", "donor", residual="nosuch=permutation"), "no stream 'nosuch'"
    ),
    python("no group of a stream", lambda: rm.AlignConfig(residual="decoder=turning"), "option 'residual'"),
    python("one model to merge", lambda: rm.merge(["anchor"], "out"), "1 models are given"),
    python("text for models", lambda: rm.merge("anchor", "out"), "one str stands where models belong"),
    python("object for a model", lambda: rm.merge([object(), "donor"], "out"), "one model is of type object"),
    python(
        "number for data", lambda: rm.merge(["anchor", "donor"], "out", 3), "one int stands where data sources belong"
    ),
    python(
        "data that are not there", lambda: rm.merge(["anchor", "donor"], "out", "none.txt"), "none.txt: no such file"
    ),
    python("unknown method", lambda: rm.average(["anchor", "donor"], "lienar"), "did you mean 'linear'?"),
    python("no alignment", lambda: rm.Alignment.load("file"), "file"),
]

ON_THE_HUB = [
    Row(
        f"hub: {name}",
        (words,),
        both(
            spoil,
            lambda bench: bench.hub.publish("org/donor", Path("donor")),
            edit(("model: donor", "model: org/donor")),
        ),
        ("merge",),
        ("verify anchor org/donor",),
    )
    for name, (spoil, words) in EVERY_READER.items()
]

ROWS = [*RECIPES, *CHECKPOINTS, *OUTPUTS, *LINES, *ON_THE_HUB, *PYTHON]

GOOD: dict[str, Callable[[Bench], object]] = {
    "as it is": lambda bench: None,
    "known chat template": edit(("dtype:", "chat_template: chatml\ndtype:")),
    "chat template": edit(
        ("dtype:", 'chat_template: "{% for message in messages %}{{ message }}{% endfor %}"\ndtype:')
    ),
    "few aliases": edit(("base_model: anchor", "base_model: &base anchor"), ("model: anchor", "model: *base")),
    "index of the one file, a pickle beside": lambda bench: (
        index(dict.fromkeys(load_file(f"donor/{WEIGHTS}"), WEIGHTS)),
        torch.save(load_file(f"donor/{WEIGHTS}"), "donor/pytorch_model.bin"),
    ),
    "alignment file": WITH_ALIGNMENT,
}
"""Inputs near to bad ones, which are good."""
