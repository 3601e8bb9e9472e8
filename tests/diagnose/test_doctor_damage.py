"""Damage to tensors of a merge whose parents are named: each kind is called by its name, in families of all layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from carry_support import noisy
from cli_support import output_of
from plugin_support import make as make_recipe_model
from plugin_support import save, state, write_recipe, write_state
from subjects import scratch
from test_doctor import recipe
from tiny_models import ALL, Case, make

from rotation_merge.diagnose.doctor import diagnose, open_case

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors, Case], None]
CASES = {case.family: case for case in reversed(ALL)}

FAMILIES = ("llama", "qwen3", "mixtral", "gemma", "cohere")
"""With queries and keys of their own and RoPE; Cohere's pairs stand side by side, the others' in halves."""


def head_size(case: Case) -> int:
    config = case.model_class.config_class(**case.config)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def other_rope(tensors: Tensors, case: Case) -> None:
    """Halves become neighbours, or neighbours halves."""
    size = head_size(case)
    shape = (size // 2, 2) if case.family == "cohere" else (2, size // 2)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        turned = tensors[name].view(-1, *shape, tensors[name].shape[1]).transpose(1, 2)
        tensors[name] = turned.reshape(tensors[name].shape).contiguous()


def shuffled(ending: str, axis: int) -> Damage:
    """Heads of one layer stand in another order, in one of its tensors."""

    def damage(tensors: Tensors, case: Case) -> None:
        name = next(name for name in tensors if name.endswith(ending))
        heads = tensors[name].unflatten(axis, (-1, head_size(case)))
        tensors[name] = heads.roll(1, axis).flatten(axis, axis + 1).contiguous()

    return damage


def changed(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """The first of all tensors whose names end so; with an empty ending all."""

    def damage(tensors: Tensors, case: Case) -> None:
        for name in [name for name in tensors if name.endswith(ending)][: 1 if ending else None]:
            tensors[name] = change(tensors[name]).contiguous()

    return damage


DAMAGES: dict[str, tuple[str, Damage]] = {
    "queries and keys in the other layout": ("RoPE layout", other_rope),
    "query heads of one layer": ("unlike its parents", shuffled("q_proj.weight", 0)),
    "outputs of one layer's heads": ("unlike its parents", shuffled("o_proj.weight", 1)),
    "all weights halved": ("scale", changed("", lambda x: x / 2)),
    "one tensor three times as large": ("scale", changed("o_proj.weight", lambda x: 3 * x)),
    "one tensor too large": ("unlike its parents", changed("o_proj.weight", lambda x: 1e20 * torch.randn_like(x))),
    "one tensor drawn anew": ("unlike its parents", changed("o_proj.weight", lambda x: torch.randn_like(x) * x.std())),
}


@cache
def merge(family: str) -> tuple[Path, list[Path]]:
    """A merge of two near models, and these."""
    folder = scratch() / f"damage-{family}"
    base = save(make(CASES[family]).float(), folder / "base")
    tuned = noisy(base, folder / "tuned", 0.03, seed=1)
    after = state(tuned)
    middle = {name: (tensor + after[name]) / 2 for name, tensor in state(base).items()}
    return write_state(middle, base, folder / "merged"), [base, tuned]


def causes(out: Path, parents: list[Path]) -> list[str]:
    return [cause.name for cause in diagnose(open_case(str(out), [str(parent) for parent in parents]))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_called_by_its_name(damage: str, family: str, tmp_path: Path) -> None:
    """And by no other."""
    (merged, parents), (name, change) = merge(family), DAMAGES[damage]
    tensors = state(merged)
    torch.manual_seed(0)
    change(tensors, CASES[family])
    assert causes(write_state(tensors, merged, tmp_path / "out"), parents) == [name]


@pytest.mark.parametrize("lacking", ["norm.weight", "o_proj.weight", None])
def test_what_was_not_examined_is_said(lacking: str | None, tmp_path: Path) -> None:
    """A tensor that is missing hides damage to another one."""
    merged, parents = merge("llama")
    tensors = state(merged)
    shuffled("q_proj.weight", 0)(tensors, CASES["llama"])
    kept = {name: tensor for name, tensor in tensors.items() if lacking is None or not name.endswith(lacking)}
    out = write_state(kept, merged, tmp_path / "out")
    lines = output_of("doctor", out, *parents, code=1)
    assert ("unlike its parents" in lines) == (lacking is None)
    assert (f"weights of {out} were not examined: correct" in lines) == (lacking is not None)


def test_parents_that_do_not_fit_are_not_compared(tmp_path: Path) -> None:
    merged, (base, _) = merge("llama")
    other = make_recipe_model("llama", tmp_path / "other", intermediate_size=32)
    lines = output_of("doctor", merged, base, other, code=1)
    assert "Weights were not compared with the parents': correct what is named above" in lines


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_computes_the_same_is_no_damage(family: str, tmp_path: Path) -> None:
    """A whole merge; and one whose neurons stand in another order together."""
    merged, parents = merge(family)
    assert causes(merged, parents) == []
    tensors = state(merged)
    for name in [name for name in tensors if ".layers.0.mlp." in name and name.endswith("weight")]:
        if "experts" not in name and "gate.weight" not in name:
            tensors[name] = tensors[name].flip(1 if "down_proj" in name else 0)
    assert causes(write_state(tensors, merged, tmp_path / "out"), parents) == []


def test_a_parent_in_the_other_layout(tmp_path: Path) -> None:
    """Seen before anything is merged."""
    merged, (base, tuned) = merge("llama")
    tensors = state(tuned)
    other_rope(tensors, CASES["llama"])
    models = [base, write_state(tensors, merged, tmp_path / "other")]
    (cause, *_) = diagnose(open_case(str(write_recipe(recipe(*models), tmp_path / "recipe.yml"))))
    assert cause.name == "RoPE layout"
    assert str(models[1]) in cause.where
