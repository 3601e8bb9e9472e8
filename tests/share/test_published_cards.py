"""Cards as the hub reads them: metadata, parents with revisions and licences, figures only where measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cli_support import CHECKPOINTS, parsed, run
from huggingface_hub import ModelCard
from plugin_support import make, merged, recipe_for, twin

from rotation_merge.model.card import BEGIN, END, front_matter, metadata, updated_card
from rotation_merge.record import DISTANCES, MergeReport
from rotation_merge.report.files import read_report

REVISIONS = ("a" * 40, "b" * 40)
LLAMA = {"architectures": ["LlamaForCausalLM"]}
REPORT = MergeReport("A", "linear", "", [], {}, [], 1.0, {"torch": "2"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two models out of the hub's cache, of different licences, and a merge of them."""
    folder = tmp_path_factory.mktemp("cards")
    anchor, donor = (
        folder / f"models--org--{name}" / "snapshots" / revision
        for name, revision in zip(("one", "two"), REVISIONS, strict=True)
    )
    make("llama", anchor)
    twin(anchor, donor)
    for place, licence in ((anchor, "apache-2.0"), (donor, "mit")):
        (place / "README.md").write_text(f"---\nlicense: {licence}\n---\n# A model\n")
    merged(recipe_for("linear", anchor, donor), folder / "out")
    return anchor, donor, folder / "out"


def test_a_merge_and_an_aligned_donor(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """One is a merge, the other a fine-tune."""
    text = (models[2] / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == (["org/one", "org/two"], "merge")
    assert data["tags"] == ["mergekit", "merge", "rotation-merge"]
    assert (data["license"], data["license_name"]) == ("other", "licences-of-the-parents")
    assert (data["library_name"], "model-index" in data) == ("transformers", False)
    for name, revision, licence in zip(("one", "two"), REVISIONS, ("apache-2.0", "mit"), strict=True):
        assert f"| [org/{name}](https://huggingface.co/org/{name}) | {revision} | {licence} | `" in text
    for words in ('LlamaForCausalLM.from_pretrained("out")', "verify out again", BEGIN, END):
        assert text.count(words) == 1
    assert run("align", *models[:2], tmp_path / "out", "--no-verify").exit_code == 0
    text = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["base_model_relation"], data["license"]) == ("org/two", "finetune", "mit")
    assert "merge" not in data["tags"]
    assert all(revision in text for revision in REVISIONS)


def test_figures_are_those_that_were_measured(tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "llama-0", tmp_path / "model")
    for _ in range(2):
        rows = parsed("evaluate", folder, "--data", "demo:python", "--limit", "4", "--keep")
    (entry,) = json.loads((folder / "evaluation.json").read_text())
    assert entry["figures"]["loss"] == rows[0]["loss"]
    assert entry["fingerprint"] in parsed("inspect", folder, "--fingerprint").values()
    assert run("evaluate", "org/none", "--data", "demo:python", "--keep").exit_code == 2
    (result,) = ModelCard(updated_card("# M\n", REPORT, "org/m", LLAMA, [entry])).data.eval_results[:1]
    assert (result.metric_type, result.metric_value, result.task_type) == ("loss", rows[0]["loss"], "text-generation")


def test_licences_and_what_a_card_says_already() -> None:
    models = {f"m{i}": {"hub": f"org/{i}", "revision": None, "license": "mit"} for i in range(2)}
    assert metadata(replace(REPORT, models=models))["license"] == "mit"
    models["m1"]["license"] = None
    assert metadata(replace(REPORT, models=models))["license"] == "other"
    assert "license" not in metadata(replace(REPORT, models={"m": {"hub": None, "license": None}}))
    existing = {"license": "gpl-3.0", "language": ["de"], "tags": ["mine"], "datasets": ["org/old"]}
    used = [{"of": "x", "source": source, "samples": 3} for source in ("datasets/org/new/a.txt@main", "self")]
    data = metadata(replace(REPORT, models=models, data=used), existing)
    assert (data["license"], data["language"], data["tags"][-1]) == ("gpl-3.0", ["de"], "mine")
    assert data["datasets"] == ["org/old", "org/new"]
    adapter = {"hub": "org/base", "license": "mit", "adapter": {"name": "x", "hub": "org/lora", "license": "mit"}}
    assert metadata(replace(REPORT, models={"org/base+x": adapter}))["base_model"] == ["org/base", "org/lora"]


def test_a_card_is_written_anew_in_place(models: tuple[Path, Path, Path]) -> None:
    text, report = (models[2] / "README.md").read_text(), read_report(str(models[2] / "rotation_merge.json"))
    picture = DISTANCES if (models[2] / DISTANCES).exists() else None
    assert updated_card(text, report, "out", LLAMA, picture=picture) == text
    edited = text.replace("# out\n", "# out\n\nWords of mine.\n") + "\nAnd more.\n"
    card = updated_card(edited, replace(report, anchor="ELSE"), "org/name", LLAMA)
    for words in ("Words of mine.", "`ELSE`", "hf download org/name --local-dir name", "\nAnd more.\n"):
        assert words in card
    assert card.count(BEGIN) == 1
    assert front_matter("no metadata") == ({}, "no metadata")
    assert front_matter("---\n[\n---\nx")[0] == {}


@pytest.mark.slow
def test_a_recipe_does_not_end_its_own_block(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    recipe = yaml.safe_dump(recipe_for("linear", *models[:2]))
    recipe += "chat_template: |\n  {{ messages }} and more of it\n  ```\n  <script>\n"
    merged(recipe, tmp_path / "out")
    block = (tmp_path / "out" / "README.md").read_text().partition("\n````yaml\n")[2].partition("\n````\n")[0]
    assert yaml.safe_load(block)["chat_template"] == yaml.safe_load(recipe)["chat_template"]
