"""Cards as the hub reads them: metadata, parents with revisions and licences, figures only where measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import CHECKPOINTS, parsed, run
from huggingface_hub import ModelCard
from plugin_support import make, merged, recipe_for, twin

from rotation_merge.model.card import BEGIN, END, front_matter, metadata, updated_card
from rotation_merge.record import DISTANCES
from rotation_merge.report.files import read_report

REVISIONS = ("a" * 40, "b" * 40)
LLAMA = {"architectures": ["LlamaForCausalLM"]}


def snapshot(folder: Path, repo: str, revision: str) -> Path:
    """Where the cache of the hub keeps a repository's revision."""
    return folder / f"models--{repo.replace('/', '--')}" / "snapshots" / revision


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A merge of two models out of the cache, of different licences; the two, and the merge."""
    folder = tmp_path_factory.mktemp("cards")
    anchor, donor = (snapshot(folder, f"org/{n}", r) for n, r in zip(("one", "two"), REVISIONS, strict=True))
    make("llama", anchor)
    twin(anchor, donor)
    for place, licence in ((anchor, "apache-2.0"), (donor, "mit")):
        (place / "README.md").write_text(f"---\nlicense: {licence}\n---\n# A model\n")
    merged(recipe_for("linear", anchor, donor), folder / "out")
    return anchor, donor, folder / "out"


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata, which the hub's own reader takes, and its text."""
    text = (folder / "README.md").read_text()
    found = ModelCard(text)
    return {**yaml.safe_load(text.split("---\n")[1]), "read": found.data.to_dict()}, text


def test_a_merge(made: tuple[Path, Path, Path]) -> None:
    found, text = card(made[2])
    assert found["base_model"] == ["org/one", "org/two"]
    assert found["base_model_relation"] == "merge"
    assert found["tags"] == ["mergekit", "merge", "rotation-merge"]
    assert (found["license"], found["license_name"]) == ("other", "licences-of-the-parents")
    assert found["library_name"] == "transformers"
    assert "model-index" not in found
    for name, revision, licence in zip(("one", "two"), REVISIONS, ("apache-2.0", "mit"), strict=True):
        assert f"| [org/{name}](https://huggingface.co/org/{name}) | {revision} | {licence} | `" in text
    assert 'LlamaForCausalLM.from_pretrained("out")' in text
    assert "verify out again" in text
    assert text.count(BEGIN) == text.count(END) == 1


def test_an_aligned_donor_is_a_fine_tune(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    assert run("align", *made[:2], tmp_path / "out", "--no-verify").exit_code == 0
    found, text = card(tmp_path / "out")
    assert (found["base_model"], found["base_model_relation"], found["license"]) == ("org/two", "finetune", "mit")
    assert "merge" not in found["tags"]
    assert REVISIONS[0] in text
    assert REVISIONS[1] in text


def test_figures_are_those_that_were_measured(tmp_path: Path) -> None:
    model = CHECKPOINTS / "llama-0"
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for _ in range(2):
        rows = parsed("evaluate", folder, "--data", "demo:python", "--limit", "4", "--keep")
    (kept,) = json.loads((folder / "evaluation.json").read_text())
    assert kept["figures"]["loss"] == rows[0]["loss"]
    assert kept["fingerprint"] in parsed("inspect", folder, "--fingerprint").values()
    assert run("evaluate", "org/none", "--data", "demo:python", "--keep").exit_code == 2
    report = read_report(str(_merged_report(tmp_path)))
    text = updated_card("# M\n", report, "org/m", LLAMA, [kept])
    (result,) = ModelCard(text).data.eval_results[:1]
    assert (result.metric_type, result.metric_value) == ("loss", rows[0]["loss"])
    assert result.task_type == "text-generation"


def _merged_report(folder: Path) -> Path:
    content = {
        "anchor": "A", "delegate": "linear", "recipe": "", "rows": [], "whole": {}, "notes": [], "seconds": 1.0,
        "versions": {"torch": "2"},
    }  # fmt: skip
    (folder / "rotation_merge.json").write_text(json.dumps(content))
    return folder / "rotation_merge.json"


def test_licences_and_what_a_card_says_already(tmp_path: Path) -> None:
    report = read_report(str(_merged_report(tmp_path)))
    facts = [{"hub": f"org/{i}", "revision": None, "license": "mit"} for i in range(2)]
    models = {f"m{i}": one for i, one in enumerate(facts)}
    assert metadata(replace(report, models=models))["license"] == "mit"
    models["m1"] = {**models["m1"], "license": None}
    assert metadata(replace(report, models=models))["license"] == "other"
    assert "license" not in metadata(replace(report, models={"m": {"hub": None, "license": None}}))
    kept = {"license": "gpl-3.0", "language": ["de"], "tags": ["mine"], "datasets": ["org/old"]}
    data = [
        {"of": "x", "source": "datasets/org/new/a.txt@main", "samples": 3},
        {"of": "y", "source": "self", "samples": 1},
    ]
    found = metadata(replace(report, models=models, data=data), kept)
    assert (found["license"], found["language"], found["tags"][-1]) == ("gpl-3.0", ["de"], "mine")
    assert found["datasets"] == ["org/old", "org/new"]
    adapter = {"hub": "org/base", "license": "mit", "adapter": {"name": "x", "hub": "org/lora", "license": "mit"}}
    assert metadata(replace(report, models={"org/base+x": adapter}))["base_model"] == ["org/base", "org/lora"]


def test_a_card_is_written_anew_in_place(made: tuple[Path, Path, Path]) -> None:
    text = (made[2] / "README.md").read_text()
    report = read_report(str(made[2] / "rotation_merge.json"))
    picture = DISTANCES if (made[2] / DISTANCES).exists() else None
    again = updated_card(text, report, "out", LLAMA, picture=picture)
    assert again == text
    mine = text.replace("# out\n", "# out\n\nWords of mine.\n") + "\nAnd more.\n"
    other = updated_card(mine, replace(report, anchor="ELSE"), "org/name", LLAMA)
    assert "Words of mine." in other
    assert other.endswith("\nAnd more.\n")
    assert "`ELSE`" in other
    assert "hf download org/name --local-dir name" in other
    assert other.count(BEGIN) == 1
    assert front_matter("no metadata") == ({}, "no metadata")
    assert front_matter("---\n[\n---\nx")[0] == {}
