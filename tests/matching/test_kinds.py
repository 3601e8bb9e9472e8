"""Models of different kinds that one file describes: where one computes otherwise than the other by the same weights,
the difference is named, and no merge averages the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from cli_support import run
from huggingface_hub.errors import StrictDataclassError
from plugin_support import build, merged, recipe_for, save
from residual_support import Checkpoint, case, transport
from tiny_models import ALL, Case, difference, further, inputs, keep_float64, make, outputs

import rotation_merge as rm

TASKS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
SAME = 1e-5
"""What is apart by less differs in rounding of rotary tables."""

REFUSED = "refused: "
PLACES = "llama_4_scaling_beta"
"""Entry of a table of rotary positions that Ministral 3 alone reads."""


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


def other_kind(model: Any, other: Case) -> Any | None:
    """A model of the other kind with a model's weights, and its config as far as it knows the entries; None where it
    has other tensors, or cannot be."""
    said = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    if said.get("rope_parameters"):
        said["rope_parameters"] = {k: v for k, v in said["rope_parameters"].items() if k != PLACES}
    known = set(other.model_class.config_class().to_dict())
    try:
        config = other.model_class.config_class(**{k: v for k, v in said.items() if k in known})
        config._attn_implementation = config._experts_implementation = "eager"
        turned = other.model_class(config).double().eval()
        prefixes = model.base_model_prefix, turned.base_model_prefix
        turned.load_state_dict({name.replace(*prefixes, 1): tensor for name, tensor in model.state_dict().items()})
        turned.config.architectures = [other.class_name]
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, StrictDataclassError):
        return None
    return turned


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
    """What computes the same and has one config passes; entries that differ are tried in architecture/test_variants."""
    with keep_float64():
        model = make(one)
        turned = other_kind(model, other)
        if turned is None:
            return
        given = inputs(one, model)
        try:
            apart = difference(outputs(turned, given), outputs(model, given))
        except (RuntimeError, ValueError, TypeError):
            return  # transformers cannot compute with it
        refused = named(model, turned).startswith(REFUSED)
        assert refused or apart <= SAME
        if apart <= SAME and kind(one) not in ("cohere", "lfm2"):  # tiny ones lack what is other
            assert not refused


@pytest.mark.slow
def test_what_computes_otherwise_is_told_where_nothing_is_averaged(tmp_path: Path) -> None:
    """Of what is carried, and what is aligned alone; another kind that computes the same is averaged without a word."""
    anchor, donor = (save(build("llama", seed), tmp_path / name) for seed, name in enumerate("ab"))
    changed(donor, sliding_window=4096)  # further back than the models can read
    merged(recipe_for("linear", anchor, donor), tmp_path / "out")
    assert "against" not in (tmp_path / "out" / "README.md").read_text()
    changed(donor, sliding_window=16)
    words = "'sliding_window' is 16, against None"
    assert words in " ".join(run("align", anchor, donor).output.split())
    first, second = (Checkpoint(case("llama", "llama"), path) for path in (anchor, donor))
    merged(transport(first, (second, second)), tmp_path / "carried")
    assert words in (tmp_path / "carried" / "README.md").read_text()


def changed(model: Path, **entries: Any) -> None:
    """Turn a Llama into a Mistral."""
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **entries}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **mistral}))
