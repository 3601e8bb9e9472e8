"""The way into mergekit never hurts it: renamed parts, the switch, installation, the collector, fresh processes."""

from __future__ import annotations

import atexit
import gc
import logging
import re
import sys
from contextlib import suppress
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from fresh_support import START, fresh
from plugin_support import make, recipe_for, relative_distances, state, twin, write_recipe

from rotation_merge.mergekit_plugin import hooks, host

ROOT = Path(__file__).resolve().parents[2]


def rename(word: str) -> None:
    """Let mergekit be imported with one name renamed throughout, as another release may have it."""

    class Renaming(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            text = re.sub(rf"(?<![\w'\"]){word}(?![\w'\"])", f"{word}_renamed", Path(self.path).read_text())
            return compile(text, self.path, "exec")

    def finder_in(path: str) -> FileFinder:
        if "mergekit" not in Path(path).parts:
            raise ImportError
        return FileFinder(path, (Renaming, [".py"]))

    sys.path_hooks.insert(0, finder_in)
    sys.path_importer_cache.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_METHODS", "run_merge", "_execute_resolved", "layer_weights", "MergeMethodSpec"])
def test_mergekit_merges_on_and_our_first_recipe_names_what_is_missing(name: str, tmp_path: Path) -> None:
    """Names that we take hold of in mergekit's modules, override, and import."""
    anchor = make("llama", tmp_path / "anchor", num_hidden_layers=1, tie_word_embeddings=True)
    recipe = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"))
    write_recipe(recipe, tmp_path / "ours.yml")
    write_recipe({**recipe, "merge_method": "linear", "parameters": {}}, tmp_path / "stock.yml")

    def work() -> list[Any]:
        rename(name)
        exec(START, {})
        from mergekit.scripts.run_yaml import main

        logging.disable(logging.CRITICAL)
        done = [
            CliRunner().invoke(main, [f"{tmp_path}/{r}.yml", f"{tmp_path}/{r}", "--quiet"]) for r in ("stock", "ours")
        ]
        return [done[0].exit_code, done[1].exit_code, done[1].output.strip()]

    stock, ours, line = fresh(work, start="")
    assert (stock, ours, (tmp_path / "ours").exists()) == (0, 2, False), line
    assert (tmp_path / "stock" / "model.safetensors").exists()
    assert line.startswith(f"Error: mergekit {version('mergekit')} is installed")
    assert line.count("\n") == 0
    assert f"mergekit {host.SUPPORTED} is supported" in line
    assert name in line


def test_the_supported_range_is_said_once() -> None:
    assert f'"mergekit>={host.OLDEST}"' in (ROOT / "pyproject.toml").read_text()
    assert version("mergekit") in (host.OLDEST, host.NEWEST)  # .ci/run tests both
    assert f"mergekit=={host.NEWEST}" in (ROOT / "requirements.lock").read_text().split()
    page = " ".join((ROOT / "docs" / "doctor.md").read_text().split())
    assert f"**Which mergekit do I need?** {host.SUPPORTED}, the newest release" in page


@pytest.mark.slow
def test_the_switch_leaves_mergekit_alone(tmp_path: Path) -> None:
    recipe = yaml.safe_dump({"merge_method": "rotation_merge", "base_model": "a", "models": [{"model": "a"}]})

    def switched_off() -> list[object]:
        import mergekit.config
        import mergekit.merge_methods as methods

        from rotation_merge import RotationMergeError
        from rotation_merge.mergekit_plugin.run import merge_recipe

        known = ["rotation_merge" in methods.registry._METHODS, hasattr(mergekit.config, "_rotation_merge")]
        try:
            merge_recipe(recipe, str(tmp_path / "out"))
        except RotationMergeError as error:
            return [*known, str(error)]
        return known

    off = "the plugin is switched off (ROTATION_MERGE_PLUGIN=0); unset it"
    assert fresh(switched_off, plugin="0") == [False, False, off]


@pytest.mark.slow
@pytest.mark.parametrize("start", [START, ""], ids=["after the .pth file", "without it"])
def test_explicit_import_registers_once(start: str) -> None:
    """After mergekit, twice, with or without the .pth file."""

    def work() -> list[object]:
        import importlib

        import mergekit.config
        import mergekit.merge
        import mergekit.merge_methods

        extended = hasattr(mergekit.config, "_rotation_merge") and hasattr(mergekit.merge, "_rotation_merge")
        import rotation_merge

        importlib.reload(rotation_merge)
        rotation_merge.install()
        finders = sum(type(finder).__name__ == "MergekitFinder" for finder in sys.meta_path)
        method = mergekit.merge_methods.get("rotation_merge").spec.name
        return [extended, finders, method, mergekit.config._rotation_merge, mergekit.merge._rotation_merge]

    assert fresh(work, start=start) == [bool(start), 1, "rotation_merge", True, True]


def test_a_merge_from_python_in_a_fresh_process(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As a program of the user's merges, which never sees a command."""
    recipe = recipe_for("linear", *pair)

    def work() -> str:
        sys.modules["mergekit.scripts"] = None  # type: ignore[assignment]
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        run_merge(MergeConfiguration.model_validate(recipe), str(tmp_path / "out"), MergeOptions(quiet=True))
        return "merged"

    assert fresh(work) == "merged"
    assert max(relative_distances(state(tmp_path / "out"), state(pair[0])).values()) <= 1e-5


HELD = ["at exit", False, "frozen"]


@pytest.mark.parametrize(
    ("program", "error", "steps"),
    [("mergekit-yaml", None, HELD), ("mergekit-yaml", ImportError, HELD), ("python", None, [True])],
)
def test_the_collector_is_held_while_commands_start(
    program: str, error: type[Exception] | None, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def execute(module: ModuleType) -> None:
        done.append(gc.isenabled())
        if error is not None:
            raise error

    loader = SimpleNamespace(exec_module=execute)
    monkeypatch.setattr(gc, "freeze", freeze := lambda: done.append("frozen"))
    monkeypatch.setattr(atexit, "register", lambda work: done.append(work is freeze and "at exit"))
    monkeypatch.setattr(hooks, "extend", lambda module, name: None)
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}", "recipe.yml"])
    hooks.extend_after(loader, "mergekit.scripts.run_yaml")  # type: ignore[arg-type]
    with suppress(ImportError):
        loader.exec_module(ModuleType("mergekit.scripts.run_yaml"))
    assert gc.isenabled()
    assert done == steps
