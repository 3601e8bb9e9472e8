"""`inspect` and `barrier` on a recipe do what its merge does: task vectors carried over, options block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import from_file, load, make, merged, twin, write_recipe
from plugin_support import recipe_for as local_recipe
from residual_support import Checkpoint, checkpoint, recipe, report, transport
from residual_support import twin as moved
from safetensors.torch import load_file, save_file
from test_transport import tuned


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, Checkpoint, Path]:
    """An anchor, an old base that computes the same in other coordinates, a fine-tune of it; and data."""
    folder = tmp_path_factory.mktemp("trio")
    anchor = checkpoint("llama", "llama", folder / "anchor")
    old = moved(anchor, folder / "old", "rotation")
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    return anchor, old, tuned(old, folder / "fine", size=0.2), folder / "data.safetensors"


def loss(path: Path, data: Path) -> float:
    """Of the model itself, on the data."""
    ids = load_file(data)["input_ids"].long()
    with torch.no_grad():
        return float(load(str(path))(input_ids=ids, labels=ids).loss)


class TestCarriedOver:
    def test_inspect_says_what_maps_to_what_and_what_it_costs(self, trio: Any, tmp_path: Path) -> None:
        anchor, old, fine, _ = trio
        path = write_recipe(transport(anchor, (fine, old), residual="rotation"), tmp_path / "r.yml")
        done = run("inspect", path)
        assert done.exit_code == 0, done.output
        assert (
            f"{old.path} is aligned to {anchor.path}; the maps are applied to {fine.path} minus {old.path}"
            in done.output
        )
        (found,) = parsed("inspect", path)
        assert (found["model"], found["origin"]) == (str(fine.path), str(old.path))
        plain = recipe(anchor, old, residual="rotation")
        (same,) = parsed("inspect", write_recipe(plain, tmp_path / "plain.yml"))
        assert found["memory"] > same["memory"]
        assert found["lines"] == same["lines"]

    def test_inspect_looks_at_all_three_models(self, trio: Any, tmp_path: Path) -> None:
        anchor, old, fine, _ = trio
        for absent in ("fine", "old"):
            document = transport(anchor, (fine, old), residual="rotation")
            text = str(write_recipe(document, tmp_path / "r.yml").read_text()).replace(f"/{absent}\n", "/gone\n")
            done = run("inspect", write_recipe(text, tmp_path / "r.yml"))
            assert done.exit_code == 2
            assert "gone: no such directory" in done.output

    @pytest.mark.slow
    @pytest.mark.parametrize("residual", ["rotation", "none"])
    def test_barrier_goes_along_the_task_vector(self, residual: str, trio: Any, tmp_path: Path) -> None:
        """Aligned, it ends in the model that the merge at weight 1 makes; plain, in the sum as it stands."""
        anchor, old, fine, data = trio
        document = transport(anchor, (fine, old), residual=residual)
        path = write_recipe(document, tmp_path / "r.yml")
        (found,) = parsed("barrier", path, "--data", data, "--points", 3)
        plain, aligned = (curve["loss"] for curve in found["curves"])
        merged(document, tmp_path / "out")
        states = [model.state for model in (anchor, fine, old)]
        added = {name: states[0][name] + states[1][name] - states[2][name] for name in states[0]}
        assert plain[0] == pytest.approx(loss(anchor.path, data), abs=1e-4)
        assert aligned[0] == pytest.approx(plain[0], abs=1e-4)
        assert aligned[2] == pytest.approx(loss(tmp_path / "out", data), abs=1e-4)
        assert plain[2] == pytest.approx(loss(anchor.write(added, tmp_path / "added").path, data), abs=1e-4)
        assert plain[2] != pytest.approx(aligned[2], abs=1e-3)
        if residual == "rotation":
            assert aligned[2] == pytest.approx(loss(fine.path, data), abs=1e-3)
        assert found["donor"] == f"{fine.path} (carried over from {old.path})"

    @pytest.mark.slow
    def test_barrier_by_an_alignment_file(self, trio: Any, tmp_path: Path) -> None:
        anchor, old, fine, data = trio
        file = tmp_path / "map.safetensors"
        options = ("--heads", "permutation", "--residual", "rotation", "--alignment", file)
        assert run("align", anchor.path, old.path, *options).exit_code == 0
        document = from_file(transport(anchor, (fine, old)), file)
        path = write_recipe(document, tmp_path / "r.yml")
        (found,) = parsed("barrier", path, "--data", data, "--points", 3)
        assert found["curves"][1]["loss"][2] == pytest.approx(loss(fine.path, data), abs=1e-3)
        assert "Nothing is matched" in run("inspect", path).output


FILTERS = {
    "filter": [{"filter": "layers.2", "value": "none"}, {"value": "permutation"}],
    "list": ["none", "permutation"],
}
MATCHED = {"filter": [0, 1, 3], "list": [3]}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("deep")
    anchor = make("llama", folder / "anchor", num_hidden_layers=4)
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    return (
        anchor,
        twin(anchor, folder / "donor", ffn="permutation", attention="none", scaling=False),
        folder / "data.safetensors",
    )


@pytest.mark.parametrize("kind", FILTERS)
class TestOptionsByBlock:
    def document(self, kind: str, deep: Any) -> dict[str, Any]:
        return local_recipe("linear", *deep[:2], heads="none", attention="none", scaling=False, ffn=FILTERS[kind])

    def test_inspect(self, kind: str, deep: Any, tmp_path: Path) -> None:
        (found,) = parsed("inspect", write_recipe(self.document(kind, deep), tmp_path / "r.yml"))
        lines = {line["group"]: line for line in found["lines"] if line["kind"] == "ffn"}
        assert lines["permutation"]["count"] == len(MATCHED[kind])
        assert lines["not matched"]["count"] == 4 - len(MATCHED[kind])

    @pytest.mark.slow
    def test_barrier_is_measured_on_what_is_merged(self, kind: str, deep: Any, tmp_path: Path) -> None:
        document = self.document(kind, deep)
        (found,) = parsed("barrier", write_recipe(document, tmp_path / "r.yml"), "--data", deep[2], "--points", 3)
        merged(document, tmp_path / "out")
        assert found["curves"][1]["loss"][1] == pytest.approx(loss(tmp_path / "out", deep[2]), abs=1e-4)
        assert found["curves"][1]["loss"][1] != pytest.approx(found["curves"][1]["loss"][0], abs=1e-3)

    def test_a_merge_with_the_stream_matched_follows_them_too(self, kind: str, deep: Any, tmp_path: Path) -> None:
        document = self.document(kind, deep)
        document["parameters"]["residual"] = "permutation"
        merged(document, tmp_path / "out")
        rows = [row for row in report(tmp_path / "out")["rows"] if row["kind"] == "ffn"]
        assert [row["layer"] for row in rows] == MATCHED[kind]

    def test_so_does_a_merge_at_the_mean(self, kind: str, deep: Any, tmp_path: Path) -> None:
        document = self.document(kind, deep)
        document["parameters"]["anchor"] = "mean"
        merged(document, tmp_path / "out")
        rows = [row for row in report(tmp_path / "out")["rows"] if row["kind"] == "ffn"]
        assert [row["layer"] for row in rows] == MATCHED[kind]
