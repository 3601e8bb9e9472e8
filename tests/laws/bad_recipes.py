"""Bad recipes: keys, parameters, structure, texts that are no recipe; paths that are misspelt."""

from __future__ import annotations

from typing import Any

import torch
from bad_checkpoints import SHARDS, shards
from faults_support import in_two_shards, of_map
from safetensors.torch import load_file
from spoiling import (
    Row,
    Step,
    another,
    at_top,
    both,
    call,
    config,
    edit,
    folder_for,
    in_folder,
    in_recipe,
    misspelt,
    models,
    of_anchor,
    of_donor,
    option,
    put,
    tensors,
)

UP = "model.layers.0.mlp.up_proj.weight"

KEYS = [
    at_top("tokeniser: base", "tokeniser", "did you mean 'tokenizer'"),
    misspelt("base_model", "base_mdoel"),
    misspelt("merge_method", "merge_mehtod"),
    in_recipe("misspelt method", ": rotation_merge", ": rotation-merge", "did you mean 'rotation_merge'"),
    misspelt("models", "modells"),
    misspelt("parameters", "paramters"),
    at_top("heads: permutation", "heads", "under 'parameters'"),
    at_top("dtype: bfloat16", "dtype", "occurs twice"),
    option("ffn: [{filtre: x, value: none}, {value: permutation}]", "filtre", "did you mean 'filter'"),
    models("slices: [{sources: [{model: anchor, layer_rnge: [0, 2]}]}]", "layer_rnge", "'layer_range'"),
    option("heads_of: each\ntokenizer_source: base", "changes the vocabulary of all heads", "leave out one of the two"),
    at_top("tokenizer: {sorce: base}", "sorce", "did you mean 'source'"),
    at_top('"x\\e]0;owned\\a\\u202Egpj": 1', "gpj' here"),
]

SETTINGS = "models: [{model: anchor, parameters: {weight: 1}}, {model: donor, parameters: {weight: 1}}]\nparameters:"
HALF = "models: [{model: anchor, parameters: {weight: 1}}, {model: donor}]"
PAIR = "models: [{model: anchor}, {model: donor}]\nparameters:"
THREE = "models: [{model: anchor}, {model: donor}, {model: third}]\nparameters:"
TUNED = "models: [{model: donor, parameters: {weight: 1, finetuned_from: ./donor}}]\nparameters:"
UNLIKE = SETTINGS.replace("}}]", "}}, {model: third, parameters: {weight: 1, ffn: none}}]")
SHARE = "from 0 to 1"
CHECKED = ("check",)
INSIDE = "is not a name inside the merged model's folder"
OF_LAYERS = "align anchor donor out", "align anchor donor", "inspect anchor"
LAYERS = {
    "100": "layers from 0 to 1",
    "0,2-5": "no layer 2",
    "1-999999999": "no layer 2",
    "0-999999999999": "ranges such as 0-5,11",
}
PARAMETERS = [
    of_donor("{wieght: 0.5}", "wieght", "did you mean 'weight'"),
    option("hedas: permutation", "hedas", "did you mean 'heads'"),
    in_recipe("misspelt delegate", "delegate: linear", "delegate: lienar", "'lienar'", "did you mean 'linear'"),
    in_recipe(
        "beside a misspelt delegate",
        "linear\n",
        "linaer\n  denisty: 0.5\n",
        "'denisty' (delegate linear)",
        recipe=CHECKED,
        faults=2,
    ),
    in_recipe(
        "option under an average alone", "rotation_merge", "wudi", "'delegate' does not belong here", "'merge_method: r"
    ),
    in_recipe("unknown delegate", "delegate: linear", "delegate: mean", "no merge method 'mean' to delegate to"),
    in_recipe("ourselves for a delegate", "delegate: linear", "delegate: rotation_merge", "method 'rotation_merge' to"),
    in_recipe("list for a delegate", "delegate: linear", "delegate: [linear]", "no merge method '['linear']'"),
    option("density: 0.5", "there is no parameter 'density'", "linear"),
    of_anchor("{}", "needs the parameter 'weight'", "linear"),
    models(f"{PAIR} {{delegate: slerp}}", "needs the parameter 't'", "slerp"),
    in_recipe("base without weight", "  - model: anchor\n    parameters: {weight: 0.5}\n", "", "'weight'", "the base"),
    models(f"modules: {{default: {{{HALF}}}}}", "needs the parameter 'weight' for donor"),
    of_anchor("{weight: half}", "'weight' is 'half'; it must be a number"),
    of_anchor("{weight: .nan}", "'weight' is nan"),
    of_anchor("{weight: inf}", "'weight' is 'inf'"),
    of_anchor("{weight: [{filter: x, value: .inf}]}", "'weight' is inf"),
    of_anchor("{weight: {a: 1}}", "weight.a: there is no key 'a' here"),
    option("ffn:", "ffn: this is not a value"),
    option("ffn: 3", "'ffn' is 3", "permutation"),
    option("ffn: rotation", "'ffn' is 'rotation'", "permutation"),
    option("residual: orthogonal", "'residual' is 'orthogonal'; it must be one of: none, permutation"),
    option("untie: yes please", "'untie' is 'yes please'"),
    option("attention: rotations", "rotations", "did you mean 'rotation'"),
    models(f"{SETTINGS} {{delegate: della, rescale: sequential}}", "'rescale' is 'sequential'; it must be true or"),
    option("residual: [none, rotation]", "'residual' applies to the whole model"),
    option("layers: 0..3", "'layers' is '0..3'", "all, or ranges such as 0-5,11"),
    option("layers: 5-2", "'layers' is '5-2'", "all, or ranges"),
    option("layers: [0, 1]", "'layers' applies to the whole model"),
    *(
        option(f"layers: '{layers}'", words, commands=tuple(f"{c} --layers {layers}" for c in OF_LAYERS))
        for layers, words in LAYERS.items()
    ),
    option("exclude: lm_head, up_prj", "contains 'up_prj'", "did you mean 'up_proj'"),
    option("exclude: 3", "'exclude' is 3; it must be names"),
    *(option(f"save_alignment: {name}", INSIDE) for name in ("../maps", "/tmp/maps", "in/../../maps", ".")),
    option("save_alignment: config.json", "'config.json' is a file of the merged model", recipe=("merge",)),
    of_donor("{weight: 0.5, finetuned_from: 3}", "'finetuned_from' is 3"),
    of_donor("{weight: 0.5, alignment: [a, b]}", "'alignment' applies"),
    of_donor("{weight: 0.5, delegate: slerp}", "delegate", "it stands under the recipe"),
    of_donor("{weight: 0.5, untie: true}", "untie", "does not belong here"),
    option("finetuned_from: x", "it stands under one donor"),
    option("ffn: [{filter: up_proj, value: none}, {value: permutation}]", "'up_proj'", "model.layers.0"),
    option("exclude: 3\n  attention: rotate", "parameters.exclude: ", "(1 more: rotation-merge", recipe=("merge",)),
    option("data: self", "'data' has no effect with delegate linear"),
    option("match_on: both\n  anchor: mean", "'match_on' cannot be used: 'anchor: mean'"),
    models(f"{TUNED} {{delegate: task_arithmetic, anchor: mean}}", "'finetuned_from' cannot be used: 'anchor: mean'"),
    models(f"{UNLIKE} {{delegate: linear, anchor: mean}}", "'anchor: mean' needs the same options for all donors"),
    of_donor("{weight: 0.5, alignment: map, ffn: none}", "has no effect", "ffn"),
    models(f"{PAIR} {{delegate: slerp, t: 7}}", "'t' is 7", SHARE),
    models(f"{SETTINGS} {{delegate: ties, density: -1}}", "'density' is -1", SHARE),
    models(f"{SETTINGS} {{delegate: dare_linear, density: [0.5, 2]}}", "'density' is 2", SHARE),
    in_recipe("misspelt dtype", "dtype: float32", "dtype: flaot32", "flaot32", "did you mean 'float32'"),
    in_recipe("dtype of integers", "dtype: float32", "dtype: int64", "dtype is 'int64'"),
    in_recipe("unknown out_dtype", "dtype: float32", "out_dtype: half16", "out_dtype is 'half16'"),
    at_top("chat_template: nosuch", "no chat template 'nosuch'"),
    at_top('chat_template: "{"', "no chat template '{'"),
]


def slices(*sources: str, before: str = "", parameters: str = "delegate: slerp, t: 0.5") -> str:
    pieces = ", ".join(f"{{model: {source}}}" for source in sources)
    return f"slices: [{{{before}sources: [{pieces}]}}]\nparameters: {{{parameters}}}"


APART = [f"[{{model: anchor, layer_range: {x}}}, {{model: donor, layer_range: {x}" for x in ("[0, 1]", "[1, 2]")]
BOTH_SLICES = f"slices: [{{sources: {APART[0]}}}]}}, {{sources: {APART[1]}, parameters: "
WHOLE = {"residual": "permutation", "finetuned_from": "anchor", "samples": "8"}
ONE_OF = "Exactly one of 'models', 'slices', or 'modules' must be present"
FIRST, SECOND = "anchor, layer_range: [0, 2]", "donor, layer_range: [0, 2]"
BOMB = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
STRUCTURE = [
    in_recipe("no base_model", "base_model: anchor\n", "", "base_model is missing", "aligned to"),
    models("parameters: {delegate: linear}", ONE_OF),
    at_top("slices: [{sources: [{model: anchor, layer_range: [0, 2], parameters: {weight: 1}}]}]", ONE_OF),
    models(f"{PAIR} {{delegate: model_stock}}", "model_stock", "at least 3"),
    models(f"{THREE} {{delegate: slerp, t: 0.5}}", "exactly 2 inputs"),
    models(slices("anchor, layer_range: [0, 1]"), "slerp", "requires at least 2 inputs"),
    in_recipe("model twice", "models:", "models:\n  - {model: donor, parameters: {weight: 1}}", "Duplicate merge"),
    models(slices(FIRST, SECOND, before="base_model: donor, "), "base_model is donor, that of the recipe is anchor"),
    models(slices(FIRST, "donor, layer_range: [0, 1]"), "slices[0]", "its sources have 2, 1 layers"),
    models(slices("anchor, layer_range: [2, 0]", "donor, layer_range: [2, 0]"), "layer_range is [2, 0]", faults=2),
    models("slices: [{sources: []}]", "it has no sources"),
    models(slices("anchor"), "slices[0]", "'layer_range' is missing; add 'layer_range: ...'"),
    models(
        slices(
            "anchor, layer_range: [0, 1]",
            "donor, layer_range: [1, 2]",
            parameters="delegate: slerp, t: 0.5, save_alignment: true",
        ),
        "'save_alignment' cannot be used: the slices pair layers differently",
    ),
    models(slices(*(f"{name}, layer_range: [1, 4]" for name in ("anchor", "donor"))), "the model has 2", "layer_range"),
    *(
        models(
            f"{BOTH_SLICES}{{{name}: {value}}}}}]}}]\nparameters: {{delegate: slerp, t: 0.5, match_on: both}}",
            f"donor: '{name}' is not the same for all layers",
        )
        for name, value in WHOLE.items()
    ),
    models("models: [anchor, donor]", "models[0]", "valid dictionary", "write '- model: anchor'", faults=2),
    models("models: {model: donor}", "models", "input should be a valid list"),
    in_recipe("number in the place of a model", "model: donor", "model: 3", "a directory or org/name"),
    in_recipe("word for parameters", "parameters:\n  delegate: linear", "parameters: linear", "input should be"),
]

TWICE = "is donor by another path", "name each model once"
CAUSES = [
    models(
        SETTINGS.replace("weight: 1}}]", "weight: -1}}]") + " {delegate: linear}", "the weights add up to 0, and linear"
    ),
    *(
        models(f"{SETTINGS.replace('}}]', f'}}}}, {{model: {path}, parameters: {{weight: 1}}}}]')} {{}}", *TWICE)
        for path in ("./donor", "donor/", "anchor/../donor")
    ),
    models("models: [{model: ./anchor}]\nparameters: {weight: 1}", "is base_model anchor by another path"),
    models(f"{PAIR} {{delgate: slerp, t: 0.5}}", "'delgate' (delegate slerp)", "did you mean 'delegate'?"),
    Row(
        "unsupported models beside a misspelt delegate",
        ("'lienar'", "did you mean 'linear'?"),
        both(
            *(config(name, architectures=["StrangeForCausalLM"]) for name in ("anchor", "donor")),
            edit("delegate: linear", "delegate: lienar\n  unsupported: merge"),
        ),
        recipe=CHECKED,
    ),
]

STOCK = {
    "linear": "models: [{model: anchor, parameters: {weight: 0.5}}, {model: donor, parameters: {weight: 0.5}}]",
    "ties": "models: [{model: donor, parameters: {weight: 1, density: [1, 0.3]}}]\nbase_model: anchor\n"
    "parameters: {normalize: true, int8_mask: true}",
    "slerp": "slices: [{sources: [{model: anchor, layer_range: [0, 2]}, {model: donor, layer_range: [0, 2]}]}]\n"
    "base_model: anchor\nparameters: {t: [{filter: mlp, value: [0, 1]}, {value: 0.5}]}",
    "passthrough": "slices: [{sources: [{model: anchor, layer_range: [0, 2]}]}, {sources: [{model: deep, "
    "layer_range: [2, 4], parameters: {scale: 0.5}}]}]\nout_path: merged",
}
"""Recipes of mergekit's own methods that run; `deep` has four layers."""


def stock(method: str, old: str, new: str, *words: str, spoil: Step = lambda: None) -> Row:
    """A text of such a recipe replaced by another; only `check` looks at it."""
    text = f"merge_method: {method}\n{STOCK[method]}\n"
    assert old in text
    return Row(
        f"{method}: {words[0]}", words, both(put("recipe.yml", text.replace(old, new, 1)), spoil), recipe=CHECKED
    )


def named_last() -> None:
    """The index names the later of two shards for a tensor that both hold."""
    twice = next(iter(load_file(SHARDS[0])))
    of_map(lambda places: places.update({twice: SHARDS[1]}))()


OVERLAY = shards(in_folder(both(in_two_shards, named_last)))


def as_it_is(*words: str, **changes: Any) -> Row:
    """The recipe of `linear`, of a donor that does not fit."""
    kind = changes.pop("kind", "LlamaForCausalLM")
    return stock("linear", "", "", *words, spoil=another(kind, **changes))


OF_MERGEKIT = [
    as_it_is("donor: 'residual' has size 64, against 32", hidden_size=64),
    as_it_is("donor: has 4 layers, anchor has 2", num_hidden_layers=4),
    as_it_is(
        "donor: its class is ['MistralForCausalLM'], that of anchor",
        "--allow-crimes",
        kind="MistralForCausalLM",
        num_key_value_heads=2,
    ),
    as_it_is("tensor 'model.embed_tokens.weight' is [48, 32]", "tokenizer: {source: base}", vocab_size=48),
    stock("linear", "", "", "weights are quantised", spoil=tensors(lambda t: t.update({UP: t[UP].to(torch.int8)}))),
    stock("linear", "", "", "tensor twice", "mergekit's methods may read either", spoil=OVERLAY),
    stock("linear", "donor", "./doner", "./doner: no such directory; did you mean './donor'?"),
    stock("linear", "merge_method: linear", "merge_method: lienar", "did you mean 'linear'?"),
    stock("linear", "models:", "tokeniser_source: base\nmodels:", "did you mean 'tokenizer_source'?"),
    stock("linear", "weight: 0.5", "weight: half", "'weight' is 'half'"),
    stock("linear", "weight: 0.5", "weight: -0.5", "the weights add up to 0"),
    stock("linear", "{weight: 0.5}", "{}", "merge_method linear needs the parameter 'weight' for anchor"),
    stock("ties", "density", "denisty", "'denisty' (merge_method ties)", "did you mean 'density'?"),
    stock("ties", "base_model: anchor", "", "base_model is missing"),
    stock("slerp", "t: [", "s: [", "merge_method slerp needs the parameter 't'"),
    stock("slerp", "model: donor, layer_range: [0, 2]", "model: donor, layer_range: [0, 1]", "have 2, 1 layers"),
    stock("passthrough", "deep", "donor", "layers 2 to 3 are asked for, the model has 2"),
    stock("passthrough", "deep", "vit", "vit: architecture is vit, that of anchor is llama"),
]

CHECK, INSPECT = "check recipe.yml", "inspect recipe.yml"
NO_RECIPES = [
    call("check nowhere.yml", "nowhere.yml", "no such file"),
    Row("folder for a recipe", ("recipe.yml", "s a directory"), folder_for("recipe.yml"), commands=(CHECK,)),
    in_recipe("half a list", "models:", "models: [", "not valid YAML", recipe=("merge",), commands=(CHECK, INSPECT)),
    in_recipe("tab", "  delegate", "\tdelegate", "not valid YAML", recipe=("merge",), commands=(CHECK,)),
    at_top("\n".join(["a0: &a0 [x]", *BOMB]), "100000 values", "aliases", recipe=("merge",), commands=(CHECK,)),
    at_top("a: &a [*a]", "or 100 levels", "aliases", recipe=("merge",), commands=(CHECK,)),
    Row("list for a recipe", ("a recipe is a mapping of keys",), put("recipe.yml", "- a\n- b\n"), recipe=("check",)),
    *(
        Row(f"recipe: {name}", (words,), put("recipe.yml", content), commands=(CHECK, INSPECT))
        for name, content, words in (
            ("empty", b"", "the recipe is empty"),
            ("not UTF-8", b"merge_method: \xff\n", "can't decode byte 0xff"),
            ("deep", b"a: " + b"[" * 600, "nested too deeply"),
            ("deep mappings", b"".join(b" " * n + b"a:\n" for n in range(2000)), "nested too deeply"),
            ("object of Python", b"a: !!python/object/apply:os.system ['touch ran']\n", "not valid YAML"),
            ("control characters", b"a: \x1b[2J\n", "not valid YAML"),
        )
    ),
]

HEAD = "base_model: anchor\nmodels:\n  - model: anchor"
MISSPELT = [
    call("align ancor donor out", "did you mean './anchor'?"),
    call("align anchor ./doner out", "did you mean './donor'?"),
    call("align anchor wole.gguf out", "did you mean './whole.gguf'?"),
    call("evaluate ancor --data text.txt", "did you mean './anchor'?"),
    call("evaluate anchor --data texts.txt", "did you mean './text.txt'?"),
    call("measure ancor/ --data self --out out", "did you mean './anchor'?"),
    call("polish anchor out --teachers doner", "did you mean './donor'?"),
    call("check recipes.yml", "did you mean './recipe.yml'?"),
    call("doctor recipes.yml", "did you mean './recipe.yml'?"),
    call("inspect recipes.yml", "did you mean './recipe.yml'?"),
    call("inspect ./anchor/model.safetensor", "model.safetensor: no such directory"),
    call("inspect folder/nowhere.yml", "folder/nowhere.yml: no such file; name a recipe"),
    call("barrier anchor donor --data text.txt --save doner", "did you mean './donor'?"),
    in_recipe(
        "misspelt base", HEAD, HEAD.replace("anchor", "ancor"), "ancor: no such directory", "'./anchor'?", faults=2
    ),
    in_recipe("misspelt donor", "model: donor", "model: doner", "doner: no such directory", "did you mean './donor'?"),
    in_recipe("adapter that is none", "model: donor\n", "model: donor+anchor\n", "there is no LoRA adapter"),
    in_recipe("file for a model", "model: donor", "model: donor/model.safetensors", "is a file", "directory"),
    in_recipe("model that steers a terminal", "model: donor", 'model: "gone\\u202Egpj"', "gpj: no such directory"),
    of_donor("{weight: 0.5, finetuned_from: ./gone}", "gone: no such directory"),
    at_top("tokenizer_source: ./doner", "./doner: no such directory", "did you mean './donor'?"),
    at_top("tokenizer: {source: ./doner}", "./doner: no such directory"),
]

RECIPES = [*KEYS, *PARAMETERS, *STRUCTURE, *CAUSES, *OF_MERGEKIT, *NO_RECIPES, *MISSPELT]
