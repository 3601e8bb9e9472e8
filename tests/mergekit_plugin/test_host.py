"""The way into mergekit never hurts it: renamed parts, the switch, installation, the collector, fresh processes."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import venv
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from fresh_support import START, fresh
from plugin_support import make, recipe_for, relative_distances, state, twin, write_recipe
from renamed_mergekit import NAMES, attempt

from rotation_merge import RotationMergeError
from rotation_merge.mergekit_plugin import hooks, host

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_mergekit_merges_on_and_our_first_recipe_names_what_is_missing(tmp_path: Path) -> None:
    """With each name missing in turn."""
    anchor = make("llama", tmp_path / "anchor", num_hidden_layers=1, tie_word_embeddings=True)
    ours = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"))
    stock = {**ours, "merge_method": "linear", "parameters": {}}
    recipes = write_recipe(stock, tmp_path / "stock.yml"), write_recipe(ours, tmp_path / "ours.yml")
    assert {"_METHODS", "layer_weights", "run_merge"} <= set(NAMES)
    for name in NAMES:
        outcome = fresh(lambda name=name: attempt(name, *recipes, tmp_path), start="")  # type: ignore[misc]
        assert "broken" not in outcome, (name, outcome)
        assert (outcome["stock"]["code"], "model.safetensors" in outcome["stock"]["files"]) == (0, True), (
            name,
            outcome,
        )
        assert (outcome["ours"]["code"], outcome["ours"]["files"]) == (2, []), (name, outcome)
        (line,) = filter(str.strip, outcome["ours"]["output"].splitlines())
        assert line.startswith(f"Error: mergekit {version('mergekit')} is installed"), (name, line)
        assert f"mergekit {host.SUPPORTED} is supported" in line
        assert name == "callback" or name in line


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in host.BUILT_ON.items() for name in names])
def test_every_name_that_we_build_on_is_looked_for(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, owner = place.partition(":")
    namespace = getattr(import_module(module), owner) if owner else import_module(module)
    if name in vars(namespace):
        monkeypatch.delattr(namespace, name)
    if name in vars(namespace).get("__annotations__", {}):
        monkeypatch.delitem(namespace.__annotations__, name)
    with pytest.raises(host.MergekitError, match=f"has no '{name}'|{name}"):
        host._check_names.__wrapped__()


def test_the_supported_range_is_said_once() -> None:
    assert f'"mergekit>={host.OLDEST}"' in (ROOT / "pyproject.toml").read_text()
    assert version("mergekit") in (host.OLDEST, host.NEWEST)  # .ci/run tests both
    assert f"mergekit=={host.NEWEST}" in (ROOT / "requirements.lock").read_text().split()
    page = " ".join((ROOT / "docs" / "doctor.md").read_text().split())
    assert f"**Which mergekit do I need?** {host.SUPPORTED}, the newest release" in page


def test_planning_without_a_merge_is_refused() -> None:
    from mergekit import merge_methods

    with pytest.raises(RotationMergeError, match=r"mergekit\.merge\.run_merge"):
        merge_methods.get("rotation_merge").validate_inputs(["model"])


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

    monkeypatch.setattr(gc, "freeze", freeze := lambda: done.append("frozen"))
    monkeypatch.setattr(atexit, "register", lambda work: done.append(work is freeze and "at exit"))
    monkeypatch.setattr(hooks, "extend", lambda module, name: None)
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}", "recipe.yml"])
    hooks.extend_after(loader := SimpleNamespace(exec_module=execute), "mergekit.scripts.run_yaml")  # type: ignore[arg-type]
    with pytest.raises(error) if error is not None else nullcontext():
        loader.exec_module(ModuleType("mergekit.scripts.run_yaml"))
    assert gc.isenabled()
    assert done == steps


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["-e"]], ids=["plain", "editable"])
def test_install_and_uninstall_leave_nothing(how: list[str], tmp_path: Path) -> None:
    """In an environment that borrows this one's packages."""
    for builder in ("hatchling", "editables"):
        pytest.importorskip(builder, reason="without it a build needs the network")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: object) -> str:
        result = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    home = tmp_path / "home"
    venv.EnvBuilder(system_site_packages=True, symlinks=True).create(home)
    site = next(home.glob("lib/python*/site-packages"))
    before = {path.name for path in site.iterdir()}
    # the borrowed packages are those of the running environment, not of the interpreter below it
    (site / "_borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--quiet", *how, ROOT)
    assert "rotation_merge.pth" in {path.name for path in site.iterdir()} - before
    run(*pip, "uninstall", "-y", "--quiet", "rotation-merge")
    assert {path.name for path in site.iterdir()} - before == {"_borrowed.pth"}
    (site / "_borrowed.pth").unlink()
    finders = "[str(f) for f in sys.meta_path if 'Mergekit' in str(f)]"
    probe = f"import sys, importlib.util as u; print({finders}, u.find_spec('rotation_merge'))"
    assert run(home / "bin" / "python", "-I", "-c", probe).strip() == "[] None"
