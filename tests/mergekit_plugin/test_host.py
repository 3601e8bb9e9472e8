"""The seam never hurts mergekit: names that another release calls otherwise, entry points, the switch."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from fresh_support import fresh
from plugin_support import make, recipe_for, twin, write_recipe
from renamed_mergekit import NAMES, attempt

from rotation_merge.mergekit_plugin import host

ROOT = Path(__file__).resolve().parents[2]
Outcomes = dict[str, dict[str, dict]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """With each name missing in turn, what merges end with."""
    folder = tmp_path_factory.mktemp("host")
    anchor = make("llama", folder / "anchor", num_hidden_layers=1, tie_word_embeddings=True)
    donor = twin(anchor, folder / "donor")
    ours = recipe_for("linear", anchor, donor)
    stock = {**ours, "merge_method": "linear", "parameters": {}}
    recipes = write_recipe(stock, folder / "stock.yml"), write_recipe(ours, folder / "ours.yml")
    return {name: fresh(lambda: attempt(name, *recipes, folder), start="") for name in NAMES}  # noqa: B023


@pytest.mark.slow
def test_mergekit_merges_on_and_our_first_recipe_names_what_is_missing(outcomes: Outcomes) -> None:
    assert {"_METHODS", "layer_weights", "run_merge"} <= outcomes.keys()
    for name, outcome in outcomes.items():
        assert "broken" not in outcome, (name, outcome)
        stock, ours = outcome["stock"], outcome["ours"]
        assert stock["code"] == 0, (name, outcome)
        assert "model.safetensors" in stock["files"], name
        assert (ours["code"], ours["files"]) == (2, []), (name, ours)
        (line,) = filter(str.strip, ours["output"].splitlines())
        assert line.startswith(f"Error: mergekit {version('mergekit')} is installed"), (name, line)
        assert f"mergekit {host.SUPPORTED} is supported" in line
        assert name == "callback" or name in line


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in host.BUILT_ON.items() for name in names])
def test_every_name_that_we_build_on_is_looked_for(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, owner = place.partition(":")
    held = import_module(module)
    held = getattr(held, owner) if owner else held
    if name in vars(held):
        monkeypatch.delattr(held, name)
    if name in vars(held).get("__annotations__", {}):
        monkeypatch.delitem(held.__annotations__, name)
    with pytest.raises(host.MergekitError, match=f"has no '{name}'|{name}"):
        host._check_names.__wrapped__()


def test_the_supported_range_is_said_once() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"mergekit>={host.OLDEST}"' in text
    assert version("mergekit") in (host.OLDEST, host.NEWEST)  # .ci/run tests both
    assert f"mergekit=={host.NEWEST}" in (ROOT / "requirements.lock").read_text().split()
    assert f"**Which mergekit do I need?** {host.SUPPORTED}, the newest release" in " ".join(
        (ROOT / "docs" / "doctor.md").read_text().split()
    )


@pytest.mark.slow
def test_the_switch_leaves_mergekit_alone(tmp_path: Path) -> None:
    recipe = {"merge_method": "rotation_merge", "base_model": "a", "models": [{"model": "a"}]}

    def switched_off() -> tuple[list[str], list[bool], str]:
        import mergekit.config
        import mergekit.merge_methods as methods
        import mergekit.scripts.run_yaml

        import rotation_merge  # noqa: F401
        from rotation_merge import RotationMergeError
        from rotation_merge.mergekit_plugin.run import merge_recipe

        finders = [type(f).__name__ for f in sys.meta_path if "Mergekit" in type(f).__name__]
        known = ["rotation_merge" in methods.registry._METHODS, hasattr(mergekit.config, "_rotation_merge")]
        try:
            merge_recipe(yaml.safe_dump(recipe), str(tmp_path / "out"))
        except RotationMergeError as error:
            return finders, known, str(error)
        return finders, known, "merged"

    finders, known, said = fresh(switched_off, plugin="0")
    assert (finders, known) == ([], [False, False])
    assert "the plugin is switched off (ROTATION_MERGE_PLUGIN=0)" in said
