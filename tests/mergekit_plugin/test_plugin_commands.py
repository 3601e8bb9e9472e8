"""mergekit's other ways in: mergekit-multi, fresh worker processes, planning in memory, an explicit import."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from fresh_support import START, fresh
from interrupted_support import forked
from plugin_support import (
    one_error,
    recipe_for,
    relative_distances,
    state,
    write_recipe,
    write_state,
)

from rotation_merge import RotationMergeError

Pair = tuple[Path, Path]


def multi(documents: list[dict], folder: Path) -> Result:
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.multimerge import main

    LoaderCache.loaders.clear()
    path = folder / "stages.yml"
    path.write_text("\n---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents))
    arguments = [path, "--intermediate-dir", folder / "stages", "--out-path", folder / "out", "--quiet"]
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def test_a_stage_as_origin_of_a_fine_tune(pair: Pair, tmp_path: Path) -> None:
    """finetuned_from names a stage; mergekit-multi turns that word into a mapping, which we turn back."""
    anchor, donor = pair
    generator = torch.Generator().manual_seed(0)
    tuned = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in state(donor).items()}
    fine = write_state(tuned, anchor, tmp_path / "fine")
    stage = {
        "name": "stage",
        "merge_method": "linear",
        "models": [{"model": str(donor), "parameters": {"weight": 1.0}}],
        "dtype": "float32",
    }
    final = recipe_for("task_arithmetic", anchor, fine)
    final["models"][1]["parameters"] = {"weight": 1.0, "finetuned_from": "stage"}
    result = multi([stage, final], tmp_path)
    assert result.exit_code == 0, result.output
    distances = relative_distances(state(tmp_path / "out"), state(anchor))
    assert 1e-4 < max(distances.values()) < 0.2


def test_misspelt_word_in_a_stage(pair: Pair, tmp_path: Path) -> None:
    first = {"name": "first", **recipe_for("slerp", *pair, t=0.5)}
    second = recipe_for("linear", pair[0], Path("first"))
    second["parameters"]["hedas"] = "permutation"
    result = multi([first, second], tmp_path)
    assert result.exit_code == 2
    assert "'heads'" in one_error(result.output)
    assert not (tmp_path / "stages" / "first").exists()
    assert not (tmp_path / "out").exists()


def test_mergekit_multi_in_a_process_of_its_own(pair: Pair, tmp_path: Path) -> None:
    first = {"name": "first", **recipe_for("slerp", *pair, t=0.5)}
    path = tmp_path / "stages.yml"
    path.write_text(yaml.safe_dump(first, sort_keys=False))
    result = forked("mergekit-multi", path, "--intermediate-dir", tmp_path / "stages", "--quiet")
    assert result.returncode == 0, result.stderr
    distances = relative_distances(state(tmp_path / "stages" / "first"), state(pair[0]))
    assert max(distances.values()) <= 1e-5


def test_a_merge_from_python_in_a_fresh_process(pair: Pair, tmp_path: Path) -> None:
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


def test_planning_without_a_merge_is_refused() -> None:
    from mergekit import merge_methods

    with pytest.raises(RotationMergeError, match=r"mergekit\.merge\.run_merge"):
        merge_methods.get("rotation_merge").validate_inputs(["model"])


@pytest.mark.slow
@pytest.mark.parametrize("start", [START, ""], ids=["after the .pth file", "without it"])
def test_explicit_import_registers_once(start: str) -> None:
    """After mergekit, twice, with or without the .pth file."""

    def work() -> list[object]:
        import importlib

        import mergekit.architecture
        import mergekit.config
        import mergekit.merge
        import mergekit.merge_methods
        import mergekit.plan

        extended = [hasattr(module, "_rotation_merge") for module in (mergekit.config, mergekit.merge)]
        import rotation_merge

        importlib.reload(rotation_merge)
        rotation_merge.install()
        return [
            extended,
            sum(type(finder).__name__ == "MergekitFinder" for finder in sys.meta_path),
            mergekit.merge_methods.get("rotation_merge").spec.name,
            mergekit.config._rotation_merge,
            mergekit.merge._rotation_merge,
        ]

    assert fresh(work, start=start) == [[bool(start)] * 2, 1, "rotation_merge", True, True]


@pytest.mark.slow
def test_install_and_uninstall_leave_nothing(tmp_path: Path) -> None:
    """pip install . and -e ., then uninstall, in an environment that borrows this one's packages."""
    for builder in ("hatchling", "editables"):
        pytest.importorskip(builder, reason="without it a build needs the network")
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: object) -> str:
        result = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    probe = (
        "import sys; print([type(f).__name__ for f in sys.meta_path if 'Mergekit' in type(f).__name__])\n"
        "try:\n import rotation_merge; print(rotation_merge.__file__)\nexcept ImportError: print('gone')"
    )
    for how in ([root], ["-e", root]):
        home = tmp_path / ("editable" if len(how) > 1 else "plain")
        venv.EnvBuilder(system_site_packages=True, symlinks=True).create(home)
        site = next(home.glob("lib/python*/site-packages"))
        before = {path.name for path in site.iterdir()}
        # the borrowed packages are those of the running environment, not of the interpreter below it
        (site / "_borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
        pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
        run(*pip, "install", "--no-deps", "--no-build-isolation", "--quiet", *how)
        added = {path.name for path in site.iterdir()} - before
        assert "rotation_merge.pth" in added
        run(*pip, "uninstall", "-y", "--quiet", "rotation-merge")
        assert {path.name for path in site.iterdir()} - before == {"_borrowed.pth"}
        (site / "_borrowed.pth").unlink()
        assert run(home / "bin" / "python", "-I", "-c", probe).splitlines() == ["[]", "gone"]


@pytest.mark.slow
def test_relative_paths_without_a_network(pair: Pair, tmp_path: Path) -> None:
    """mergekit's card asks the hub about `./anchor`; a merge must not end there."""
    for name, model in zip(("anchor", "donor"), pair, strict=True):
        (tmp_path / name).symlink_to(model)
    write_recipe(recipe_for("linear", Path("anchor"), Path("donor")), tmp_path / "recipe.yml")
    result = forked("mergekit-yaml", "recipe.yml", "out", "--quiet", prepare=lambda: os.chdir(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "### Alignment" in (tmp_path / "out" / "README.md").read_text()
