"""Long work tells how far it is, within layers, too, and whoever listens may end it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from plugin_support import make, recipe_for

from rotation_merge import RotationMergeError
from rotation_merge.mergekit_plugin.run import merge_recipe
from rotation_merge.workers import listening


@pytest.fixture(scope="module")
def refit(tmp_path_factory: pytest.TempPathFactory) -> str:
    import yaml

    folder = tmp_path_factory.mktemp("models")
    recipe = recipe_for("linear", make("llama", folder / "anchor"), make("llama", folder / "donor", seed=1))
    recipe["parameters"] = {"delegate": "refit", "samples": 20, "attention": "none", "ffn": "none", "scaling": False}
    return yaml.safe_dump(recipe)


@pytest.mark.slow
def test_a_refit_tells_how_far_it_is_before_the_first_layer_and_within_layers(refit: str, tmp_path: Path) -> None:
    told: list[tuple[str, float, float]] = []
    with listening(lambda *given: told.append(given)):
        merge_recipe(refit, str(tmp_path / "out"))
    assert all(0 <= done <= total for _, done, total in told)
    written = [done / total for what, done, total in told if what == "writing samples, tokens"]
    assert len(written) > 20
    solved = [done for what, done, _ in told if what == "refitting"]
    assert solved == sorted(solved)
    for layer in (1, 2):
        assert len({done for done in solved if layer <= done < layer + 1}) > 4, solved
    saved = [(done, total) for what, done, total in told if what == "writing tensors"]
    assert [done for done, _ in saved] == list(range(1, len(saved) + 1))
    assert saved[-1][0] == saved[-1][1]


@pytest.mark.parametrize("tick", [1, 30, 60])
def test_who_listens_may_end_the_work(tick: int, refit: str, tmp_path: Path) -> None:
    """Nothing is left behind, whenever that is."""
    count = itertools.count(1)

    def ending(*_: object) -> None:
        if next(count) >= tick:
            raise RotationMergeError("it is time")

    with listening(ending), pytest.raises(RotationMergeError, match="it is time"):
        merge_recipe(refit, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())
