"""Classifiers whose outputs stand for other things, or for the same in another order, are refused on every path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_support import run
from plugin_support import recipe_for
from tiny_models import ALL, Planted, load_file, planted, save_file

import rotation_merge
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.labels import labels
from rotation_merge.matching.member import Member
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import check_pair
from rotation_merge.seam.merging import merge_recipe

NAMES = ("bad", "good")
OTHER = {
    "order": (("good", "bad"), r"another order: row 0 is 'good', against 'bad'.*reorder the rows"),
    "names": (("bad", "fine"), r"other names than .*: row 1 is 'fine', against 'good'"),
}


@pytest.fixture(scope="module")
def model() -> Planted:
    return planted(next(case for case in ALL if case.class_name == "BertForSequenceClassification"))


def called(names: tuple[str, ...]) -> dict[str, dict[str, object]]:
    return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def placed(model: Planted, folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    config = json.loads((model.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | called(names)))
    save_file(load_file(model.folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_classifier_is_asked() -> None:
    """Of every family: other labels of a classifier are refused; a model without such a head has none."""
    seen = set()
    for case in ALL:
        if not case.class_name.endswith(("SequenceClassification", "ImageClassification", "LlamaForCausalLM")):
            continue
        own = planted(case)
        shapes = {name: tuple(tensor.shape) for name, tensor in own.state.items()}
        first, second = (
            Member(name, {**own.config, **called(names)}, own.architecture, shapes)
            for name, names in (("anchor", NAMES), ("donor", OTHER["order"][0]))
        )
        if case.class_name.endswith("ForCausalLM"):
            check_pair(first, second, NOTHING)
            continue
        with pytest.raises(RotationMergeError, match=OTHER["order"][1]):
            check_pair(first, second, NOTHING)
        heads = [i.name for i in own.architecture.tensors() if any(a.label == "classes" for a in i.axes)]
        assert heads
        check_pair(first, second, NOTHING, excluded=heads.__contains__)
        seen.add(case.family)
    assert len(seen) > 5


def test_names_of_no_ones_making_are_none() -> None:
    assert labels({"id2label": {0: "LABEL_0", 1: "LABEL_1"}}) == () == labels({}) == labels({"id2label": ["a", "b"]})
    assert labels({"id2label": {"10": "c", "9": "b", 0: "a"}}) == ("a", "b", "c")


@pytest.mark.parametrize("what", OTHER)
def test_every_path_refuses_other_labels(what: str, model: Planted, tmp_path: Path) -> None:
    names, wanted = OTHER[what]
    a, b = placed(model, tmp_path / "a", NAMES), placed(model, tmp_path / "b", names)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(recipe_for("linear", a, b)))
    for asked in (("align", a, b, tmp_path / "out"), ("compare", a, b), ("inspect", recipe), ("check", recipe)):
        done = run(*asked)
        assert done.exit_code != 0, asked
        assert "id2label" in done.output, (asked, done.output)
    with pytest.raises(RotationMergeError, match=wanted):
        merge_recipe(recipe.read_text(), str(tmp_path / "merged"))
    recipe.write_text(yaml.safe_dump(recipe_for("linear", a, b, exclude="classifier")))
    for command in ("inspect", "check"):
        done = run(command, recipe)
        assert done.exit_code == 0, done.output
    merge_recipe(recipe.read_text(), str(tmp_path / "merged"))


def test_the_api_refuses_modules_with_other_labels(model: Planted) -> None:
    first, second = (load_named(model, names) for names in (NAMES, OTHER["order"][0]))
    with pytest.raises(RotationMergeError, match=OTHER["order"][1]):
        rotation_merge.align(second, first, first.config)


def load_named(model: Planted, names: tuple[str, ...]) -> object:
    found = model.case.model_class(model.case.model_class.config_class(**{**model.case.config, **called(names)}))
    found.config.id2label = dict(enumerate(names))
    return found
