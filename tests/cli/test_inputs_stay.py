"""No option and no key replaces what the same run reads: every one that names a file or folder to write, against every
input, taken from the commands' own parameters and the table of the recipe's keys."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from cli_support import COMMANDS, app, run
from click.testing import CliRunner
from plugin_support import one_error, recipe_for, twin, write_recipe

from rotation_merge import RotationMergeError
from rotation_merge.cli.paths import MODEL, Reads, ReadsModelsAndWrites, Word, Writes
from rotation_merge.config import NEITHER, READ, WRITTEN, Kind
from rotation_merge.files import FILE, FOLDER
from rotation_merge.mergekit_plugin.keys import BY_NAME


def parameters(name: str) -> list[click.Parameter]:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    return [parameter for parameter in command.params if parameter.name != "help"]


NUMBERS = (click.types.IntParamType, click.types.FloatParamType, click.types.BoolParamType, click.Choice)
"""Values that name nothing; ranges of numbers are among them."""

FLAGS_THAT_WRITE = {
    ("evaluate", "keep"): "evaluation.json beside each model",
    ("doctor", "mend"): "files of the folder that it looks at",
}
OTHER_FLAGS = {
    *("as_json", "force", "untie", "verbose", "half", "verify", "fingerprint", "report", "draft", "methods"),
    *("architectures", "double", "probabilities", "anyway", "merge_lora", "permutations", "checkpointing", "by_layer"),
    *("offline", "with_data", "private", "yes", "no_weights", "learn"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_known_to_read_to_write_or_neither(name: str) -> None:
    """A new one that takes text gets one of the types of `cli/paths.py`; a new flag stands in one of the two lists."""
    for parameter in parameters(name):
        if isinstance(parameter.type, click.types.BoolParamType):
            known = (name, parameter.name) in FLAGS_THAT_WRITE or parameter.name in OTHER_FLAGS
            assert known, f"{name} --{parameter.name}: does it write a file?"
        elif not isinstance(parameter.type, NUMBERS):
            known = isinstance(parameter.type, Word | Reads | Writes | ReadsModelsAndWrites)
            assert known, f"{name} {parameter.name}: give it a type of rotation_merge/cli/paths.py"
    written = [p for p in parameters(name) if hasattr(p.type, "outputs")]
    assert not written or "force" in [p.name for p in parameters(name)] or name == "demo"


def test_every_kind_of_value_is_known_to_be_read_written_or_neither() -> None:
    kinds = {key.option.kind for key in BY_NAME.values() if isinstance(key.option.kind, Kind)}
    assert {kind.role for kind in kinds} <= {READ, WRITTEN, NEITHER}
    assert {name for name, key in BY_NAME.items() if key.option.kind is bool or "true" in key.option.literals} == {
        "save_alignment",  # writes beside the model
        *("scaling", "shift_head", "untie", "prove"),  # do not
    }


# --- commands ----------------------------------------------------------------------------------------------------


def folder(path: Path) -> Path:
    """What is taken for a model, as far as anything looks before it writes."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights of " + path.name.encode())
    return path


def make(place: Path, kind: str) -> Path:
    """An input of a kind at a place."""
    if kind == "model":
        return folder(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{kind}: {place.name}")
    return place


def snapshot(root: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_symlink() or path.is_file()]
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def writes_of(parameter: click.Parameter) -> Writes:
    kind: Any = parameter.type.writes if isinstance(parameter.type, ReadsModelsAndWrites) else parameter.type
    assert isinstance(kind, Writes)
    return kind


def kind_of(parameter: click.Parameter) -> str:
    return parameter.type.kind if isinstance(parameter.type, Reads) else MODEL.kind


def relations(written: Writes, kind: str) -> Iterator[tuple[str, str, str]]:
    """How an output may lie to an input: a name for it, the place of the input, and what the option is given."""
    if written.within:
        yield "as", f"in/{written.within}", "in"
    else:
        yield "as", "in/it", "in/it"
        yield "as a link", "in/it", "link"
        yield "with another spelling", "in/it", "in/../in/./it"
    if kind == "model" and not written.within:
        yield "inside", "in/it", "in/it/model.safetensors" if written.kind == FILE else "in/it/sub"
        yield "inside a link", "in/it", "link/config.json" if written.kind == FILE else "link/sub"
        if not written.beside:
            yield "inside, new", "in/it", "in/it/new"
    if written.kind == FOLDER:
        yield "around", "in/it", "in"
        yield "far around", "in/deep/er/it", "in"
    for ending in written.work:
        inner = f"/{written.within}" if written.within else ""
        yield f"what is kept under {ending}", f"in/it{inner}{ending}", "in/it"
        yield f"in what is kept under {ending}", f"in/it{inner}{ending}/deep/it", "in/it"


def cases() -> Iterator[Any]:
    for name in COMMANDS:
        outputs, inputs = ([p for p in parameters(name) if hasattr(p.type, kind)] for kind in ("outputs", "inputs"))
        for output, read in itertools.product(outputs, inputs):
            for relation, place, value in relations(writes_of(output), kind_of(read)):
                label = f"{name} {output.name} against {read.name}: {relation}"
                yield pytest.param(name, output, read, place, value, id=label)


def words_for(parameter: click.Parameter, root: Path, given: dict[str, str]) -> list[str]:
    """What is given for a parameter that takes text: inputs that are there, outputs that are not."""
    kind, name, at = parameter.type, str(parameter.name), root / "other" / str(parameter.name)
    if isinstance(kind, ReadsModelsAndWrites):
        models = [given.get(name) or str(make(at, "model")), str(make(root / "other" / "b", "model"))]
        return [*models, given.get("out of models", str(root / "new"))]
    if isinstance(kind, Reads):
        return [given.get(name) or str(make(at, kind.kind))]
    if isinstance(kind, Writes) and kind.within and name not in given:
        at.mkdir(parents=True)
        return [str(at)]
    if isinstance(kind, Writes):
        return [given.get(name, str(root / "new" / name))]
    return ["org/name"] if isinstance(parameter, click.Argument) else []


def call(name: str, root: Path, given: dict[str, str]) -> list[str]:
    """A call of a command, every text parameter given."""
    arguments: list[str] = []
    for parameter in parameters(name):
        flag = parameter.opts[:1] if isinstance(parameter, click.Option) else []
        arguments += [word for value in words_for(parameter, root, given) for word in (*flag, value)]
    return arguments


@pytest.mark.parametrize(("name", "output", "read", "place", "value"), list(cases()))
def test_no_option_replaces_an_input(
    name: str, output: click.Parameter, read: click.Parameter, place: str, value: str, tmp_path: Path
) -> None:
    """With --force; whatever is read stays, and the error names it."""
    path = make(tmp_path / place, kind_of(read))
    (tmp_path / "link").symlink_to(path)
    out = "out of models" if isinstance(output.type, ReadsModelsAndWrites) else str(output.name)
    named = f"a={path}" if read.name == "compare" else str(path)
    arguments = call(name, tmp_path, {str(read.name): named, out: str(tmp_path / value)})
    before = snapshot(tmp_path)
    force = ["--force"] if "force" in [p.name for p in parameters(name)] else []
    result = run(name, *arguments, *force)
    assert result.exit_code == 2, result.output
    error = one_error(result.output)
    assert "one of the inputs" in error, error
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_the_table_is_not_empty() -> None:
    tried = {(case.values[0], case.values[1].name) for case in cases()}
    assert tried >= {("align", "out"), ("align", "alignment_file"), ("carry", "out"), ("polish", "out")}
    assert tried >= {("merge", "models"), ("measure", "out"), ("barrier", "plot"), ("barrier", "save")}


# --- recipes -----------------------------------------------------------------------------------------------------


def recipe(base: Path, donor: Path, **parameters: Any) -> dict[str, Any]:
    models = [{"model": str(base)}, {"model": str(donor), "parameters": {}}]
    settings = {"weight": 0.5, **parameters}
    return {"merge_method": "rotation_merge", "base_model": str(base), "models": models, "parameters": settings}


def of_donor(a: Path, b: Path, delegate: str = "linear", **settings: Any) -> dict[str, Any]:
    content = recipe(a, b, delegate=delegate)
    content["models"][1]["parameters"].update(settings)
    return content


def sliced(base: Path, donor: Path) -> dict[str, Any]:
    sources = [{"model": str(model), "layer_range": [0, 1]} for model in (base, donor)]
    content = {**recipe(base, donor), "slices": [{"sources": sources}]}
    del content["models"]
    return content


NAMED = {
    "base_model": ("model", lambda a, b, it: recipe(it, b)),
    "model": ("model", lambda a, b, it: recipe(a, it)),
    "adapter": ("model", lambda a, b, it: recipe(a, Path(f"{b}+{it}"))),
    "base of an adapter": ("model", lambda a, b, it: recipe(a, Path(f"{it}+{b}"))),
    "a slice": ("model", lambda a, b, it: sliced(a, it)),
    "tokenizer_source": ("model", lambda a, b, it: {**recipe(a, b), "tokenizer_source": str(it)}),
    "tokenizer": ("model", lambda a, b, it: {**recipe(a, b), "tokenizer": {"source": str(it)}}),
    "a token": ("model", lambda a, b, it: {**recipe(a, b), "tokenizer": {"tokens": {"<s>": {"source": str(it)}}}}),
    "finetuned_from": ("model", lambda a, b, it: of_donor(a, b, finetuned_from=str(it))),
    "alignment": ("file", lambda a, b, it: of_donor(a, b, alignment=str(it))),
    "statistics": ("file", lambda a, b, it: of_donor(a, b, "regmean", statistics=str(it))),
    "data": ("file", lambda a, b, it: of_donor(a, b, "refit", data=str(it))),
    "data of all": ("file", lambda a, b, it: recipe(a, b, delegate="refit", data=str(it))),
}
"""Where a recipe names what it reads; a key that reads and is not here fails the next test."""

PLACES = {
    "OUT as": ("in/it", "in/it"),
    "OUT as a link": ("in/it", "link"),
    "OUT around": ("in/deep/it", "in"),
    "OUT with its unfinished work": ("out.matching.unfinished/it", "out"),
    "OUT inside": ("in/it", "in/it/sub"),
}


def test_every_key_that_reads_or_writes_is_tried() -> None:
    role = {name: key.option.kind.role for name, key in BY_NAME.items() if isinstance(key.option.kind, Kind)}
    assert {name for name in role if role[name] == READ} <= set(NAMED)
    assert {name for name in role if role[name] == WRITTEN} == {"save_alignment"}


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("relation", PLACES)
def test_no_key_replaces_an_input(named: str, relation: str, tmp_path: Path) -> None:
    kind, build = NAMED[named]
    place, out = PLACES[relation]
    if kind == "file" and "inside" in relation:
        pytest.skip("nothing lies in a file")
    path = make(tmp_path / place, kind)
    (tmp_path / "link").symlink_to(path)
    a, b = folder(tmp_path / "other" / "a"), folder(tmp_path / "other" / "b")
    found = build(a, b, path)
    text = write_recipe(found, tmp_path / "recipe.yml")
    before = snapshot(tmp_path)
    result = mergekit(text, tmp_path / out)
    assert result.exit_code == 2, result.output
    error = one_error(result.output)
    assert "one of the inputs" in error, error
    assert snapshot(tmp_path) == before


def mergekit(path: Path, out: Path) -> Any:
    from mergekit.scripts.run_yaml import main

    return CliRunner().invoke(main, [str(path), str(out), "--quiet"])


FOREIGN = {"maps": "maps", "maps of the second donor": "maps", "a file of align": "maps", "beside the model": True}


@pytest.mark.parametrize("what", FOREIGN)
def test_keys_replace_nothing_but_what_they_wrote(what: str, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    out, name = tmp_path / "out", FOREIGN[what]
    victim, donors = out / ("alignment.safetensors" if name is True else "maps"), [pair[1]]
    if what == "maps of the second donor":
        donors, victim = [pair[1], twin(pair[0], tmp_path / "third", 5)], out / "maps-2"
    out.mkdir()
    victim.write_text("mine")
    if what == "a file of align":
        assert run("align", *pair, "--alignment", victim, "--force").exit_code == 0
    text = write_recipe(recipe_for("linear", pair[0], *donors, save_alignment=name), tmp_path / "recipe.yml")
    before = snapshot(tmp_path)
    result = mergekit(text, out)
    assert result.exit_code == 2
    assert f"{victim}: already exists" in one_error(result.output)
    assert snapshot(tmp_path) == before
    victim.unlink()
    for _ in range(2 if what == "maps" else 0):
        result = mergekit(text, out)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["../maps", "/tmp/maps", "in/../../maps", ".", "config.json"])
def test_an_alignment_is_saved_inside_the_output(name: str, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """A recipe from elsewhere writes nowhere else, and no file of the merge; check calls it a fault, too."""
    text = write_recipe(recipe_for("linear", *pair, save_alignment=name), tmp_path / "recipe.yml")
    before = snapshot(tmp_path)
    result = mergekit(text, tmp_path / "out")
    assert result.exit_code == 2
    if name == "config.json":
        assert "'config.json' is a file of the merged model" in one_error(result.output)
    else:
        for output in (one_error(result.output), run("check", text).output):
            assert "is not a name inside the merged model's folder" in output
    assert snapshot(tmp_path) == before


def test_from_python_and_from_several_recipes(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    from mergekit.scripts.multimerge import main

    from rotation_merge.mergekit_plugin.run import merge_recipe

    text = yaml.safe_dump(recipe_for("linear", *pair))
    before = snapshot(pair[0].parent)
    with pytest.raises(RotationMergeError, match="holds one of the inputs"):
        merge_recipe(text, str(pair[0].parent))
    with pytest.raises(RotationMergeError, match="is one of the inputs"):
        merge_recipe(text, str(pair[1]))
    many = write_recipe(f"name: first\n{text}", tmp_path / "many.yml")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "first").symlink_to(pair[1])
    result = CliRunner().invoke(main, [str(many), "-I", str(tmp_path / "work"), "--no-lazy"])
    assert "one of the inputs" in one_error(result.output)
    assert snapshot(pair[0].parent) == before


def test_options_replace_nothing_without_force(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """Nor in places that are not named."""
    third = twin(pair[0], tmp_path / "third", 5)
    (third / "statistics.safetensors").write_text("mine")
    assert "statistics.safetensors: is inside one of" in one_error(run("measure", third, "--data", "self").output)
    assert (third / "statistics.safetensors").read_text() == "mine"
    (tmp_path / "barrier.json").write_text("[]")
    arguments = ["barrier", *pair, "--data", "self", "--save", tmp_path]
    assert "barrier.json: already exists" in one_error(run(*arguments).output)
    (tmp_path / "path.svg").write_text("mine")
    arguments = ["barrier", *pair, "--data", "self", "--plot", tmp_path / "path.svg"]
    assert "path.svg: already exists" in one_error(run(*arguments).output)
