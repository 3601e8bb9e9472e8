"""No option and no key replaces what the same run reads: every output against every input, taken from the commands' own
parameters and the table of the recipe's keys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from cli_support import COMMANDS, app, error_of, output_of
from plugin_support import files_of, merged, mergekit_yaml, one_error, recipe_for, twin, write_recipe
from programs import run as program

from rotation_merge import RotationMergeError
from rotation_merge.cli.command import Value
from rotation_merge.cli.paths import ADAPTER, Reads, Writes
from rotation_merge.config import Kind
from rotation_merge.files import FILE
from rotation_merge.mergekit_plugin.keys import BY_NAME
from rotation_merge.mergekit_plugin.run import merge_recipe
from rotation_merge.record import REPORT_FILE

Pair = tuple[Path, Path]
NUMBERS = (click.types.IntParamType, click.types.FloatParamType, click.Choice)
FLAGS = {
    *("as_json", "force", "untie", "verbose", "half", "verify", "fingerprint", "report", "draft", "methods", "learn"),
    *("architectures", "float64", "probabilities", "anyway", "merge_lora", "checkpointing", "by_layer", "offline"),
    *("with_data", "private", "yes"),
}
WRITING_FLAGS = {("evaluate", "keep"), ("doctor", "mend")}
"""Flags that write evaluation.json beside a model, or files of the folder that is looked at."""


def parameters(name: str) -> list[click.Parameter]:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    return [parameter for parameter in command.params if parameter.name != "help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_known_to_read_to_write_or_neither(name: str) -> None:
    """A new flag stands in one of the two lists."""
    for parameter in parameters(name):
        if isinstance(parameter.type, click.types.BoolParamType):
            assert (name, parameter.name) in WRITING_FLAGS or parameter.name in FLAGS, parameter.name
        elif not isinstance(parameter.type, NUMBERS) and parameter.name != "repo":
            assert isinstance(parameter.type, Value | Reads | Writes), parameter.name
    written = any(isinstance(p.type, Writes) for p in parameters(name))
    assert written == ("force" in [p.name for p in parameters(name)])


def test_every_key_is_known_to_be_read_written_or_neither() -> None:
    kinds = {name: option.kind for name, option in BY_NAME.items() if isinstance(option.kind, Kind)}
    assert {name for name, kind in kinds.items() if kind in ("a file", "a model")} <= set(NAMED)
    assert {name for name, kind in kinds.items() if kind in ("a folder", "a file to write")} == {"save_alignment"}
    flags = {name for name, option in BY_NAME.items() if option.kind is bool or "true" in option.literals}
    assert flags == {"save_alignment", "scaling", "shift_head", "untie", "prove"}


# --- commands --------------------------------------------------------------------------------------------------------


def make(place: Path, kind: str) -> Path:
    """An input of a kind at a place, as far as anything looks before it writes."""
    if kind != "model":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{kind}: {place.name}")
        return place
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"weights of " + place.name.encode())
    return place


def relations(written: Writes, kind: str) -> Iterator[tuple[str, str, str]]:
    """How an output may lie to an input: a name for it, the place of the input, and what the option is given."""
    if written.within:
        yield "as", f"in/{written.within}", "in"
    else:
        yield from (("as", "in/it", "in/it"), ("a link", "in/it", "link"), ("respelt", "in/it", "in/../in/./it"))
    if kind == "model" and not written.within:
        yield "inside", "in/it", "in/it/model.safetensors" if written.kind == FILE else "in/it/sub"
        yield "inside a link", "in/it", "link/config.json" if written.kind == FILE else "link/sub"
        if not written.beside:
            yield "inside, new", "in/it", "in/it/new"
    if written.kind in ("folder", ADAPTER):
        yield from (("around", "in/it", "in"), ("far around", "in/deep/er/it", "in"))
    for ending in written.work:
        inner = f"/{written.within}" if written.within else ""
        yield f"what is kept under {ending}", f"in/it{inner}{ending}", "in/it"
        yield f"in what is kept under {ending}", f"in/it{inner}{ending}/deep/it", "in/it"


def cases() -> Iterator[Any]:
    for name in COMMANDS:
        outputs, inputs = ([p for p in parameters(name) if isinstance(p.type, kind)] for kind in (Writes, Reads))
        for output, read in itertools.product(outputs, inputs):
            assert isinstance(output.type, Writes)
            assert isinstance(read.type, Reads)
            for relation, place, value in relations(output.type, read.type.name):
                label = f"{name} {output.name} against {read.name}: {relation}"
                yield pytest.param(name, output, read, place, value, id=label)


def word_for(parameter: click.Parameter, root: Path) -> str | None:
    """An input that exists, or an output that does not; None where an option names neither."""
    kind, at = parameter.type, root / "elsewhere" / str(parameter.name)
    if isinstance(kind, Reads):
        return str(make(at, kind.name))
    if isinstance(kind, Writes):
        return str(root / "elsewhere" if kind.within else root / "new" / str(parameter.name))
    return "org/name" if isinstance(parameter, click.Argument) else None


@pytest.mark.parametrize(("name", "output", "read", "place", "value"), list(cases()))
def test_no_option_replaces_an_input(
    name: str, output: click.Parameter, read: click.Parameter, place: str, value: str, tmp_path: Path
) -> None:
    """With --force, every parameter that takes a path given; whatever is read stays, and the error names it."""
    assert isinstance(read.type, Reads)
    path = make(tmp_path / place, read.type.name)
    (tmp_path / "link").symlink_to(path)
    words = {output.name: str(tmp_path / value), read.name: f"a={path}" if read.type.named else str(path)}
    arguments: list[str] = []
    for parameter in parameters(name):
        if (word := words.get(parameter.name) or word_for(parameter, tmp_path)) is not None:
            arguments += [*(parameter.opts[:1] if isinstance(parameter, click.Option) else []), word]
    before = files_of(tmp_path)
    assert "one of the inputs" in error_of(name, *arguments, "--force")
    assert files_of(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_words_for_data_name_no_file_where_models_do() -> None:
    for word in ("self", "synthetic", "demo:texts"):
        assert (Reads("data").inputs([word]), Reads("model").inputs([word])) == ([], [word])


def test_the_table_is_not_empty() -> None:
    outputs = "align out, align alignment, carry out, polish out, merge out, lora out, measure out, doctor out"
    tried = {f"{case.values[0]} {case.values[1].name}" for case in cases()}
    assert tried >= {*outputs.split(", "), "barrier plot", "barrier save"}


# --- recipes ---------------------------------------------------------------------------------------------------------


MODELS = "models:\n- {model: A}\n- {model: B, parameters: {}}\n"
RECIPE = f"merge_method: rotation_merge\nbase_model: A\n{MODELS}parameters: {{weight: 0.5}}\n"
SLICE = "slices: [{sources: [{model: A, layer_range: [0, 1]}, {model: IT, layer_range: [0, 1]}]}]\n"
NAMED = {
    "base_model": ("model", "A", "IT"),
    "model": ("model", "model: B", "model: IT"),
    "adapter": ("model", "model: B", "model: B+IT"),
    "base of an adapter": ("model", "model: B", "model: IT+B"),
    "a slice": ("model", MODELS, SLICE),
    "tokenizer_source": ("model", "parameters: {w", "tokenizer_source: IT\nparameters: {w"),
    "tokenizer": ("model", "parameters: {w", "tokenizer: {source: IT}\nparameters: {w"),
    "a token": ("model", "parameters: {w", "tokenizer: {tokens: {<s>: {source: IT}}}\nparameters: {w"),
    "finetuned_from": ("model", "parameters: {}", "parameters: {finetuned_from: IT}"),
    "alignment": ("file", "parameters: {}", "parameters: {alignment: IT}"),
    "statistics": ("file", "{weight: 0.5}", "{weight: 0.5, delegate: regmean, statistics: IT}"),
    "data": ("file", "{weight: 0.5}", "{weight: 0.5, delegate: refit, data: IT}"),
}
"""Where a recipe names what it reads; a key that reads and is not here fails a test above."""

PLACES = {
    "OUT as": ("in/it", "in/it"),
    "OUT as a link": ("in/it", "link"),
    "OUT around": ("in/deep/it", "in"),
    "OUT with its unfinished work": ("out.matching.unfinished/it", "out"),
    "OUT inside": ("in/it", "in/it/sub"),
}


@pytest.mark.parametrize(
    ("key", "place"),
    [(k, p) for k, p in itertools.product(NAMED, PLACES) if NAMED[k][0] == "model" or p != "OUT inside"],
)
def test_no_key_replaces_an_input(key: str, place: str, tmp_path: Path) -> None:
    (kind, old, new), (at, out) = NAMED[key], PLACES[place]
    path = make(tmp_path / at, kind)
    (tmp_path / "link").symlink_to(path)
    text = RECIPE.replace(old, new).replace("IT", str(path))
    for name in "AB":
        text = re.sub(rf"\b{name}\b", str(make(tmp_path / "elsewhere" / name, "model")), text)
    file = write_recipe(text, tmp_path / "recipe.yml")
    before = files_of(tmp_path)
    code, _, err = program("mergekit-yaml", str(file), str(tmp_path / out), "--quiet")
    assert code == 2
    assert "one of the inputs" in one_error(err)
    assert files_of(tmp_path) == before


def test_keys_replace_nothing_but_what_they_wrote(tmp_path: Path, pair: Pair) -> None:
    """Neither a file of the user's, nor of `align`, even where they stand beside an earlier merge."""
    out, donors = tmp_path / "out", (pair[1], twin(pair[0], tmp_path / "third", 5))
    output_of("align", *pair, "--alignment", out / "maps")
    (out / REPORT_FILE).write_text("{}")
    of_align = (out / "maps").read_bytes()
    for saved, name, content in (
        ("maps", "maps", of_align),
        ("maps", "maps-2", b"mine"),
        (True, "alignment.safetensors", b"mine"),
        ("maps", "maps", b"mine"),
    ):
        (out / "maps").unlink(missing_ok=True)
        (out / name).write_bytes(content)
        before = files_of(out)
        recipe = recipe_for("linear", pair[0], *donors, save_alignment=saved)
        assert f"{out / name}: already exists" in one_error(mergekit_yaml(recipe, out).output)
        assert files_of(out) == before
        (out / name).unlink()
    for _ in range(2):
        merged(recipe, out)


def test_from_python_and_from_several_recipes(tmp_path: Path, pair: Pair) -> None:
    text = yaml.safe_dump(recipe_for("linear", *pair))
    before = files_of(pair[0].parent)
    for out, problem in ((pair[0].parent, "holds one of the inputs"), (pair[1], "is one of the inputs")):
        with pytest.raises(RotationMergeError, match=problem):
            merge_recipe(text, str(out))
    many = write_recipe(f"name: first\n{text}", tmp_path / "many.yml")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "first").symlink_to(pair[1])
    _, _, err = program("mergekit-multi", str(many), "-I", str(tmp_path / "work"), "--no-lazy")
    assert "one of the inputs" in one_error(err)
    assert files_of(pair[0].parent) == before
