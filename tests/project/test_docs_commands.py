"""Every command, recipe and Python example that README and docs show runs on tiny checkpoints, in the page's order.

Commands of ```bash blocks that begin with `rotation-merge` or a command of mergekit are run in a folder of their own,
with a tiny checkpoint for each model named; ```yaml recipes are checked and merged there. The demo takes a minute and
has tests of its own: its options are parsed only.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from cli_support import CHECKPOINTS, TEXTS, app
from click.testing import CliRunner, Result
from mergekit.io.tasks import LoaderCache
from mergekit.scripts.multimerge import main as mergekit_multi
from mergekit.scripts.run_yaml import main as mergekit_yaml
from recipe_models import FAMILIES, localised, stand_in
from transformers import ViTConfig, ViTForImageClassification

from rotation_merge import TransferConfig
from rotation_merge.matching import match

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RUN = {"rotation-merge": app, "mergekit-yaml": mergekit_yaml, "mergekit-multi": mergekit_multi}
PARSED_ONLY = ("demo", "polish", "doctor", "push")
"""Commands that take long, need the hub, or may rightly say of models with random weights that they are of no use."""

SHORTER = {
    "align --learn": {"--steps": "2", "--limit": "8", "--batch-size": "2"},
    "barrier": {"--points": "3", "--limit": "4", "--length": "32"},
    "merge": {"--budget": "1s"},
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


def invoke(program: click.Command, arguments: list[str]) -> Result:
    LoaderCache.loaders.clear()
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 0, f"{arguments}: {result.output} {result.exception!r}"
    return result


def digits_model(out: Path) -> Path:
    """A tiny ViT for the demo's digits."""
    if not out.exists():
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10)
        ViTForImageClassification(config).save_pretrained(out)
        shutil.copy(CHECKPOINTS / "vit-0" / "preprocessor_config.json", out)
    return out


def local(word: str, models: Path) -> str:
    """A tiny checkpoint for a word that names a model; `C/` is how the pages write the folder of the shipped ones."""
    name = word.replace("C/llama", "org/llama").replace("C/vit", "org/vit")
    if name.startswith("org/vit"):
        return str(digits_model(models / Path(name).name))
    return str(stand_in(name, models)) if name.startswith(tuple(FAMILIES)) else word


def run(line: str, models: Path) -> None:
    program, *arguments = shlex.split(line, comments=True)
    arguments = [local(word, models) for word in arguments]
    if program == "rotation-merge" and (arguments[0] in PARSED_ONLY or "--backend" in arguments):
        command = app.get_command(click.Context(app), arguments[0])
        assert command is not None
        command.make_context(arguments[0], arguments[1:])
        return
    if program != "rotation-merge":
        arguments.append("--quiet")
    for words, options in SHORTER.items():
        if words.split()[0] == arguments[0] and {*words.split()} <= {*arguments}:
            for option, value in options.items():
                position = arguments.index(option) if option in arguments else len(arguments)
                arguments[position : position + 2] = [option, value]
    invoke(RUN[program], arguments)


def run_recipe(block: Block, name: str, merge: bool, models: Path) -> None:
    for vit in re.findall(r"C/(vit-\d)", block.text):
        digits_model(models / f"org--{vit}")
    text = block.text.replace("C/llama", "org/llama").replace("C/vit", "org/vit")
    Path(name).write_text(localised(text, models), encoding="utf-8")
    invoke(app, ["check", name])
    if merge:
        invoke(mergekit_yaml, [name, f"merged-{name}", "--quiet"])


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
