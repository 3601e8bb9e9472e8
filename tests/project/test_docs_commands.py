"""Every command, recipe and Python example that README and docs show runs on tiny checkpoints, in the page's order.

Commands of ```bash blocks that begin with `rotation-merge` or a command of mergekit are run in a folder of their own,
with a tiny checkpoint for each model named; ```yaml recipes are checked and merged there. The demo takes a minute and
has tests of its own: its options are parsed only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from cli_support import TEXTS, app
from programs import run as program
from recipe_models import FAMILIES, localised, stand_in

from rotation_merge import TransferConfig
from rotation_merge.matching import match

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RUN = ("rotation-merge", "mergekit-yaml", "mergekit-multi")
PARSED_ONLY = ("demo", "polish", "doctor", "push")
"""Commands that take long, need the hub, or may rightly say of models with random weights that they are of no use."""

SHORTER = {
    "align --learn": {"--steps": "2", "--limit": "8", "--batch-size": "2"},
    "barrier": {"--points": "3", "--limit": "4", "--length": "32"},
    "merge": {"--budget": "1s", "--anyway": "--force"},  # samples may rightly show no clear difference
    "evaluate": {"--limit": "4"},
    "measure": {"--samples": "4", "--length": "16"},
    "carry --steps": {"--steps": "2"},
}
"""Options that replace or join those on the page, by the words that a command has."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(language, title or None, text) for language, title, text in FENCE.findall(page.read_text("utf-8"))]


def lines(block: Block) -> Iterator[str]:
    """Commands of a block, continued lines joined, remarks left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def is_recipe(block: Block) -> bool:
    return block.language == "yaml" and re.search(r"^merge_method:", block.text, re.MULTILINE) is not None


def has_work(page: Path) -> bool:
    return any(is_recipe(b) or (b.language == "bash" and any(ours(line) for line in lines(b))) for b in blocks(page))


def ours(line: str) -> bool:
    return line.split()[0] in RUN


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def invoke(*words: object) -> None:
    done = program(*words)
    assert done.code == 0, f"{words}: {done.err}"


def shipped(text: str) -> str:
    """The pages write C for the folder of the shipped models, which here are tiny ones, too."""
    return re.sub(r"\bC/(llama|vit)", r"org/\1", text)


def run(line: str, models: Path) -> None:
    name, *arguments = shlex.split(shipped(line), comments=True)
    arguments = [str(stand_in(word, models)) if word.startswith(tuple(FAMILIES)) else word for word in arguments]
    if name == "rotation-merge" and (arguments[0] in PARSED_ONLY or "--backend" in arguments):
        command = app.get_command(click.Context(app), arguments[0])
        assert command is not None
        command.make_context(arguments[0], arguments[1:])
        return
    if name != "rotation-merge":
        arguments.append("--quiet")
    for words, options in SHORTER.items():
        if words.split()[0] == arguments[0] and {*words.split()} <= {*arguments}:
            for option, value in options.items():
                position = arguments.index(option) if option in arguments else len(arguments)
                arguments[position : position + 2] = [option, value]
    invoke(name, *arguments)


def run_recipe(block: Block, name: str, merge: bool, models: Path) -> None:
    Path(name).write_text(localised(shipped(block.text), models), encoding="utf-8")
    invoke("rotation-merge", "check", name)
    if merge:
        invoke("mergekit-yaml", name, f"merged-{name}", "--quiet")


@pytest.fixture(autouse=True)
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over the residual stream; short texts where models write themselves and no option says how long."""
    monkeypatch.setattr(match, "MOST_PASSES", 1)
    real = TransferConfig.reading

    def few(self: TransferConfig, *given: int) -> dict[str, Any]:
        return {**real(replace(self, samples=min(self.sample_count, 32)), *given), "length": 16}

    monkeypatch.setattr(TransferConfig, "reading", few)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_work(page)], ids=lambda page: page.name)
def test_page(page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("samples.txt", "held-out.txt"):
        Path(name).write_text((TEXTS / "python.txt").read_text("utf-8")[:4000], encoding="utf-8")
    found = blocks(page)
    commands = "\n".join(block.text for block in found if block.language == "bash")
    for number, block in enumerate(found):
        if is_recipe(block):
            name = block.title or f"recipe-{number}.yml"
            run_recipe(block, name, not re.search(rf"mergekit-yaml {name} ", commands), models)
        elif block.language == "bash":
            for line in lines(block):
                if ours(line):
                    run(line, models)


FOLLOWED = ("add-averaging.md",)
"""Pages whose Python is parts of files; `test_add_averaging.py` follows them."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in FOLLOWED], ids=lambda page: page.name)
def test_python_examples(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All examples of a page, one after the other, in one namespace and a folder of their own."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(block.text for block in blocks(page) if block.language == "python")
    if code:
        exec(compile(code, str(page), "exec"), {"__name__": "example"})
