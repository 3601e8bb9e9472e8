"""What pages and recipes mention in passing exists: commands, their options, make targets, scripts, extras.

`test_docs_commands.py` runs what stands in blocks; here nothing is run, and no block may be of a kind that is not run.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from cli_support import COMMANDS, app
from test_docs_commands import FENCE, PAGES, ROOT, blocks, is_recipe, lines

import rotation_merge

MORE = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
RECIPES = sorted((ROOT / "recipes").glob("*.yml"))
ALL = [*PAGES, *MORE]
KNOWN = {
    "bash": "run by test_docs_commands",
    "yaml": "run by test_docs_commands",
    "python": "run by test_docs_commands",
    "json": "the new architecture, used by test_add_architecture",
    "text": "tables and signatures",
    "sh": "completion, run by test_cli",
}
"""Languages of blocks, and who sees to them."""

NOT_OURS = ("tests/architectures/quokka.json", "tests/common.py")
"""Files named that are not here: made up for an example; of mergekit."""


def options_of(command: click.Command) -> set[str]:
    return {word for parameter in command.params for word in parameter.opts} | {"--help", "-h", "--version", "-vv"}


def assert_known(line: str) -> None:
    """A command line of ours, words in capitals standing for anything: the command and its options exist."""
    words = shlex.split(line, comments=True)[1:]
    if not words:
        return
    assert words[0] in COMMANDS, f"no command: {line}"
    command = app.get_command(click.Context(app), words[0])
    assert command is not None
    unknown = [w for w in words if w.startswith("--") and w.partition("=")[0] not in options_of(command)]
    assert not unknown, f"{line}: {unknown}"


def spans(text: str) -> list[str]:
    """Inline code outside blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_in_the_text(page: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", project, re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for span in spans(page.read_text(encoding="utf-8")):
        if span.startswith("rotation-merge "):
            assert_known(span)
        elif found := re.fullmatch(r"rotation-merge\[(\w+)\]|pip install -e '\.\[(\w+)\]'", span):
            assert (found[1] or found[2]) in extras, span
        elif span.startswith("make "):
            assert span.split()[1] in targets, span
        elif span.startswith("python -m "):
            assert find_spec(span.split()[2]) is not None, span
        elif span.startswith("python ") and span.split()[1].endswith(".py"):
            path = ROOT / span.split()[1]
            frames = (
                path.parent / name for name in ("apparatus.py", "shapes.py")
            )  # parse what scripts beside them take
            script = "".join(p.read_text(encoding="utf-8") for p in (path, *frames) if p.exists())
            for option in re.findall(r"--[a-z-]+", span):
                assert f'"{option}"' in script, span
        elif re.match(r"(docs|tests|benchmarks|recipes|rotation_merge)/\S+\.\w+$", span):
            assert (ROOT / span).exists() or span in NOT_OURS, span


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_commands_in_the_remarks_of_recipes(recipe: Path) -> None:
    remarks = "\n".join(
        line.removeprefix("#").strip() for line in recipe.read_text("utf-8").splitlines() if line.startswith("#")
    )
    for line in remarks.replace("\\\n", " ").splitlines():
        if found := re.search(r"\brotation-merge [a-z].*", line):
            assert_known(re.split(r" writes |[,;`]", found[0])[0])
        for path in re.findall(r"recipes/[\w-]+\.yml", line):
            assert (ROOT / path).exists(), line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_seen_to(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    outside = FENCE.sub("", text)
    assert "```" not in outside, "a block without language, or an indented one, is run by no test"
    assert "~~~" not in outside
    for block in blocks(page):
        assert block.language in KNOWN, f"blocks in {block.language} are run by no test"
        if block.language == "yaml":
            assert is_recipe(block), block.text
        if block.language == "text" and page.name != "cli.md":
            assert not [
                line for line in block.text.splitlines() if re.match(r"[$>]? ?(rotation-merge|mergekit-)", line)
            ]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_and_targets_in_blocks(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page):
        for line in lines(block) if block.language == "bash" else ():
            words = line.split()
            if words[0] == "make":
                assert words[1] in targets, line
            if words[0] in ("pytest", "python"):
                assert all((ROOT / word).exists() for word in words[1:] if word.endswith(".py")), line


def test_what_ci_runs_is_there() -> None:
    for file in (".ci/run", "Makefile"):
        named = re.findall(r"(?:tests|docs|benchmarks)/[\w/]+\.py", (ROOT / file).read_text("utf-8"))
        assert [path for path in named if not (ROOT / path).exists()] == [], file


def test_every_public_name_is_in_the_api_page() -> None:
    shown = re.findall(r"^::: rotation_merge\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(rotation_merge.__all__)
