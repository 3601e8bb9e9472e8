"""A change refitted on samples: exact where the bases are one in other coordinates; its rank; its scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from carry_support import other_coordinates
from cli_support import run
from recipe_models import stand_in
from tiny_models import ALL, load, make, reload, save

from rotation_merge.architectures import resolve
from rotation_merge.averaging.carry_change import ChangeOptions, of_rank, refit_change
from rotation_merge.averaging.carrying import Losses
from rotation_merge.matching.carry import Carrier
from rotation_merge.matching.options import MatchOptions


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
    new, alignment = other_coordinates(architecture, state, MatchOptions(heads="permutation", residual=residual))
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
    assert any("Nothing of it arrives" in line for line in better.words(0.0) + Losses(2, 1, 2, 1, {1: (3, 1)}).words(1))


def test_command(tmp_path: Path) -> None:
    """An adapter stays one of its rank, a model a model; report and card say what arrived."""
    old, new, lora, tuned = (stand_in(f"org/{n}", tmp_path) for n in ("old", "new", "my-lora", "tuned"))
    bases = ("--from", old, "--to", new, "--carry", "refit", "--samples", 32)
    done = run("carry", lora, *bases, tmp_path / "one")
    assert done.exit_code == 0, done.output
    assert "text that the new base writes itself" in done.output
    assert (tmp_path / "one" / "adapter_model.safetensors").exists()
    done = run("carry", tuned, *bases, tmp_path / "two", "--scale", "0.5")
    assert done.exit_code == 0, done.output
    assert "at scale 0.5" in done.output
    assert (tmp_path / "two" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scale", "auto"), "--carry refit"),
        (("--scale", "much"), "write a number"),
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
