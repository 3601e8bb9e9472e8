"""Models of different kinds that one file describes: where one computes otherwise than the other by the same weights,
the difference is named, and no merge averages the two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from cli_support import run
from huggingface_hub.errors import StrictDataclassError
from plugin_support import build, error_of_merge, merged, recipe_for, save
from residual_support import Checkpoint, case, transport
from tiny_models import ALL, Case, difference, further, inputs, keep_float64, make, outputs
from variants import fields_of

import rotation_merge as rm

TASKS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
SAME = 1e-5
"""What is apart by less differs in rounding of rotary tables."""

REFUSED = "refused: "
TOLD = {"layer_norm_eps", "rms_norm_eps", "pad_token_id"}
"""Entries that a merge warns of and takes from the anchor; all others that change what is computed are refused."""

PLACES = "llama_4_scaling_beta"
"""Entry of a table of rotary positions that Ministral 3 alone reads."""

ELSEWHERE = {"output_router_logits", "return_dict", "output_attentions", "output_hidden_states", "use_cache"}
"""Entries by which a model hands out more than the answer, or in another form."""


def kind(case: Case) -> str:
    found: str = getattr(transformers, case.class_name).config_class.model_type
    return found


def of_two_kinds() -> list[tuple[Case, Case]]:
    """Cases of one family and task, a pair for each two kinds."""
    found: dict[tuple[str, str], tuple[Case, Case]] = {}
    known = [case for case in [*ALL, *further()] if hasattr(transformers, case.class_name)]
    for one, other in ((one, other) for one in known for other in known if one.family == other.family):
        alike = any(one.class_name.endswith(task) and other.class_name.endswith(task) for task in TASKS)
        if alike and kind(one) != kind(other):
            found.setdefault((kind(one), kind(other)), (one, other))
    return list(found.values())


def other_kind(model: Any, other: Case, **changes: Any) -> Any | None:
    """A model of the other kind with a model's weights, and its config as far as it knows the entries; None where it
    has other tensors, or cannot be."""
    said = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    if said.get("rope_parameters"):
        said["rope_parameters"] = {k: v for k, v in said["rope_parameters"].items() if k != PLACES}
    known = set(other.model_class.config_class().to_dict())
    try:
        config = other.model_class.config_class(**{**{k: v for k, v in said.items() if k in known}, **changes})
        config._attn_implementation = config._experts_implementation = "eager"
        found = other.model_class(config).double().eval()
        prefixes = model.base_model_prefix, found.base_model_prefix
        found.load_state_dict({name.replace(*prefixes, 1): tensor for name, tensor in model.state_dict().items()})
        found.config.architectures = [other.class_name]
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, StrictDataclassError):
        return None
    return found


def values(name: str, value: Any) -> Iterator[Any]:
    """Others than an entry has."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value * 2 + 1
    elif name.endswith(("_act", "activation")):
        yield from ("relu", "silu")
    elif name == "layer_types" and {*value} <= {"full_attention", "sliding_attention"}:
        yield ["sliding_attention"] * len(value)
    elif name == "sliding_window":
        yield 2
    elif name == "rope_parameters" and "rope_theta" in value:
        yield {**value, "rope_theta": 10.0}


def named(model: Any, other: Any) -> str:
    """What is said of two models' configs where they are aligned or averaged, and whether that is refused."""
    if model.state_dict().keys() != other.state_dict().keys():  # the same tensors, by the names of the first's class
        other = model.state_dict(), {**other.config.to_dict(), "architectures": [type(model).__name__]}
    try:
        rm.average([model, other])
        return " ".join(rm.align(model, other, attention="none", ffn="none", scaling=False).report.notes)
    except rm.RotationMergeError as error:
        if "against" not in str(error):  # not a word on configs
            raise
        return f"{REFUSED}{error}"


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), of_two_kinds(), ids=lambda case: f"{case.family}-{kind(case)}")
def test_whatever_computes_otherwise_is_named(one: Case, other: Case) -> None:
    """As the other's config stands, and with every entry changed that says how a model computes; what computes the same
    and has one config passes."""
    with keep_float64():
        model = make(one)
        given = inputs(one, model)
        expected, plain = outputs(model, given), other_kind(model, other)
        config = {} if plain is None else plain.config.to_dict()
        known = sorted(fields_of(other.class_name) & config.keys() - ELSEWHERE)
        for change in [{}, *({name: changed} for name in known for changed in values(name, config[name]))]:
            if plain is None or (found := other_kind(model, other, **change)) is None:
                continue
            try:
                apart = difference(outputs(found, given), expected)
            except (RuntimeError, ValueError, TypeError):
                continue  # transformers cannot compute with it
            why = named(model, found)
            assert apart <= SAME or any(word in why for word in (REFUSED, *change.keys() & TOLD)), (change, apart)
            if not change and apart <= SAME and kind(one) not in ("cohere", "lfm2"):  # tiny ones lack what is other
                assert REFUSED not in why


def of_kind(model_type: str, name: str, **config: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [name], **config}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "granite": (
        of_kind("granite", "GraniteForCausalLM", embedding_multiplier=12.0),
        "'embedding_multiplier' is 12.0, against 1.0",
    ),
    "mistral": (of_kind("mistral", "MistralForCausalLM", sliding_window=16), "'sliding_window' is 16, against None"),
    "mistral of another activation": (
        of_kind("mistral", "MistralForCausalLM", sliding_window=None, hidden_act="gelu"),
        "'hidden_act' is 'gelu', against 'silu'",
    ),
    "smollm3": (
        of_kind("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
        "'no_rope_layers' is [1, 0], against [1, 1]",
    ),
}
ALIKE = of_kind("mistral", "MistralForCausalLM", sliding_window=4096)
"""Looks further back than the models can read."""


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    folder = tmp_path_factory.mktemp("kinds")
    return tuple(save(build("llama", seed), folder / name) for seed, name in enumerate("ab"))


def changed(model: Path, where: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of the same weights with other entries in its config."""
    shutil.copytree(model, where)
    own = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**own, **config}))
    return where


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_no_merge_averages_what_computes_otherwise(name: str, llamas: tuple[Path, Path], tmp_path: Path) -> None:
    """By recipes, the donor as it is or in slices; what is carried from it, and what aligns it alone, is told."""
    config, words = OTHERS[name]
    anchor, donor = llamas[0], changed(llamas[1], tmp_path / "donor", config)
    recipe = recipe_for("linear", anchor, donor)
    layers = [{"model": str(m), "layer_range": [0, 2], "parameters": {"weight": 0.5}} for m in (anchor, donor)]
    sliced = {**{k: v for k, v in recipe.items() if k != "models"}, "slices": [{"sources": layers}]}
    for made in (recipe, sliced, {**recipe, "parameters": {**recipe["parameters"], "anchor": "mean"}}):
        (tmp_path / "recipe.yml").write_text(yaml.safe_dump(made))
        done = run("check", tmp_path / "recipe.yml")
        assert (done.exit_code, words in " ".join(done.output.split())) == (1, True), done.output
        assert words in error_of_merge(made, tmp_path / "out")
    if name != "smollm3":  # which is refused everywhere: it decides a symmetry
        assert words in " ".join(run("align", anchor, donor).output.split())
        first, second = (Checkpoint(case("llama", "llama"), path) for path in (anchor, donor))
        merged(transport(first, (second, second)), tmp_path / "carried")
        assert words in (tmp_path / "carried" / "README.md").read_text()


@pytest.mark.slow
def test_another_kind_that_computes_the_same_is_averaged(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    merged(recipe_for("linear", llamas[0], changed(llamas[1], tmp_path / "donor", ALIKE)), tmp_path / "out")
    assert "against" not in (tmp_path / "out" / "README.md").read_text()
