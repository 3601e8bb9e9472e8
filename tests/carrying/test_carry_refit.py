"""A change refitted on samples: exact where the bases are one in other coordinates; its rank; its scale."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from carry_support import other_coordinates
from cli_support import run
from click.testing import Result
from plugin_support import state
from recipe_models import stand_in
from safetensors.torch import load_file
from tiny_models import ALL, load, make, reload, save

from rotation_merge.architecture import resolve
from rotation_merge.averaging import polish as polish_module
from rotation_merge.carrying.bases import open_bases
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.judge import Losses, Scaled, search
from rotation_merge.carrying.refit import ChangeOptions, of_rank, refit_change
from rotation_merge.matching.options import AlignConfig
from rotation_merge.run import functions

STOPPED_AT = 10
"""Steps after which a run is stopped: three rates of one step and four of training for each kind of answers."""


@pytest.mark.parametrize(
    ("family", "name", "residual"), [("llama", "llama", "rotation"), ("gpt2", "untied", "rotation")]
)
def test_bases_that_are_one_in_other_coordinates(family: str, name: str, residual: str, tmp_path: Path) -> None:
    """What the new base then gives on the samples is what the fine-tune gives."""
    case = next(c for c in ALL if (c.family, c.name) == (family, name))
    config, state = save(make(case), tmp_path)
    architecture = resolve(config, list(state), name, untie=True)
    draw = torch.Generator().manual_seed(0)
    tuned = {n: x + 0.05 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in state.items()}
    tuned |= {n: x for n, x in state.items() if x.ndim < 2 or "wte" in n or "wpe" in n or "embed" in n}
    new, alignment = other_coordinates(architecture, state, AlignConfig(heads="permutation", residual=residual))
    ids = torch.randint(0, config["vocab_size"], (24, 12), generator=draw)
    solved, done = refit_change(
        Carrier(architecture, state, new, alignment),
        transformers.AutoConfig.from_pretrained(tmp_path),
        tuned,
        [{"input_ids": part} for part in ids.split(12)],
        ChangeOptions(ridge=1e-5),
    )
    assert done.maps
    with torch.no_grad():
        wanted, plain, found = (
            reload(case, tmp_path, s)(input_ids=ids).logits
            for s in (tuned, new, {n: solved.get(n, x).double() for n, x in new.items()})
        )
    assert float((found - wanted).norm()) <= 0.05 * float((plain - wanted).norm())
    load(case, tmp_path)


def test_rank_is_cut_where_the_inputs_see_least() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 9, generator=draw, dtype=torch.float64) * torch.logspace(0, -2, 9, dtype=torch.float64)
    with_one = torch.cat([x, torch.ones(200, 1, dtype=torch.float64)], 1)
    change = torch.randn(7, 10, generator=draw, dtype=torch.float64)
    cut = of_rank(change, with_one.mT @ with_one, 2)
    assert int(torch.linalg.matrix_rank(cut[:, :9])) == 2
    assert torch.equal(cut[:, 9], change[:, 9])
    best = torch.linalg.svdvals(x @ change[:, :9].mT)[2:].norm()
    torch.testing.assert_close((x @ (change - cut)[:, :9].mT).norm(), best)


def test_a_scale_that_is_no_better_than_none_is_none() -> None:
    losses = Losses(2.0, 1.0, 2.5, 1.5, {0.0: (2.5, 1.5), 0.5: (2.4, 1.7), 1.0: (2.6, 2.0)})
    assert losses.best == 0
    assert any("Nothing is worth carrying" in line for line in losses.words(0.0))
    better = Losses(2.0, 1.0, 2.5, 1.5, {0.0: (2.5, 1.5), 0.5: (2.2, 1.6)})
    assert better.best == 0.5
    assert any("30% of what fine-tuning gained" in line for line in better.words(0.5))
    assert not any("That is little" in line for line in better.words(0.5))
    little = Losses(2.0, 1.0, 2.5, 1.5, {0.0: (2.5, 1.5), 0.5: (2.45, 1.51)})
    assert any("train on the new base instead" in line for line in little.words(0.5))
    assert any("it writes no text" in line for line in Losses(2, 1, 2, 2, {1: (1, 1)}, writes=False).words(1))
    assert any("cannot be told" in line for line in Losses(1.0, 1.0, 2.0, 1.0, {1.0: (1.9, 1.0)}).words(1.0))
    assert any("Nothing of it arrives" in line for line in better.words(0.0) + Losses(2, 1, 2, 1, {1: (3, 1)}).words(1))


def test_scales_are_searched_block_by_block() -> None:
    """Towards the least sum of both losses; where nothing is better than none, none."""
    wanted = {"a": 1.0, "b": 0.0, "c": 0.5}

    def losses(scales: Mapping[str, float]) -> tuple[float, float]:
        return 2 + sum((scales[b] - wanted[b]) ** 2 for b in wanted), 1.0

    found, zero, there = search(list(wanted), losses)
    assert found == wanted
    assert (sum(zero), sum(there)) == (4.25, 3.0)
    worse: tuple[Callable[[Collection[float]], float], ...] = (
        sum,
        lambda _: 0.0,
        lambda scales: any(scales) and 1 + sum((scale - 0.5) ** 2 for scale in scales),
    )
    for loss in worse:
        found, zero, there = search(list(wanted), lambda scales, loss=loss: (float(loss(scales.values())), 0.0))
        assert (set(found.values()), zero) == ({0.0}, there)


def test_scales_of_what_weights_carry(lessons: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Zero is the new base; one is what is carried without samples."""
    _, (old, new, _, tuned) = lessons
    bases = open_bases(str(new), str(old))
    alignment, _ = bases.match(AlignConfig(residual="rotation"))
    carrier, source = bases.carrier(alignment), bases.tuned(str(tuned))
    scaled, how = Scaled(carrier, source, bases.new.reference.config()), ("--residual", "rotation")
    assert run("carry", tuned, "--from", old, "--to", new, tmp_path / "out", *how).exit_code == 0
    ids = torch.arange(20)[None]
    with torch.no_grad():
        for scale, path in ((0.0, new), (1.0, tmp_path / "out")):
            wanted = functions.load(str(path))(input_ids=ids).logits
            found = scaled.model(dict.fromkeys(scaled.blocks, scale))(input_ids=ids).logits
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_command(tmp_path: Path) -> None:
    """An adapter stays one of its rank, a model a model; report and card say what arrived."""
    old, new, lora, tuned = (stand_in(f"org/{n}", tmp_path) for n in ("old", "new", "my-lora", "tuned"))
    bases = ("--from", old, "--to", new, "--carry", "refit", "--samples", 32)
    done = run("carry", lora, *bases, tmp_path / "one")
    assert done.exit_code == 0, done.output
    assert "text that the new base writes itself" in done.output
    assert (tmp_path / "one" / "adapter_model.safetensors").exists()
    (tuned / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    done = run("carry", tuned, *bases, tmp_path / "two", "--scale", "0.5")
    assert done.exit_code == 0, done.output
    assert "at scale 0.5" in done.output
    assert "relative distance" in done.output
    assert (tmp_path / "two" / "model.safetensors").exists()
    done = run("carry", tuned, *bases[:4], "--samples", 32, "--scale", "auto", tmp_path / "three")
    assert done.exit_code == 0, done.output
    assert "Scale of each block" in done.output
    for out in ("two", "three"):
        assert "| cc-by-nc-4.0 |" in (tmp_path / out / "README.md").read_text(), out


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Texts, and stand-ins for two bases, a LoRA and a fine-tune of the first."""
    folder = tmp_path_factory.mktemp("distil")
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder / "texts.jsonl", [stand_in(f"org/{n}", folder) for n in ("old", "new", "my-lora", "tuned")]


def distilled(out: Path, work: Path, lessons: tuple[Path, list[Path]], *options: object) -> Result:
    data, (old, new, *_) = lessons
    base = ("carry", work, "--from", old, "--to", new, out, "--data", data, "--samples", 32, "--steps", 4)
    return run(*base, *options)


def test_distilling_an_adapter(lessons: tuple[Path, list[Path]], tmp_path: Path) -> None:
    done = distilled(tmp_path / "lora", lessons[1][2], lessons, "--scale", 1)
    assert done.exit_code == 0, done.output
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all(x.shape[0] == 2 for name, x in factors.items() if "lora_A" in name)
    assert any("down_proj" in name for name in factors)


def test_distilling_goes_on_where_it_was_stopped(
    lessons: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (_, new, _, tuned) = lessons
    done = distilled(tmp_path / "whole", tuned, lessons)
    assert done.exit_code == 0, done.output
    assert "Distilled for 4 steps" in done.output
    assert "**trained**" in (tmp_path / "whole" / "README.md").read_text()
    whole = state(tmp_path / "whole")
    assert whole.keys() == state(new).keys()
    train, seen = polish_module._Polish.step, []

    def stop(self: polish_module._Polish, *arguments: Any) -> float:
        seen.append(1)
        if len(seen) == STOPPED_AT:
            raise KeyboardInterrupt
        return train(self, *arguments)

    monkeypatch.setattr(polish_module._Polish, "step", stop)
    assert distilled(tmp_path / "again", tuned, lessons).exit_code != 0
    assert (tmp_path / "again.unfinished" / "shift.safetensors").exists()
    assert " at 0x" not in (tmp_path / "again.unfinished" / "run.txt").read_text()  # another process knows it, too
    assert distilled(tmp_path / "again", tuned, lessons).exit_code == 0
    assert len(seen) < 2 * STOPPED_AT
    assert not (tmp_path / "again.unfinished").exists()
    for name, tensor in state(tmp_path / "again").items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--carry", "refit", "--steps", 5), "--carry distil"),
        (("--data", "texts.txt"), "--scale auto"),
        (("--scale", "much"), "auto, a number"),
        (("--scale", "nan"), "auto, a number"),
        (("--carry", "refit", "--data", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_bad_options(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    old, new, tuned = (stand_in(f"org/{n}", tmp_path) for n in ("old", "new", "tuned"))
    done = run("carry", tuned, "--from", old, "--to", new, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1, done.output
    assert not (tmp_path / "out").exists()
