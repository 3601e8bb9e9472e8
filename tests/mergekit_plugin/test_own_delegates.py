"""A delegate of our own: recipes of ours find it, mergekit's list and its own recipes do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from mergekit import merge_methods
from mergekit.merge_methods.base import InputContract, MergeMethod, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.easy_define import merge_method
from plugin_support import merged, mergekit_yaml, one_error, recipe_for, state

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.methods import OwnMethod, Source
from rotation_merge.averaging.parameters import WEIGHT
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.keys import BY_NAME

Pair = tuple[Path, Path]


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> MergeMethod:
    """A delegate that averages any models."""

    @merge_method(name="half", pretty_name="Half", contract=InputContract(min_inputs=2))
    def average(group: TensorGroup, share: float = 0.5) -> torch.Tensor:
        return sum(tensor * share for tensor in group.tensors)  # type: ignore[return-value]

    assert isinstance(average, MergeMethod)
    monkeypatch.setitem(delegates.OWN, "half", average)
    return average


def test_a_recipe_of_ours_merges_with_it(half: MergeMethod, pair: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair)
    for entry in recipe["models"]:
        del entry["parameters"]
    recipe["parameters"] |= {"delegate": "half", "share": 0.25}
    got = merged(recipe, tmp_path / "out")
    for name, tensor in state(pair[0]).items():
        torch.testing.assert_close(got[name], tensor / 2, rtol=1e-4, atol=1e-4)


def test_it_is_held_to_its_contract(half: MergeMethod, pair: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair, shrae=1)
    recipe["parameters"]["delegate"] = "half"
    for entry in recipe["models"]:
        del entry["parameters"]
    result = mergekit_yaml(recipe, tmp_path / "out")
    assert result.exit_code == 2
    assert "did you mean 'share'" in one_error(result.output)


def test_mergekit_does_not_list_it_and_we_do(half: MergeMethod) -> None:
    assert "half" not in [method.spec.name for method in merge_methods.registered_methods()]
    listed = json.loads(run("inspect", "--methods", "--json").output)["delegates"]
    assert [d["own"] for d in listed if d["name"] == "half"] == [True]


def test_a_recipe_may_name_it_alone(half: MergeMethod, pair: Pair, tmp_path: Path) -> None:
    """The same as the delegate of a recipe in which nothing moves."""
    models = [{"model": str(path)} for path in pair]
    alone = {"merge_method": "half", "base_model": str(pair[0]), "models": models}
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    delegated = {**alone, "merge_method": "rotation_merge", "parameters": {"delegate": "half", **still}}
    states = [merged(recipe, tmp_path / str(number)) for number, recipe in enumerate((alone, delegated))]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


class Lower(OwnMethod):
    """The lower of the models' values: what it does with one tensor."""

    maps_only = False

    spec = MergeMethodSpec(name="lower", parameters=(WEIGHT,), contract=InputContract(min_inputs=2))

    def merge(self, sources: Sequence[Source], info: TensorInfo, parameters: Mapping[str, Any]) -> torch.Tensor:
        return torch.stack([source.weight for source in sources]).amin(0)


def test_a_new_averaging_is_one_class(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delegates.OWN, "lower", Lower())
    recipe = recipe_for("linear", *pair, attention="none", ffn="none", heads="none", scaling=False, residual="none")
    recipe["parameters"]["delegate"] = "lower"
    got, states = merged(recipe, tmp_path / "out"), [state(path) for path in pair]
    for name, tensor in got.items():
        assert torch.equal(tensor, torch.minimum(states[0][name], states[1][name])), name


def test_no_parameter_of_ours_has_the_name_of_a_delegates() -> None:
    """One value would hold for both."""
    methods = {m.spec.name: {p.name for p in m.spec.parameters} for m in merge_methods.registered_methods()}
    shared = {m: names & set(BY_NAME) for m, names in methods.items() if m != "rotation_merge"}
    assert {m: names for m, names in shared.items() if names} == {}
