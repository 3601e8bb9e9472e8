"""Ways to spoil good inputs, and the rows of the table of bad inputs (`bad_inputs.py`).

The current folder is a copy of good inputs (`good_inputs` in `test_bad_inputs.py`), which each row spoils. Nothing here
imports an internal module of the package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import rotation_merge as rm

WEIGHTS, CONFIG = "model.safetensors", "config.json"

RECIPE = """merge_method: rotation_merge
base_model: anchor
models:
  - model: anchor
    parameters: {weight: 0.5}
  - model: donor
    parameters: {weight: 0.5}
parameters:
  delegate: linear
dtype: float32
"""
ANCHORS, DONORS = "{weight: 0.5}\n  -", "{weight: 0.5}\np"
"""In the recipe, the parameters of the anchor and those of the donor, with what follows them."""
MODELS = RECIPE[RECIPE.index("models:") : RECIPE.index("dtype:")]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 40, "max_position_embeddings": 32}

Step = Callable[[], object]
BOTH = ("check", "merge")


@dataclass(frozen=True)
class Row:
    """A bad input.

    Attributes:
        name: what is bad.
        words: what its line holds, whichever way it is given.
        spoil: makes it from good inputs.
        recipe: how it is given as a recipe: to `check`, to `merge` (mergekit-yaml), or to both.
        commands: command lines of `rotation-merge` that are given it.
        python: a call that is given it.
        flags: of mergekit-yaml.
        out: what mergekit-yaml is asked to write.
        faults: how many `check` tells of; one of them holds the words.
        hub: whether the donor is published, and asked for from the hub.
    """

    name: str
    words: tuple[str, ...]
    spoil: Step = lambda: None
    recipe: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    python: Callable[[], object] | None = None
    flags: tuple[str, ...] = ()
    out: str = "out"
    faults: int = 1
    hub: bool = False


def model(kind: str, folder: str | Path, seed: int = 0, **changes: Any) -> None:
    """A tiny random checkpoint of a transformers class, such as `LlamaForCausalLM`."""
    model_class = getattr(transformers, kind)
    sizes = {"num_key_value_heads": 2} if "Llama" in kind else {}
    torch.manual_seed(seed)
    module = model_class(model_class.config_class(**{**SIZES, **sizes, **changes}))
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    module.save_pretrained(folder)


# --- spoiling ----------------------------------------------------------------------------------------------------


def step(spoil: Callable[..., object]) -> Callable[..., Step]:
    """A function that spoils the current folder, as one that gives the step of doing so."""
    return partial(partial, spoil)


def both(*steps: Step) -> Step:
    return lambda: [spoil() for spoil in steps]


@step
def in_folder(spoil: Step, folder: str | Path = "donor") -> None:
    """Spoil a folder by a step that spoils the current one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        spoil()


@step
def edit(old: str, new: str) -> None:
    """Replace a text of the recipe."""
    recipe = Path("recipe.yml").read_text()
    assert old in recipe, old
    Path("recipe.yml").write_text(recipe.replace(old, new, 1))


@step
def tensors(change: Callable[[dict[str, Tensor]], object], place: str = f"donor/{WEIGHTS}") -> None:
    """Other tensors in a checkpoint, or in another file."""
    stored = load_file(place)
    change(stored)
    save_file(stored, place, {"format": "pt"})


@step
def config(folder: str | Path = "donor", file: str = CONFIG, /, **changes: Any) -> None:
    """Other entries of a config; None leaves one out."""
    path = Path(folder, file)
    entries = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))


@step
def put(name: str, content: str | bytes = "") -> None:
    """A file with this content."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@step
def copied(source: str, *targets: str) -> None:
    """Copies of a file."""
    for target in targets:
        Path(target).parent.mkdir(exist_ok=True)
        shutil.copy(source, target)


@step
def gone(name: str) -> None:
    """Remove a file or folder."""
    shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


def folder_for(name: str) -> Step:
    """A folder in the place of a file."""
    return both(gone(name), Path(name).mkdir)


@step
def bytes_of(name: str, change: Callable[[bytes], bytes]) -> None:
    Path(name).write_bytes(change(Path(name).read_bytes()))


@step
def another(kind: str, folder: str = "donor", **changes: Any) -> None:
    """Another model in the place of one."""
    shutil.rmtree(folder)
    model(kind, folder, 2, **changes)


@step
def adapter(folder: str, base: str = "org/base") -> None:
    """An adapter on one map of the first layer."""
    Path(folder).mkdir(exist_ok=True)
    entries = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 2}
    Path(folder, "adapter_config.json").write_text(json.dumps({**entries, "target_modules": ["up_proj"]}))
    key = "base_model.model.model.layers.0.mlp.up_proj"
    factors = {f"{key}.lora_A.weight": torch.ones(2, 32), f"{key}.lora_B.weight": torch.ones(48, 2)}
    save_file(factors, Path(folder, "adapter_model.safetensors"))


@step
def tokenizer(folder: str, *words: str) -> None:
    """A tokenizer that knows these words."""
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, words[0])).save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


# --- rows --------------------------------------------------------------------------------------------------------


def in_recipe(name: str, old: str, new: str, *words: str, **more: Any) -> Row:
    """A text of the recipe replaced by another."""
    return Row(name, words, edit(old, new), **{"recipe": BOTH, **more})


def misspelt(old: str, new: str) -> Row:
    return in_recipe(f"{new} for {old}", old, new, new, f"did you mean '{old}'")


def at_top(text: str, *words: str, **more: Any) -> Row:
    """A line more at the top of the recipe."""
    return in_recipe(text, "dtype:", f"{text}\ndtype:", *words, **more)


def option(text: str, *words: str, **more: Any) -> Row:
    """A line more under the recipe's parameters."""
    return in_recipe(text, "delegate: linear", f"delegate: linear\n  {text}", *words, **more)


def of_anchor(text: str, *words: str, **more: Any) -> Row:
    return in_recipe(f"anchor: {text}", ANCHORS, f"{text}\n  -", *words, **more)


def of_donor(text: str, *words: str, **more: Any) -> Row:
    return in_recipe(f"donor: {text}", DONORS, f"{text}\np", *words, **more)


def models(text: str, *words: str, **more: Any) -> Row:
    """Something in the place of the recipe's models and parameters."""
    return in_recipe(text, MODELS, f"{text}\n", *words, **more)


def in_donor(name: str, spoil: Step, *words: str, **more: Any) -> Row:
    """A checkpoint that recipe, `align` and Python refuse alike."""
    ways = {"recipe": BOTH, "commands": ("align anchor donor out",), "python": lambda: rm.align("anchor", "donor")}
    return Row(name, words, spoil, **{**ways, **more})


def call(line: str, *words: str, spoil: Step = lambda: None) -> Row:
    """A command line."""
    return Row(line, words, spoil, commands=(line,))


def python(name: str, function: Callable[[], object], *words: str, spoil: Step = lambda: None) -> Row:
    """A call from Python, whose line names no option as the command line spells it."""
    return Row(name, words, spoil, python=function)
