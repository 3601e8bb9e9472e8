"""A LoRA being merged into mergekit's cache when the merge is killed: the cache holds it whole or not at all."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from interrupted_support import MERGE, equal, load, run, serve
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, twin, write_recipe
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An anchor, and a donor with a LoRA."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    options = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(donor), options).save_pretrained(folder / "lora")
    return anchor, f"{donor}+{folder / 'lora'}"


def entries(cache: Path) -> list[Path]:
    """What mergekit would take for finished."""
    return [path for path in cache.glob("*") if not path.name.startswith(".")]


def test_killed_ten_times(models: tuple[Path, str], tmp_path: Path) -> None:
    recipe = write_recipe(recipe_for("linear", models[0], Path(models[1])), tmp_path / "recipe.yml")
    flags = ("--quiet", "--lora-merge-cache")
    with serve(f"{MERGE}; import peft") as server:
        begin = time.perf_counter()
        assert run(server, recipe, tmp_path / "fresh", *flags, tmp_path / "whole") == 0
        usual = time.perf_counter() - begin
        (whole,) = entries(tmp_path / "whole")
        wanted, chance, killed = load(whole) or {}, random.Random(0), 0
        assert wanted
        for i in range(10):
            here, moment = tmp_path / f"cache{i}", usual * chance.uniform(0.0, 0.9)
            killed += (
                run(server, recipe, tmp_path / "out", *flags, here, after=moment, signal_number=signal.SIGKILL) != 0
            )
            for path in entries(here):
                assert equal(load(path) or {}, wanted), path
            assert run(server, recipe, tmp_path / "again", *flags, here) == 0
            assert [path.name for path in entries(here)] == [whole.name]
    assert killed >= 3


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_killed_while_the_merged_model_is_written(
    models: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    recipe, cache = recipe_for("linear", models[0], Path(models[1])), tmp_path / "cache"
    real = LlamaForCausalLM.save_pretrained

    def dying(self: LlamaForCausalLM, where: str, **options: object) -> None:
        real(self, where, **options)
        (Path(where) / "model.safetensors").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", dying)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            merged(recipe, tmp_path / "out", "--lora-merge-cache", str(cache))
    assert entries(cache) == []
    assert len(list(cache.iterdir())) == 1
    merged(recipe, tmp_path / "out", "--lora-merge-cache", str(cache))
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("spoilt", ["empty", "no weights", "truncated"])
def test_what_mergekit_itself_left_half_made(spoilt: str, models: tuple[Path, str], tmp_path: Path) -> None:
    """Killed in a merge of its own, mergekit leaves a directory that it takes for finished: it is named."""
    recipe, cache = recipe_for("linear", models[0], Path(models[1])), tmp_path / "cache"
    merged(recipe, tmp_path / "first", "--lora-merge-cache", str(cache))
    (entry,) = entries(cache)
    weights = entry / "model.safetensors"
    if spoilt == "empty":
        shutil.rmtree(entry)
        entry.mkdir()
    elif spoilt == "no weights":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    done = mergekit_yaml(recipe, tmp_path / "out", "--lora-merge-cache", str(cache))
    assert done.exit_code == 2
    error = one_error(done.output)
    assert str(entry) in error
    assert "delete the directory" in error
    assert not (tmp_path / "out").exists()
