"""A writer that is killed before any of its steps leaves what was there before, or the whole result; the next run ends
as if nothing had happened. One table of writers, through the commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupted_support import at_step, forked
from plugin_support import lora, make, twin
from safetensors.torch import load_file, save_file

import rotation_merge as rm

KILLS = 6
"""Kills of one writer: before its last two steps, and spread over the others."""


@dataclass(frozen=True)
class Writer:
    """A command that writes.

    Attributes:
        words: of the command; {M} stands for the folder of the models, {O} for that of the output.
        before: of the command that has written to the same place before, where something lies there.
        output: name of what it writes in {O}.
    """

    words: str
    before: str = ""
    output: str = "out"


ALIGN = "rotation-merge align {M}/anchor {M}/donor"
CARRY = "rotation-merge carry {M}/{WORK} --from {M}/anchor --to {M}/donor {O}/out --heads permutation"
PLAIN = "mergekit-yaml {M}/plain.yml {O}/out --quiet --out-shard-size 9000"
DATA = "--data {M}/data.safetensors --samples 4"
WRITERS = {
    "recipe": Writer("mergekit-yaml {M}/aligned.yml {O}/out --quiet"),
    "recipe, shards over an older merge": Writer(
        "mergekit-yaml {M}/aligned.yml {O}/out --quiet --out-shard-size 20000", PLAIN
    ),
    "recipe, one file over shards": Writer("mergekit-yaml {M}/aligned.yml {O}/out --quiet", PLAIN),
    "align": Writer(f"{ALIGN} {{O}}/out"),
    "align over an older model": Writer(f"{ALIGN} {{O}}/out --force", PLAIN),
    "alignment file": Writer(f"{ALIGN} --alignment {{O}}/map.safetensors", output="map.safetensors"),
    "statistics": Writer(
        f"rotation-merge measure {{M}}/anchor {DATA} --out {{O}}/s.safetensors", output="s.safetensors"
    ),
    "carried model": Writer(CARRY.replace("{WORK}", "tuned")),
    "carried adapter": Writer(CARRY.replace("{WORK}", "lora")),
    "merged adapters": Writer("rotation-merge lora {M}/lora {M}/lora-2 {O}/out"),
    "polished model": Writer(
        f"rotation-merge polish {{M}}/tuned {{O}}/out --teachers {{M}}/anchor {{M}}/tuned --steps 2 {DATA}"
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An anchor, a donor, a fine-tune, two adapters, data and two recipes."""
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor")
    twin(anchor, folder / "donor")
    for seed, name in enumerate(("lora", "lora-2")):
        lora(folder / name, anchor, seed)
    rm.average([f"{folder}/anchor+{folder}/lora"]).save_pretrained(folder / "tuned")
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    for name, method in (("plain", {"merge_method": "linear"}), ("aligned", {"merge_method": "rotation_merge"})):
        both = [{"model": str(folder / model), "parameters": {"weight": 0.5}} for model in ("anchor", "donor")]
        recipe = {**method, "base_model": str(folder / "anchor"), "models": both, "dtype": "float32"}
        (folder / f"{name}.yml").write_text(yaml.safe_dump(recipe))
    return folder


def run(
    words: str, models: Path, folder: Path, prepare: Callable[[], object] = int
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    folder.mkdir(exist_ok=True)
    name, *arguments = words.replace("{M}", str(models)).replace("{O}", str(folder)).split()
    return forked(name, *arguments, prepare=prepare)


def content(path: Path) -> dict[str, Any] | None:
    """What lies at a path for a reader: a file's tensors, or weights with a config beside them; None: nothing."""
    if path.is_file():
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
        return None
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors*")}


def kills(steps: int) -> list[int]:
    """Steps before which a writer of so many is killed, one run after the other."""
    return sorted({*(round(1 + n * (steps - 1) / KILLS) for n in range(KILLS - 1)), max(steps - 1, 1), steps})


@pytest.mark.parametrize("name", WRITERS)
def test_killed(name: str, models: Path, tmp_path: Path) -> None:
    """A place where something lay may be empty for a moment; it never holds a part, nor a mixture."""
    writer, place, count = WRITERS[name], tmp_path / "place", tmp_path / "steps"
    old = None
    if writer.before:
        assert (done := run(writer.before, models, place)).returncode == 0, done.stderr
        old = content(place / writer.output)
        shutil.copytree(place, tmp_path / "older")
    assert (done := run(writer.words, models, place, at_step(0, count))).returncode == 0, done.stderr
    new, whole = content(place / writer.output), sorted(os.listdir(place))
    assert new not in (old, None)
    shutil.rmtree(place)
    if writer.before:
        shutil.copytree(tmp_path / "older", place)
    for step in kills(int(count.read_text())):
        count.write_text("0")
        done = run(again(writer, place), models, place, at_step(step, count))
        assert content(place / writer.output) in (None, old, new), step
        assert done.returncode == -signal.SIGKILL or int(count.read_text()) < step, done.stderr
    assert (done := run(again(writer, place), models, place)).returncode == 0, done.stderr
    assert content(place / writer.output) == new
    assert sorted(os.listdir(place)) == whole


def again(writer: Writer, place: Path) -> str:
    """The words of the next run, where a model or what is left of one may lie in the place already."""
    occupied = (place / writer.output).exists()
    forced = occupied and writer.words.startswith("rotation-merge") and "--force" not in writer.words
    return f"{writer.words} --force" if forced else writer.words
