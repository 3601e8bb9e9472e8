"""A fresh machine: a wheel built offline, installed in a new virtual environment, where the README's commands run.

The environment finds what the wheel depends on in this one, so that nothing is downloaded; the models of the page come
from a stand-in of the hub. In the end somebody else makes the merge again, to the byte.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hub_support import served
from plugin_support import make, twin
from test_docs_commands import PAGES, ROOT, blocks, lines

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

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "TRANSFORMERS_", "ROTATION_"))}


def run(*command: object, cwd: Path, env: Mapping[str, str], said: str = "", code: int = 0) -> str:
    """What a command prints that ends with this code."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, input=said, capture_output=True, text=True)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without anything, in which this one's packages are found behind its own."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "zz_outside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return tmp_path / "venv"


@pytest.mark.slow
def test_the_first_screen_runs_on_a_fresh_machine(environment: Path, tmp_path: Path) -> None:
    dist, python, work = tmp_path / "dist", environment / "bin" / "python", tmp_path / "work"
    work.mkdir()
    run(sys.executable, "docs/release.py", "--out", dist, cwd=ROOT, env=CLEAN)
    page = blocks(PAGES[0])
    commands = [line for block in page if block.language == "bash" for line in lines(block)]
    assert commands[0] == "pip install ."
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, *dist.glob("*.whl"), cwd=work, env=CLEAN)
    assert __version__ in run(environment / "bin" / "rotation-merge", "--version", cwd=work, env=CLEAN)
    (recipe,) = (block.text for block in page if block.language == "yaml")
    (work / "recipe.yml").write_text(recipe)
    text = "\n".join([*commands[1:], "mergekit-yaml theirs/recipe.yml again --quiet"])
    text = text.replace("./merged org", "./merged --yes org")
    text = text.replace("org/donor ./best", "org/donor ./best --budget 1s --anyway")
    assert {"merge", "push"} <= set(text.split())
    anchor = make("llama", tmp_path / "anchor")
    with served() as hub:
        hub.publish("org/anchor", anchor)
        hub.publish("org/donor", twin(anchor, tmp_path / "donor"))
        machine = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_none",
            "HF_HUB_DISABLE_XET": "1",  # the stand-in has large files by way of git-lfs
            "OMP_NUM_THREADS": "1",
        }
        run(python, "-c", DRIVER, cwd=work, env={**CLEAN, **machine}, said=text)
    names = ("merged", "theirs", "again")
    merged, theirs, again = ({p.name: p.read_bytes() for p in (work / name).glob("model*")} for name in names)
    assert merged
    assert merged == theirs == again


@pytest.mark.slow
def test_a_release_is_one_command(tmp_path: Path) -> None:
    """Version, date, commit and tag; refused on unfinished work, twice, and without a heading in the changelog."""
    place = tmp_path / "checkout"
    spare = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist", "site")
    shutil.copytree(ROOT, place, ignore=spare)
    who = {f"GIT_{role}_{what}": "somebody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    here = {"cwd": place, "env": {**os.environ, **who}}

    def release(number: str, code: int = 1) -> str:
        return run(sys.executable, "docs/release.py", number, "--out", tmp_path / "dist", code=code, **here)

    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "everything")):
        run("git", *command, **here)
    changes = place / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(f"## {__version__} (unreleased)", "## 7.0.0 (unreleased)"))
    assert "not committed" in release("7.0.0")
    run("git", "commit", "-qam", "a heading", **here)
    assert "no heading" in release("7.0.1")
    assert "is no version" in release("seven")
    release("7.0.0", code=0)
    assert run("git", "tag", **here).split() == ["v7.0.0"]
    assert run("git", "status", "--porcelain", **here) == ""
    assert re.search(r"^## 7\.0\.0 \(\d{4}-\d\d-\d\d\)$", changes.read_text(), re.MULTILINE)
    built = {path.name for path in (tmp_path / "dist").iterdir()}
    assert built == {"rotation_merge-7.0.0-py3-none-any.whl", "rotation_merge-7.0.0.tar.gz"}
    assert "is there already" in release("7.0.0")


def test_what_a_wheel_lacks_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as file:
        file.writestr("rotation_merge/__init__.py", "")
        file.writestr("tests/spare.py", "")
    faults = runpy.run_path(str(ROOT / "docs" / "release.py"))["faults_of_wheel"](tmp_path / "w.whl")
    lacks = {f"lacks {name}" for name in ("rotation_merge.pth", "rotation_merge/architecture/data/bert.json")}
    assert {*lacks, "holds tests/spare.py"} <= set(faults)
    assert any("LICENSE" in fault for fault in faults)
