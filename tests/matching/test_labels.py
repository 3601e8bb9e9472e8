"""Classes that stand in another order are put into the anchor's, on every path; other names are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import output_of, parsed, run
from plugin_support import build, from_file, make, merged, recipe_for, save, twin, write_state
from safetensors.torch import load_file
from test_averaging import data_for, farthest, measure, state
from tiny_models import ALL, Case, planted
from torch import Tensor

from rotation_merge import RotationMergeError, align

NAMES = ("bad", "good", "fair")
MOVED = ("fair", "bad", "good")
OTHER = ("bad", "good", "fine")
HEADS = ("SequenceClassification", "ImageClassification", "TokenClassification")
CLASSIFIERS = list({case.family: case for case in ALL if case.class_name.endswith(HEADS)}.values())
STILL = {"attention": "none", "ffn": "none", "scaling": False}
TOLERANCE = 2e-4
HEADS_MOVE = ("--heads", "permutation")


def called(names: tuple[str, ...]) -> dict[str, dict[str, object]]:
    return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def reordered(tensors: Mapping[str, Tensor], rows: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, Tensor]:
    return {n: t.index_select(rows[n][0], torch.tensor(rows[n][1])) if n in rows else t for n, t in tensors.items()}


def of_head(order: tuple[int, ...]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The rows of a classifier's head in another order."""
    return {"classifier.weight": (0, order), "classifier.bias": (0, order)}


def rows_of(*models: Any) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """What puts the second's classes into the first's order."""
    return align(*models, **STILL).basis.rows


@pytest.mark.slow
@pytest.mark.parametrize("case", CLASSIFIERS, ids=lambda case: case.class_name)
def test_every_family_is_put_into_the_anchors_order(case: Case) -> None:
    """Moved by a random gauge besides, the aligned donor computes what the anchor does, class by class."""
    model = planted(case)
    names = tuple(map(str, range(model.config.get("num_labels", len(model.config["id2label"])))))
    anchor = model.state, {**model.config, **called(names)}
    other = {**model.config, **called(names[::-1])}
    back = rows_of(anchor, (model.state, other))
    assert back
    donor = reordered(model.twin(heads="permutation", seed=2), back), other
    assert model.differs(donor[0]) > 1e-3
    alignment = align(anchor, donor, heads="permutation")
    moved = alignment.apply(donor)
    assert model.differs(moved.state_dict()) <= 1e-9
    assert [*moved.to_module().config.id2label.values()] == list(names)
    assert any("another order" in note for note in alignment.report.notes)
    with pytest.raises(RotationMergeError, match=r"'id2label' is \('x', .* that of anchor \('0', "):
        rows_of(anchor, (model.state, {**model.config, **called(("x", *names[1:]))}))


def test_names_of_no_ones_making_are_none() -> None:
    words = planted(next(c for c in ALL if c.class_name == "LlamaForCausalLM"))  # which have no classes
    assert not rows_of(*((words.state, {**words.config, **called(names)}) for names in (NAMES, MOVED)))
    model = build("bert", num_labels=3)
    config = {**model.config.to_dict(), "architectures": ["BertForSequenceClassification"]}

    def rows(*names: Any) -> Any:
        found = rows_of(*((model.state_dict(), {**config, "id2label": own}) for own in names))
        return found and found["classifier.weight"][1]

    moved = dict(enumerate(MOVED))
    for none in ({i: f"LABEL_{i}" for i in range(3)}, None, list(NAMES)):
        assert not rows(none, moved)
        assert not rows(moved, none)
    assert rows({"10": "c", "9": "b", "0": "a"}, dict(enumerate("cab"))) == (1, 2, 0)
    with pytest.raises(RotationMergeError, match="some labels occur twice"):
        rows(dict(enumerate("aba")), dict(enumerate("baa")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An anchor, and a twin of it whose classes stand in another order, both measured."""
    folder = tmp_path_factory.mktemp("labels")
    anchor = make("bert", folder / "anchor", id2label=dict(enumerate(NAMES)), label2id=called(NAMES)["label2id"])
    moved = state(twin(anchor, folder / "twin"))
    rows = of_head(tuple(map(NAMES.index, MOVED)))
    donor = renamed(write_state(reordered(moved, rows), anchor, folder / "donor"), MOVED)
    data = data_for(anchor, folder / "data.npz")
    for model in (anchor, donor):
        measure(model, data)
    return anchor, donor


def renamed(model: Path, names: tuple[str, ...]) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | called(names)))
    return model


@pytest.mark.slow
def test_align_writes_the_anchors_order(models: tuple[Path, Path], tmp_path: Path) -> None:
    """And commands that compare models look at classes of one name."""
    (anchor, donor), out, file = models, tmp_path / "out", tmp_path / "maps.safetensors"
    data = ("--data", labelled(tmp_path))
    output = output_of("align", anchor, donor, out, *HEADS_MOVE, "--alignment", file)
    assert all("another order" in text for text in (output, (out / "README.md").read_text()))
    assert farthest(state(out), state(anchor)) < TOLERANCE
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in called(NAMES)} == called(NAMES)
    first, second = parsed("evaluate", anchor, donor, *data)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
    assert all(parsed("verify", *pair)["same"] for pair in ((donor, out), (anchor, donor)))
    plain, aligned = parsed("barrier", anchor, donor, *data, "--points", "3", *HEADS_MOVE)[0]["curves"]
    assert plain["loss"][0] == pytest.approx(plain["loss"][2], rel=1e-3)
    assert max(aligned["loss"]) == pytest.approx(min(aligned["loss"]), rel=1e-3)
    made = from_file(recipe_for("linear", anchor, donor, prove=True), file)
    assert farthest(merged(made, tmp_path / "replayed"), state(anchor)) < TOLERANCE
    assert "not checked" not in (tmp_path / "replayed" / "README.md").read_text()


def labelled(folder: Path) -> str:
    path = folder / "data.jsonl"
    rows = [{"input_ids": [3 + i, 5, 7, 11], "labels": i % 3} for i in range(12)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("delegate", ["nuslerp", "regmean", "refit"])
def test_recipes_merge_in_the_anchors_order(delegate: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, donor = models
    made = recipe_for("linear", anchor, donor)
    made["parameters"]["delegate"] = delegate
    if delegate == "refit":
        made["parameters"] |= {"data": str(anchor.parent / "data.npz"), "ridge": 0.001}
    assert farthest(merged(made, tmp_path / "out"), state(anchor)) < TOLERANCE
    assert "another order" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_fisher_diagonals_follow_their_rows(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Of a donor with another head, in either order of its classes, the same merge comes."""
    anchor, rows, merges = models[0], of_head(tuple(map(NAMES.index, MOVED))), list[dict[str, Tensor]]()
    far = state(anchor)
    far |= {n: far[n] + torch.arange(3.0).reshape(-1, *[1] * (far[n].ndim - 1)) for n in rows}
    for names, tensors in ((NAMES, far), (MOVED, reordered(far, rows))):
        donor = renamed(write_state(tensors, anchor, tmp_path / names[0]), names)
        measure(donor, str(anchor.parent / "data.npz"))
        made = recipe_for("linear", anchor, donor, **STILL)
        made["parameters"]["delegate"] = "fisher"
        merges.append(merged(made, tmp_path / f"of-{names[0]}"))
    assert farthest(merges[1], merges[0]) < 1e-5


@pytest.mark.slow
def test_a_fine_tune_is_carried_in_the_anchors_order(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The same by a recipe and by `carry`, and whether the old base or its fine-tune is in the new one's order."""
    anchor, donor = models
    tuned = write_state({n: 1.1 * t for n, t in state(donor).items()}, donor, tmp_path / "tuned")
    rows = of_head(tuple(map(MOVED.index, NAMES)))
    in_order = renamed(write_state(reordered(state(tuned), rows), tuned, tmp_path / "in-order"), NAMES)
    wanted = {n: 1.1 * t for n, t in state(anchor).items()}
    for number, model in enumerate((tuned, in_order)):
        made = recipe_for("linear", anchor, model)
        made["models"][0]["parameters"]["weight"] = 0.0
        made["models"][1]["parameters"] = {"weight": 1.0, "finetuned_from": str(donor)}
        assert farthest(merged(made, tmp_path / f"recipe-{number}"), wanted) < TOLERANCE
        out = tmp_path / f"carried-{number}"
        output_of("carry", model, "--from", donor, "--to", anchor, out, *HEADS_MOVE)
        assert farthest(state(out), wanted) < TOLERANCE


@pytest.mark.slow
def test_learned_maps_and_answers_are_in_the_anchors_order(models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, donor = models
    data, file = labelled(tmp_path), tmp_path / "learned.safetensors"
    learning = ("--learn", "--data", data, "--steps", "1", "--batch-size", "4", *HEADS_MOVE)
    found = parsed("align", anchor, donor, *learning, "--alignment", file)["learned"]
    assert found["before"] == pytest.approx(found["after"], rel=0.05)
    made = from_file(recipe_for("linear", anchor, donor), file)
    assert farthest(merged(made, tmp_path / "out"), state(anchor)) < 0.05
    few = ("--data", data, "--samples", "8", "--steps", "1")
    polished = run("polish", anchor, tmp_path / "polished", "--teachers", donor, *few, "--json")
    assert json.loads(polished.stdout)["before"] < 1e-4, polished.output  # it says already what its teacher says


@pytest.mark.slow
def test_other_names_do_not_matter_where_the_head_stays(models: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = models[0], renamed(save(build("bert", 1, num_labels=3), tmp_path / "b"), OTHER)
    recipe = tmp_path / "recipe.yml"
    for options, code in (({}, 1), ({"exclude": "classifier"}, 0)):
        recipe.write_text(yaml.safe_dump(recipe_for("linear", a, b, **options)))
        for command in ("inspect", "check"):
            done = run(command, recipe)
            assert (done.exit_code > 0, "id2label" in done.output) == (code > 0,) * 2
    merged(recipe.read_text(), tmp_path / "merged")


def test_kept_heads_keep_their_order(models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, donor = models
    merged(recipe_for("linear", anchor, donor, heads_of="each"), tmp_path / "out")
    kept = tmp_path / "out" / "heads" / "donor"
    assert json.loads((kept / "config.json").read_text())["id2label"] == called(MOVED)["id2label"]
    torch.testing.assert_close(
        load_file(kept / "model.safetensors")["classifier.bias"], state(donor)["classifier.bias"]
    )
