"""A change refitted or distilled on samples: what is written and said of it; runs that were stopped go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from click.testing import Result
from plugin_support import make, state
from recipe_models import stand_in
from safetensors.torch import load_file

STOPPED_AT = 6
"""Steps after which a run is stopped: three rates of one step, then four of training."""


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    """An adapter stays one of its rank, a model a model; report and card say what arrived."""
    old, new, lora, tuned = (stand_in(f"org/{n}", tmp_path) for n in ("old", "new", "my-lora", "tuned"))
    bases = ("--from", old, "--to", new, "--carry", "refit", "--samples", 32)
    done = run("carry", lora, *bases, tmp_path / "one")
    assert done.exit_code == 0, done.output
    assert "the new base's own text" in done.output
    assert (tmp_path / "one" / "adapter_model.safetensors").exists()
    (tuned / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    done = run("carry", tuned, *bases, tmp_path / "two", "--scale", "0.5")
    assert done.exit_code == 0, done.output
    assert "at scale 0.5" in done.output
    assert "relative distance" in done.output
    assert (tmp_path / "two" / "model.safetensors").exists()
    lift = json.loads((tmp_path / "two" / "rotation_merge.json").read_text())["lift"]
    assert (lift["method"], list(lift["others"])) == ("refit", ["plain addition"])
    done = run("carry", tuned, *bases[:4], "--samples", 32, "--scale", "auto", tmp_path / "three")
    assert done.exit_code == 0, done.output
    assert "Recovered lift" in done.output or "recovered lift" in done.output
    for out in ("two", "three"):
        assert "| cc-by-nc-4.0 |" in (tmp_path / out / "README.md").read_text(), out


def test_matching_on_samples(tmp_path: Path) -> None:
    """Of the whole fine-tune or cut to a rank; an alignment file leaves nothing to match."""
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    old, new, tuned = (make("llama", tmp_path / name, seed) for seed, name in enumerate(("old", "new", "tuned")))
    data = ("--carry", "refit", "--scale", 1, "--samples", 32, "--data", tmp_path / "texts.jsonl")
    asked = ("--from", old, "--to", new, *data)
    done = run("carry", tuned, tmp_path / "whole", *asked, "--match-on", "both")
    assert done.exit_code == 0, done.output
    assert "matched on weights and activations" in done.output
    done = run("carry", tuned, tmp_path / "lora", *asked, "--lora", 2, "--match-on", "weights")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["r"] == 2
    for option in (("--match-on", "both"), ("--heads", "permutation")):
        done = run("carry", tuned, tmp_path / "none", *asked, *option, "--alignment", tmp_path / "file")
        assert done.exit_code == 2
        assert f"leave out {option[0]}" in done.output


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


@pytest.mark.slow
def test_distilling_an_adapter(lessons: tuple[Path, list[Path]], tmp_path: Path) -> None:
    done = distilled(tmp_path / "lora", lessons[1][2], lessons, "--scale", 1)
    assert done.exit_code == 0, done.output
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all(x.shape[0] == 2 for name, x in factors.items() if "lora_A" in name)
    assert any("down_proj" in name for name in factors)


@pytest.mark.slow
def test_distilling_goes_on_where_it_was_stopped(
    lessons: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (_, new, _, tuned) = lessons
    done = distilled(tmp_path / "whole", tuned, lessons, "--scale", 1)
    assert done.exit_code == 0, done.output
    assert "Distilled for 4 steps" in done.output
    assert "**trained**" in (tmp_path / "whole" / "README.md").read_text()
    whole = state(tmp_path / "whole")
    assert whole.keys() == state(new).keys()
    train, seen = torch.optim.AdamW.step, []

    def stop(self: torch.optim.AdamW, *arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == STOPPED_AT:
            raise KeyboardInterrupt
        return train(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    monkeypatch.setattr("rotation_merge.run.ledger.SECONDS", 0.0)
    assert distilled(tmp_path / "again", tuned, lessons, "--scale", 1).exit_code != 0
    assert (tmp_path / "again.unfinished" / "answers.pt").exists()
    assert " at 0x" not in (tmp_path / "again.unfinished" / "run.txt").read_text()  # another process knows it, too
    again = distilled(tmp_path / "again", tuned, lessons, "--scale", 1)
    assert again.exit_code == 0, again.output
    assert len(seen) < 2 * STOPPED_AT
    assert not (tmp_path / "again.unfinished").exists()
    for name, tensor in state(tmp_path / "again").items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.slow
def test_interrupted_work_on_other_samples_is_not_continued(
    lessons: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they have the name of those before."""
    texts, models = tmp_path / "texts.jsonl", lessons[1]
    first = lessons[0].read_text().splitlines()
    second = [json.dumps({"input_ids": json.loads(line)["input_ids"][::-1]}) for line in first]

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", stop)
        texts.write_text("\n".join(first))
        assert distilled(tmp_path / "out", models[3], (texts, models), "--scale", 1).exit_code != 0
    assert (tmp_path / "out.unfinished" / "answers.pt").exists()
    texts.write_text("\n".join(second))
    for out in ("out", "whole"):
        assert distilled(tmp_path / out, models[3], (texts, models), "--scale", 1).exit_code == 0
    whole = state(tmp_path / "whole")
    for name, tensor in state(tmp_path / "out").items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--carry", "refit", "--steps", 5), "carry by distil"),
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
    assert done.output.count("Error: ") == 1, done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()
