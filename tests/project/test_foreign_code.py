"""Code that comes with a checkpoint is never run: no Python file of its repository, nothing out of a pickle."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import app
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts.run_yaml import main as mergekit_yaml
from plugin_support import Evil, make, recipe_for, state, write_recipe

PACKAGE = Path(__file__).resolve().parents[2] / "rotation_merge"


@pytest.fixture
def bench(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A folder with anchor, donor and data; what is run there leaves a file `ran`."""
    for model in pair:
        shutil.copytree(model, tmp_path / model.name)
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(40).view(2, 20)}, tmp_path / "data.safetensors")
    write_recipe(recipe_for("linear", tmp_path / "anchor", tmp_path / "donor"), tmp_path / "recipe.yml")
    return tmp_path


def own_class(bench: Path) -> None:
    """The donor's class stands in a file of its own, as hub repositories have it."""
    path = bench / "donor" / "config.json"
    config = {**json.loads(path.read_text()), "model_type": "own", "architectures": ["Own"]}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModel": "evil.Own", "AutoModelForCausalLM": "evil.Own"}
    path.write_text(json.dumps(config))
    evil(bench)


def own_class_of_a_known_type(bench: Path) -> None:
    """As before, and the type is one that transformers knows."""
    path = bench / "donor" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoConfig": "evil.Config"}}))
    evil(bench)


def own_tokenizer(bench: Path) -> None:
    """The anchor's tokenizer stands in a file of its own; the vocabularies differ, so tokenizers are looked at."""
    for name in ("anchor", "donor"):
        settings = {"auto_map": {"AutoTokenizer": ["evil.Own", "evil.Own"]}, "tokenizer_class": "Own"}
        (bench / name / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.rmtree(bench / "donor")
    make("llama", bench / "donor", vocab_size=44)
    (bench / "donor" / "tokenizer_config.json").write_text((bench / "anchor" / "tokenizer_config.json").read_text())
    recipe = recipe_for("linear", bench / "anchor", bench / "donor", residual="permutation", exclude="embed,lm_head")
    write_recipe(recipe, bench / "recipe.yml")
    evil(bench)


def evil(bench: Path) -> None:
    for name in ("anchor", "donor"):
        code = f"open({str(bench / 'ran')!r}, 'w')\nclass Own: pass\nclass Config: pass\n"
        (bench / name / "evil.py").write_text(code)


def pickled(bench: Path) -> None:
    (bench / "donor" / "model.safetensors").unlink()
    content = {**state(bench / "anchor"), "more": Evil(bench / "ran")}
    torch.save(content, bench / "donor" / "pytorch_model.bin")


def old_pickle(bench: Path) -> None:
    (bench / "donor" / "model.safetensors").unlink()
    (bench / "donor" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(bench / "ran")))


def pickled_shard(bench: Path) -> None:
    """The second of two shards."""
    (bench / "donor" / "model.safetensors").unlink()
    tensors = state(bench / "anchor")
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    torch.save(tensors, bench / "donor" / names[0])
    torch.save({"more": Evil(bench / "ran"), "x": torch.ones(2)}, bench / "donor" / names[1])
    index = {"metadata": {}, "weight_map": {**dict.fromkeys(tensors, names[0]), "x": names[1]}}
    (bench / "donor" / "pytorch_model.bin.index.json").write_text(json.dumps(index))


SPOILT = [own_class, own_class_of_a_known_type, own_tokenizer, pickled, old_pickle, pickled_shard]
HARMLESS = {own_class_of_a_known_type: "it is read by transformers' own class"}
"""What is used as if the file were not there."""

COMMANDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "check": (app, ("check", "recipe.yml")),
    "inspect": (app, ("inspect", "donor")),
    "inspect a recipe": (app, ("inspect", "recipe.yml")),
    "align": (app, ("align", "anchor", "donor", "out")),
    "align without OUT": (app, ("align", "anchor", "donor")),
    "verify": (app, ("verify", "donor", "donor")),
    "barrier": (app, ("barrier", "anchor", "donor", "--data", "data.safetensors", "--points", "3")),
    "align --learn": (
        app,
        ("align", "anchor", "donor", "--learn", "--data", "data.safetensors", "--alignment", "file", "--steps", "1"),
    ),
    "report": (app, ("inspect", "donor", "--report")),
    "fingerprint": (app, ("inspect", "donor", "--fingerprint")),
    "merge": (mergekit_yaml, ("recipe.yml", "out", "--quiet")),
    "lazy merge": (mergekit_yaml, ("recipe.yml", "out", "--quiet", "--lazy-unpickle")),
}
PATHS = ("anchor", "donor", "out", "recipe.yml", "data.safetensors", "file")


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_what_comes_with_a_checkpoint(
    bench: Path, name: str, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(bench)
    monkeypatch.setenv("HF_MODULES_CACHE", str(bench / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    LoaderCache.loaders.clear()
    program, arguments = COMMANDS[name]
    words = [str(bench / word) if word in PATHS else word for word in arguments]
    done = CliRunner().invoke(program, words, input="y\ny\n")
    assert not (bench / "ran").exists()
    assert not (bench / "modules").exists()
    assert "Traceback" not in done.output
    assert isinstance(done.exception, SystemExit | None), done.exception
    print(done.exit_code, done.output)
    if name != "report" and spoil not in (*HARMLESS, own_tokenizer):
        assert done.exit_code in (1, 2), done.output
        lines = [line for line in done.output.splitlines() if "Error: " in line or line.startswith(str(bench))]
        assert len(lines) == 1, done.output
        assert "donor" in lines[0]


@pytest.mark.slow
def test_only_what_the_user_said_is_handed_on() -> None:
    """`trust_remote_code` is nowhere set; where it is passed, it is mergekit's option or our argument of that name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keywords = node.keywords if isinstance(node, ast.Call) else []
            values = [k.value for k in keywords if k.arg == "trust_remote_code"]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assert "trust_remote_code" not in " ".join(map(ast.unparse, targets)), path
            found += [(path.name, ast.unparse(value)) for value in values]
    assert found
    for name, value in found:
        assert value in ("self.options.trust_remote_code", "options.trust_remote_code", "trust_remote_code", "False"), (
            name
        )


@pytest.mark.slow
def test_pickles_are_only_read_as_weights() -> None:
    """Every torch.load says weights_only=True; nothing else unpickles, but cluster workers what the command sent."""
    loads = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [str(getattr(node, "module", ""))]
                allowed = {"pickle", "cloudpickle", "joblib"} if path == PACKAGE / "workers.py" else set()
                assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(modules) - allowed, path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("pickle.load", "joblib.load")):
                raise AssertionError(f"{path}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                loads += 1
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("weights_only") == "True", f"{path}: {ast.unparse(node)}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    assert loads
