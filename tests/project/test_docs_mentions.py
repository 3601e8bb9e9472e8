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
from test_docs_commands import FENCE, PAGES, ROOT, blocks, is_recipe, lines, ours

import rotation_merge

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ALL = [*PAGES, CONTRIBUTING, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yml"))
EXTRAS = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
OTHER = ("pip", "pytest", "python", "git", "cd", "hf", "make")
"""Programs of lines in ```bash blocks that are not run."""
KNOWN = {
    "bash": "run by test_docs_commands",
    "yaml": "run by test_docs_commands",
    "python": "run by test_docs_commands",
    "json": "the new architecture, used by test_add_architecture",
    "text": "tables and signatures",
    "sh": "completion, run by test_cli",
}
"""Languages of blocks, and who sees to them."""

NOT_OURS = ("tests/architectures/gpt_bigcode.json", "tests/common.py")
"""Files named that are not here: made up for an example; of mergekit."""


def assert_known(line: str) -> None:
    """A command line of ours, words in capitals standing for anything: the command and its options exist."""
    words = shlex.split(line, comments=True)[1:]
    if not words:
        return
    assert words[0] in COMMANDS, f"no command: {line}"
    command = app.get_command(click.Context(app), words[0])
    assert command is not None
    options = {word for parameter in command.params for word in parameter.opts} | {"--help", "--version"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_in_the_text(page: Path) -> None:
    """Inline code outside blocks."""
    outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", outside):
        words = span.split()
        if span.startswith("rotation-merge "):
            assert_known(span)
        elif extra := re.fullmatch(r"(?:rotation-merge|pip install -e '\.)\[(\w+)\]'?", span):
            assert re.search(rf"^{extra[1]} = \[", EXTRAS, re.MULTILINE), span
        elif span.startswith("make "):
            assert words[1] in TARGETS, span
        elif span.startswith("python -m "):
            assert find_spec(words[2]) is not None, span
        elif span.startswith("python ") and words[1].endswith(".py"):
            path = ROOT / words[1]
            parsers = (path, *(path.with_name(name) for name in ("apparatus.py", "shapes.py")))
            script = "".join(parser.read_text(encoding="utf-8") for parser in parsers if parser.exists())
            assert all(f'"{option}"' in script for option in re.findall(r"--[a-z-]+", span)), span
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


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=lambda page: page.name)
def test_every_block_is_seen_to(page: Path) -> None:
    """It is of a kind that is run; of its commands, which are known, files and targets are there."""
    outside = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert "```" not in outside, "a block without language, or an indented one, is run by no test"
    assert "~~~" not in outside
    for block in blocks(page):
        assert block.language in KNOWN, f"blocks in {block.language} are run by no test"
        assert block.language != "yaml" or is_recipe(block), block.text
        if block.language == "text" and page.name != "cli.md":
            assert not re.search(r"^[$>]? ?(rotation-merge|mergekit-)", block.text, re.MULTILINE)
        for line in lines(block) if block.language == "bash" else ():
            program, *words = line.split()
            assert ours(line) or program in OTHER, line
            assert program != "make" or words[0] in TARGETS, line
            if program in ("pytest", "python"):
                assert all((ROOT / word).exists() for word in words if word.endswith(".py")), line


def test_what_ci_runs_is_there() -> None:
    for file in (".ci/run", "Makefile"):
        named = re.findall(r"(?:tests|docs|benchmarks)/[\w/]+\.py", (ROOT / file).read_text("utf-8"))
        assert [path for path in named if not (ROOT / path).exists()] == [], file


def test_every_public_name_is_in_the_api_page() -> None:
    shown = re.findall(r"^::: rotation_merge\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(rotation_merge.__all__)
