"""A fresh machine: a wheel built offline, installed in a new virtual environment, where the README's commands run.

The environment finds what the wheel depends on in this one, so that nothing is downloaded; the models of the page come
from a stand-in of the hub. In the end somebody else makes the merge again, to the byte.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from hub_support import Hub, served
from plugin_support import make, twin
from test_docs_commands import FENCE, ROOT, lines

from rotation_merge import __version__

DRIVER = """
import importlib.metadata, shlex, sys
import rotation_merge
from mergekit.io.tasks import LoaderCache
assert rotation_merge.__file__.startswith(sys.prefix), rotation_merge.__file__
commands = {entry.name: entry for entry in importlib.metadata.entry_points(group="console_scripts")}
for line in sys.stdin.read().splitlines():
    sys.argv = shlex.split(line, comments=True)
    LoaderCache.loaders.clear()
    try:
        commands[sys.argv[0]].load()()
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""
"""Runs commands as a shell would find them in this environment, one after the other in one process."""


def first_screen() -> tuple[list[str], str]:
    """The README's commands, and its recipe."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [(language, content) for language, _, content in FENCE.findall(text)]
    commands = [line for language, content in found if language == "bash" for line in lines(Shell(content))]
    (recipe,) = (content for language, content in found if language == "yaml")
    return commands, recipe


class Shell:
    """A block, as `lines` takes it."""

    def __init__(self, text: str) -> None:
        self.text = text


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without anything, in which this one's packages are found behind its own."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "venv")
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "zz_outside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return tmp_path / "venv"


def published(hub: Hub, folder: Path) -> None:
    """The models that the page names."""
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    for name, place in (("anchor", anchor), ("donor", donor)):
        hub.publish(f"org/{name}", place)


@pytest.mark.slow
def test_the_first_screen_runs_on_a_fresh_machine(environment: Path, tmp_path: Path) -> None:
    dist, python, work = tmp_path / "dist", environment / "bin" / "python", tmp_path / "work"
    work.mkdir()
    shell = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "TRANSFORMERS_", "ROTATION_"))}
    built = subprocess.run(
        [sys.executable, "docs/release.py", "--out", dist], cwd=ROOT, env=shell, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    commands, recipe = first_screen()
    assert [line.split()[0] for line in commands[:2]] == ["git", "cd"]
    assert commands[2] == "pip install ."
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, dist.glob("*.whl"))], check=True, env=shell)
    said = subprocess.run(
        [environment / "bin" / "rotation-merge", "--version"], env=shell, capture_output=True, text=True
    )
    assert __version__ in said.stdout
    (work / "recipe.yml").write_text(recipe)
    again = "mergekit-yaml theirs/recipe.yml again --quiet"
    text = "\n".join([*commands[3:], again]).replace("./merged org", "./merged --yes org")
    text = text.replace("org/donor ./best", "org/donor ./best --budget 1s --anyway")
    assert {"merge", "push"} <= set(text.split())
    with served() as hub:
        published(hub, tmp_path / "models")
        shell |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_none",
            "HF_HUB_DISABLE_XET": "1",  # the stand-in has large files by way of git-lfs
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [python, "-c", DRIVER], input=text, cwd=work, env=shell, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    weights = [{p.name: p.read_bytes() for p in (work / n).glob("model*")} for n in ("merged", "theirs", "again")]
    assert weights[0]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.slow
def test_a_release_is_one_command(tmp_path: Path) -> None:
    """Version, date, commit and tag; refused on unfinished work, twice, and without a heading in the changelog."""
    place = tmp_path / "checkout"
    spare = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist", "site")
    shutil.copytree(ROOT, place, ignore=spare)
    who = {f"GIT_{role}_{what}": "somebody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **who}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)

    def release(number: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "docs/release.py", number, "--out", str(tmp_path / "dist"))

    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "everything")):
        assert run("git", *command).returncode == 0
    changes = place / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(f"## {__version__} (unreleased)", "## 7.0.0 (unreleased)"))
    assert "not committed" in release("7.0.0").stderr
    run("git", "commit", "-qam", "a heading")
    assert "no heading" in release("7.0.1").stderr
    assert "is no version" in release("seven").stderr
    done = release("7.0.0")
    assert done.returncode == 0, done.stderr
    assert run("git", "tag").stdout.split() == ["v7.0.0"]
    assert run("git", "status", "--porcelain").stdout == ""
    assert re.search(r"^## 7\.0\.0 \(\d{4}-\d\d-\d\d\)$", changes.read_text(), re.MULTILINE)
    assert {path.name for path in (tmp_path / "dist").iterdir()} == {
        "rotation_merge-7.0.0-py3-none-any.whl",
        "rotation_merge-7.0.0.tar.gz",
    }
    assert "is there already" in release("7.0.0").stderr


def test_what_a_wheel_lacks_is_named(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("release", ROOT / "docs" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as file:
        file.writestr("rotation_merge/__init__.py", "")
        file.writestr("tests/spare.py", "")
    faults = release.faults_of_wheel(tmp_path / "w.whl")
    lacks = {f"lacks {name}" for name in ("rotation_merge.pth", "rotation_merge/architecture/data/bert.json")}
    assert {*lacks, "holds tests/spare.py"} <= set(faults)
    assert any("LICENSE" in fault for fault in faults)
