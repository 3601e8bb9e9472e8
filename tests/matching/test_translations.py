"""What softmaxes do not see: one vector on every row of a router and, where asked for, of a head; biases of keys."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import error_of_merge, make, merged, recipe_for, relative_distances, state, twin
from tiny_models import ALL, Case, Planted, outputs, planted, twin_of
from torch import Tensor
from variants import ONE

import rotation_merge as rm
from rotation_merge.matching.match import match_model
from rotation_merge.matching.matrix_pairs import axis_views
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.stream import random_gauge

SHIFT: dict[str, Any] = {"attention": "none", "ffn": "none", "scaling": False, "shift_head": True}


def shifts(model: Any, head: bool) -> set[str]:
    """Tensors whose rows may be shifted: heads, or routers."""
    return {
        i.name for i in rm.average([model]).architecture.tensors() if i.common is not None and i.common.head == head
    }


def laid(case: Case) -> Any:
    """The model, without weights."""
    with torch.device("meta"):
        return case.model_class(case.model_class.config_class(**case.config))


FAMILIES = {case.family: case for case in ONE}
WORDS = [case for case in ALL if "LM" in case.class_name or "Conditional" in case.class_name]


@functools.cache
def heads() -> dict[str, Case]:
    """A case of each family whose head's rows may be shifted."""
    return {case.family: case for case in WORDS[::-1] if shifts(laid(case), head=True)}


def other_logits_and_same_probabilities(model: Planted, state: dict[str, Tensor]) -> None:
    logits = outputs(model.holding(state), model.given)["logits"]
    assert (logits - model.expected["logits"]).abs().max() > 1e-2
    assert (logits.log_softmax(-1) - model.expected["logits"].log_softmax(-1)).abs().max() <= 1e-9


OWN = ("bart", "falcon", "gpt2", "gpt_neox", "gptj", "nemotron_h", "opt", "t5", "whisper")
"""Files that say it themselves; the others have it from Llama's."""
MASKED = ("bert", "distilbert", "modernbert")
"""Files of models that predict masked words, and have cases with a head of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "phi", "eurobert", *OWN, *MASKED])
def test_shift_of_a_head_changes_logits_and_no_probability(family: str) -> None:
    if family in MASKED:
        model = planted(next(c for c in WORDS if c.family == family and "untied" in c.name))
    else:
        model = planted(heads()[family]).untied
    shifted, after = shifts(model.pair, head=True), model.twin(seed=1, **SHIFT)
    assert {n for n in after if not torch.equal(after[n], model.state[n])} == shifted != set()
    other_logits_and_same_probabilities(model, after)
    donor = after, model.config
    back = rm.align(model.pair, donor, **SHIFT).apply(donor)
    assert all((back[n] - model.state[n]).abs().max() <= 1e-9 for n in shifted)
    assert "default.rows" not in rm.align(model.pair, donor).transforms


@pytest.mark.parametrize("family", ["deberta_v2", "mpnet", "nomic_bert"])
def test_biases_of_a_tied_head_are_shifted_alone(family: str) -> None:
    """Which pairs of models are refused before; where heads are their own, the law above looks at all of it."""
    model = planted(next(c for c in ALL if c.family == family and c.class_name.endswith("ForMaskedLM")))
    shift = rm.AlignConfig(**SHIFT)
    after = dict(
        moved_tensors(
            model.architecture, model.state, random_gauge(model.architecture, shift, torch.Generator().manual_seed(1))
        )
    )
    assert [n.rpartition(".")[2] for n in after if not torch.equal(after[n], model.state[n])] == ["bias"]
    other_logits_and_same_probabilities(model, after)
    found = match_model(model.architecture, model.state, after, shift)
    back = dict(moved_tensors(model.architecture, after, found.transforms))
    assert all((back[n] - model.state[n]).abs().max() <= 1e-9 for n in back)


@pytest.mark.slow
def test_which_rows_only_a_softmax_sees() -> None:
    """Routers that score by a sigmoid, or by distances, keep their rows; so do heads whose logits are capped."""
    routed = {case.family for case in WORDS if shifts(laid(case), head=False)}
    assert routed == {
        *("mixtral", "qwen_moe", "olmoe", "gpt_oss", "granitemoe", "granitemoehybrid", "qwen3_5_moe"),
        *("qwen3_5_moe_vlm", "qwen3_next", "deepseek", "cohere2_moe", "flex_olmo", "gemma4"),
    }
    assert {case.family for case in WORDS} - heads().keys() == {"gemma2"}
    assert not shifts(laid(next(case for case in WORDS if case.family == "t5")), head=True)


def test_biases_of_a_router_lose_their_constant_too() -> None:
    """gpt-oss: one number on every bias is unseen, and the mean comes to the anchor's."""
    model = planted(next(case for case in ALL if case.family == "gpt_oss"))
    names = [n for n in model.state if n.endswith("router.bias")]
    constant = {name: model.state[name] + 3.0 for name in names}
    assert model.differs(model.state | constant) <= 1e-9
    uneven = {name: x + torch.arange(len(x)) for name, x in constant.items()}
    assert model.differs(model.state | uneven) > 1e-3
    for change, spread in ((constant, 0.0), (uneven, 1.0)):
        donor = model.state | change
        after = rm.align((model.state, model.config), (donor, model.config)).apply((donor, model.config))
        after = after.state_dict()
        assert model.differs(after) == pytest.approx(model.differs(donor), abs=1e-9)
        for name in names:
            assert float((after[name] - model.state[name]).mean()) == pytest.approx(0.0, abs=1e-12)
            assert (after[name] - model.state[name]).abs().max() >= spread


# --- biases of keys


def unseen(model: Any) -> dict[str, Tensor]:
    """By name, which entries of a tensor are biases of keys that softmax cannot see."""
    result = {}
    for info in (info for info in model.architecture.tensors() if len(info.axes) == 1 and info.name in model.state):
        hidden = torch.zeros_like(model.state[info.name], dtype=torch.bool)
        for part, _, entries, _ in axis_views(hidden, hidden, 0, info.axes[0]) if info.axes[0].parts else ():
            entries |= part.role == "k" and part.space.hides_key_bias
        if bool(hidden.any()):
            result[info.name] = hidden
    return result


@pytest.mark.parametrize("family", ["vit", "bert", "opt", "gpt2", "bart", "clip", "distilbert", "siglip", "dinov2"])
def test_large_biases_of_keys_leave_a_twins_map_as_it_is(family: str) -> None:
    model = planted(FAMILIES[family])
    entries = unseen(model)
    assert entries
    draw = torch.Generator().manual_seed(4)
    noisy = {
        name: torch.where(entries[name], 30 * torch.randn(x.shape, generator=draw, dtype=x.dtype), x)
        if name in entries
        else x
        for name, x in model.state.items()
    }
    assert model.differs(noisy) <= 1e-9
    donor = twin_of((noisy, model.config), heads="permutation")
    aligned = rm.align((model.state, model.config), (donor, model.config), heads="permutation")
    moved = aligned.apply((donor, model.config)).state_dict()
    assert model.differs(moved) <= 1e-9
    for name, x in model.state.items():
        seen = ~entries.get(name, torch.zeros_like(x, dtype=torch.bool))
        torch.testing.assert_close(moved[name][seen], x[seen], atol=1e-6, rtol=1e-6)
    assert any(bool((moved[name] - model.state[name])[entry].abs().max() > 1) for name, entry in entries.items())


def test_rotary_positions_and_disentangled_attention_see_them() -> None:
    for family in ("phi", "gpt_neox", "deberta_v2"):
        assert not unseen(planted(FAMILIES[family]))


# --- through recipes and commands


@pytest.mark.slow
def test_a_recipe_asks_for_it(tmp_path: Path) -> None:
    """A twin whose head is shifted is the anchor again where a recipe says so, and keeps its logits where not."""
    anchor = make("mistral", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", shift_head=True)
    for wanted, limit in ((True, 0.0), (False, 1e-2)):
        recipe = recipe_for("linear", anchor, donor, shift_head=wanted)
        result = merged(recipe, tmp_path / f"out-{wanted}")
        off = relative_distances(result, state(anchor))["lm_head.weight"]
        assert off <= 1e-5 if wanted else off > limit


@pytest.mark.slow
def test_commands_compare_probabilities(tmp_path: Path) -> None:
    anchor, donor = (make("mistral", tmp_path / str(seed), seed=seed) for seed in (0, 5))
    made = parsed("align", anchor, donor, tmp_path / "out", "--shift-head", "true")
    assert made["proof"]["difference"] <= made["proof"]["allowed"]
    for flags, code in ((("--probabilities",), 0), ((), 1)):
        assert run("verify", donor, tmp_path / "out", *flags).exit_code == code


@pytest.mark.parametrize(("family", "words"), [("qwen2", "set 'untie: true'"), ("vit", "go through a softmax only")])
def test_it_needs_a_head_of_its_own(family: str, words: str, tmp_path: Path) -> None:
    anchor = make(family, tmp_path / "anchor")
    recipe = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"), shift_head=True)
    assert words in error_of_merge(recipe, tmp_path / "out")
