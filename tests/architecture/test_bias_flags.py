"""Biases that a config promises and the weights do not hold are told, in every command that looks at a pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models as tiny
from cli_support import output_of, run
from plugin_support import make, merged, recipe_for, write_recipe

import rotation_merge as rm

FLAGS = ("attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "use_bias", "bias")
PROMISING = [case for case in tiny.ALL if any(case.config.get(flag) for flag in FLAGS)]
WORDS = "is true, but no such bias is stored for"


@pytest.mark.parametrize("case", PROMISING, ids=lambda case: f"{case.family}-{case.name}")
def test_models_that_transformers_makes_keep_the_promise(case: tiny.Case) -> None:
    """Also where only some of the linear maps have a bias; without their biases some of the promise is broken."""
    model = case.model_class(case.model_class.config_class(**case.config))
    config, state = {**model.config.to_dict(), "architectures": [case.model_class.__name__]}, model.state_dict()
    bare = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    told = [" ".join(rm.Alignment.random((tensors, config)).notes) for tensors in (state, bare)]
    assert [WORDS in notes for notes in told] == [False, True]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models without biases; the second's config says that it has some."""
    folder = tmp_path_factory.mktemp("biases")
    plain, promising = (make("llama", folder / name, seed) for seed, name in enumerate(("plain", "promising")))
    file = promising / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_bias": True}))
    return plain, promising


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_every_way_says_it(models: tuple[Path, Path], order: int, tmp_path: Path) -> None:
    """Of an anchor and of a donor: check, merge, align and Python."""
    anchor, donor = models[::order]
    recipe = recipe_for("linear", anchor, donor)
    words = f"'attention_bias' {WORDS}"
    assert words in " ".join(run("check", write_recipe(recipe, tmp_path / "recipe.yml")).output.split())
    merged(recipe, tmp_path / "out")
    assert words in (tmp_path / "out" / "README.md").read_text()
    assert words in output_of("align", anchor, donor, tmp_path / "aligned")
    report = rm.align(str(anchor), str(donor)).report
    assert report is not None
    assert any(words in note for note in report.notes)
