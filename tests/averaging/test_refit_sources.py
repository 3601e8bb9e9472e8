"""Refit of donors that are no plain checkpoint: adapters, shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import EVERYTHING, make, merged, state
from residual_support import checkpoint, twin
from tiny_models import ALL, save
from tiny_models import make as tiny
from transformers import AutoModelForCausalLM


def recipe(*models: str, **more: object) -> dict[str, object]:
    return {
        "merge_method": "rotation_merge",
        "base_model": models[0],
        "models": [{"model": model, "parameters": {"weight": 1 / len(models)}} for model in models],
        "parameters": {"delegate": "refit", "samples": 4, **EVERYTHING},
        "dtype": "float32",
        **more,
    }


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("sources") / "anchor")


@pytest.mark.slow
def test_adapters_and_shards(anchor: Path, tmp_path: Path) -> None:
    """A donor given as BASE+ADAPTER is refitted to as the same model written out, in shards."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(anchor),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    adapted = merged(recipe(str(anchor), f"{anchor}+{tmp_path / 'adapter'}"), tmp_path / "one")
    whole = merged(recipe(str(anchor), str(tmp_path / "whole")), tmp_path / "other")
    assert max(float((adapted[name] - whole[name]).abs().max()) for name in whole) <= 1e-4
    assert not torch.equal(whole["lm_head.weight"], state(anchor)["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("data", ["self", "short.jsonl"])
def test_a_donor_moved_by_a_file(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a planted twin moves it onto the anchor, and the refit of the two leaves the anchor as it is."""
    monkeypatch.chdir(tmp_path)
    Path("short.jsonl").write_text("".join(f'{{"input_ids": {list(range(3, 3 + n))}}}\n' for n in (9, 8, 4)))
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation", seed=1)
    given = ["align", str(anchor.path), str(donor.path), "--alignment", "file.safetensors"]
    assert run(*given, "--heads", "permutation", "--residual", "rotation").exit_code == 0
    made = recipe(str(anchor.path), str(donor.path))
    made["models"][1]["parameters"] |= {"alignment": "file.safetensors"}
    made["parameters"] = {"delegate": "refit", "samples": 3, "data": data}
    found, wanted = merged(made, tmp_path / "out"), state(anchor.path)
    plain = merged({**made, "parameters": {"delegate": "linear"}}, tmp_path / "plain")
    assert max(float((found[name] - plain[name]).abs().max()) for name in wanted) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoders_with_decoders_on_records_with_labels(family: str, tmp_path: Path) -> None:
    """What a decoder reads comes from its labels; names that the model has beside its file's are no matter."""
    case = next(case for case in ALL if case.family == family)
    paths = [tmp_path / str(seed) for seed in (0, 1)]
    for seed, path in enumerate(paths):
        save(tiny(case, seed), path)
    row = {"input_ids": [3, 4, 5, 6, 7], "labels": [8, 9, 10]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    made: dict[str, Any] = recipe(*map(str, paths))
    made["parameters"]["data"] = str(tmp_path / "rows.jsonl")
    assert merged(made, tmp_path / "out").keys() == state(paths[0]).keys()
