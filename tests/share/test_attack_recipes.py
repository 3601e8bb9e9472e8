"""Recipes made to harm: `pull` takes none that names a path outside its folder, or that is no text."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import run
from hub_support import Hub, publish_as_push_does
from plugin_support import one_error

from rotation_merge import RotationMergeError
from rotation_merge.config import FILE, FOLDER, MODEL, NEW_FILE
from rotation_merge.mergekit_plugin.recipe.names import BY_NAME
from rotation_merge.share.paths import check_paths

REPO = "org/evil"
A, B = "org/a@main", "org/b@main+org/lora@v1"


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe as `push` writes it, but for some of its entries."""
    models = [{"model": A}, {"model": B, "parameters": {"alignment": "org/m/alignment/0-x.safetensors@0f"}}]
    return {
        "merge_method": "rotation_merge",
        "base_model": A,
        "models": models,
        "parameters": {"delegate": "regmean", "statistics": "statistics-0.safetensors", "data": "datasets/o/d/x.txt@1"},
        "tokenizer": {"source": "base", "tokens": {"</s>": {"source": A}}},
        "chat_template": "/{{ messages }}/../",
        "dtype": "bfloat16",
        **changes,
    }


def refuse(text: str) -> str:
    with pytest.raises(RotationMergeError) as error:
        check_paths(text, "recipe.yml")
    assert str(error.value).isprintable()
    return str(error.value)


def test_what_push_writes_is_taken() -> None:
    check_paths(yaml.safe_dump(recipe()), "recipe.yml")
    for entry in (
        {"save_alignment": True},
        {"save_alignment": "maps.safetensors"},
        {"data": "demo:c"},
        {"data": "self"},
    ):
        check_paths(yaml.safe_dump(recipe(parameters=entry)), "recipe.yml")
    two = [recipe(name="first"), recipe(base_model="first", slices=[{"sources": [{"model": "first"}]}])]
    check_paths(yaml.safe_dump_all(two), "recipe.yml")


OUT = {
    "absolute": "/etc/passwd",
    "above": "../x.safetensors",
    "above, later": "a/../../x.safetensors",
    "home": "~/.bashrc",
    "user": "~root/x",
    "beside": "other/x.safetensors",
    "deep beside": "home/me/x.safetensors",
    "hidden": ".bashrc",
    "hidden below": "org/m/.git/config@main",
    "here": "./x.safetensors",
    "drive": "C:\\x",
    "backslash": "..\\x",
    "control": "x\x1b]0;x\x07",
}
KEYS = [name for name, key in BY_NAME.items() if key.option.kind in (FILE, NEW_FILE, FOLDER, MODEL)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("what", OUT)
def test_no_key_leads_out(what: str, key: str) -> None:
    """Every parameter that names a file, a folder or a model: under the recipe or a model, in a list or a filter."""
    if what == "beside" and BY_NAME[key].option.kind is MODEL:
        pytest.skip("org/name")
    name = OUT[what]
    for value in (name, [name], [{"filter": "mlp", "value": name}]):
        shown = refuse(yaml.safe_dump(recipe(parameters={key: value})))
        assert f"parameters.{key}" in shown
        refuse(yaml.safe_dump(recipe(models=[{"model": A, "parameters": {key: value}}])))
        refuse(yaml.safe_dump(recipe(slices=[{"sources": [{"model": A, "parameters": {key: value}}]}])))
    assert "ask its publisher" in shown


PLACES: dict[str, Any] = {
    "base_model": lambda name: {"base_model": name},
    "model": lambda name: {"models": [{"model": name}]},
    "model in parts": lambda name: {"models": [{"model": {"model": {"path": name}}}]},
    "adapter": lambda name: {"models": [{"model": f"org/a+{name}"}]},
    "adapter in parts": lambda name: {"models": [{"model": {"model": "org/a", "lora": {"path": name}}}]},
    "slice": lambda name: {"slices": [{"sources": [{"model": name, "layer_range": [0, 1]}]}]},
    "module": lambda name: {"modules": {"text": {"models": [{"model": name}]}}},
    "tokenizer": lambda name: {"tokenizer": {"source": name}},
    "tokenizer_source": lambda name: {"tokenizer_source": name},
    "token": lambda name: {"tokenizer": {"tokens": {"a": {"source": {"kind": "model_token", "model": name}}}}},
    "of multi": lambda name: {"name": name},
    "of nothing that we know": lambda name: {"parameters": {"anything": [{"at": {"all": name}}]}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["absolute", "above", "home", "drive", "backslash"])
def test_no_model_lies_outside(what: str, place: str) -> None:
    refuse(yaml.safe_dump(recipe(**PLACES[place](OUT[what]))))


TEXTS = {
    "deep": b"a: " + b"[" * 5000,
    "deep mappings": b"".join(b" " * n + b"a:\n" for n in range(2000)),
    "not UTF-8": b"merge_method: \xff\n",
    "no YAML": b"a: [",
    "no mapping": b"- a\n",
    "bytes": b"base_model: !!binary " + base64.b64encode(b"../x") + b"\n",
    "a set": b"parameters: {data: !!set {/etc/passwd: null}}\n",
    "a date": b"base_model: 2020-01-01\n",
    "python": b"a: !!python/object/apply:os.system ['touch PWNED']\n",
    "an alias of itself": b"a: &a [*a]\n",
    "laughs": b"".join(b"x%d: &x%d [%s]\n" % (n, n, b"*x%d, " % (n - 1) * 9 if n else b"1") for n in range(12)),
    "control": b"a: \x1b[2J\n",
}


@pytest.mark.parametrize("file", ["recipe.yml", "mergekit_config.yml"])
@pytest.mark.parametrize("what", [*TEXTS, "a path"])
def test_pull_leaves_nothing_of_it(
    what: str, file: str, home: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = TEXTS.get(what) or yaml.safe_dump(recipe(parameters={"save_alignment": "../home/victim.cfg"})).encode()
    publish_as_push_does(home, REPO, {"config.json": b"{}", "model.safetensors": b"", file: text})
    asked = len(home.asked)
    done = run("pull", REPO, tmp_path / "out")
    assert done.exit_code == 2
    line = one_error(done.output)
    assert file in line
    assert line.isprintable()
    assert list(tmp_path.iterdir()) == []
    assert not any("model.safetensors" in line for line in home.asked[asked:]), "weights come after recipes"


@pytest.mark.parametrize("what", [name for name in TEXTS if name not in ("bytes", "a set", "a date")])
@pytest.mark.parametrize("command", [("check",), ("inspect",)])
def test_commands_end_in_one_line(command: tuple[str, ...], what: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yml").write_bytes(TEXTS[what])
    done = run(*command, tmp_path / "recipe.yml")
    assert done.exit_code in (1, 2)
    assert "Traceback" not in done.output
    assert "RecursionError" not in done.output
