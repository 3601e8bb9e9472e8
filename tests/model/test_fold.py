"""Folding norm gains into their readers: gains that are refused, and rounding (of the outputs, see the laws)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from cli_support import run
from plugin_support import mergekit_yaml, one_error
from residual_support import checkpoint, recipe
from tiny_models import ALL, planted

from rotation_merge.errors import AlignmentError
from rotation_merge.model.fold import Fold, folded_tensors

GPTJ = next(case for case in ALL if case.family == "gptj")
"""Whose norm has readers without biases: its shift is divided by its gain."""
GAIN, SHIFT = "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias"


@pytest.mark.parametrize(
    ("gain", "dtype"),
    [
        (0.0, torch.float32),
        (1e-4, torch.bfloat16),
        (1e-4, torch.float16),
        (3e-6, torch.float32),
        (1e-13, torch.float64),
    ],
)
def test_a_gain_too_small_for_the_storage_is_refused(gain: float, dtype: torch.dtype) -> None:
    """The shift over it would be so large that rounding it, once rotated, spoils the other coordinates."""
    model = planted(GPTJ)
    state = {name: tensor.to(dtype) for name, tensor in model.state.items()}
    state[GAIN][0], state[SHIFT][0] = gain, 0.5
    folded = folded_tensors(model.architecture, state, model.rotatable)
    with pytest.raises(AlignmentError, match=r"ln_1\.weight' is too small to be folded.*off by"):
        folded[SHIFT]
    state[SHIFT][0] = 0.0
    assert folded[SHIFT][0] == 0
    torch.testing.assert_close(folded[SHIFT][1:], state[SHIFT][1:].to(folded[SHIFT]) / state[GAIN][1:])


@pytest.mark.slow
def test_small_gains_are_refused_or_folded_well_in_every_family() -> None:
    """bfloat16 models whose norms' shifts have readers without biases: refused where one gain is tiny."""
    found = set()
    for case in [case for case in ALL if case.family in ("falcon", "gptj", "mpt", "starcoder2", "phi")]:
        model = planted(case)
        norms = [(b, n) for b in model.architecture.blocks for n in b.norms if n.stream in model.rotatable and n.shift]
        for where, norm in norms:
            gain, shift = (where.tensor(key) for key in (norm.gain, norm.shift or ""))
            if gain is None or shift is None:
                continue
            state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state.items()}
            state[gain.name][0], state[shift.name][0] = 1e-4, 0.5
            source = folded_tensors(model.architecture, state, model.rotatable)
            folded_well = False
            with contextlib.suppress(AlignmentError):
                folded_well = float(source[shift.name].abs().max()) < 100  # into a bias, where nothing is divided
            if not folded_well:
                found.add(case.family)
                with pytest.raises(AlignmentError, match="too small to be folded"):
                    source[shift.name]
    assert found >= {"gptj", "falcon"}


@pytest.mark.slow
def test_what_the_output_is_rounded_to_counts(tmp_path: Path) -> None:
    """A gain that folds well in float32 is refused where the recipe or the command writes fewer digits."""
    made = checkpoint("gptj", GPTJ.name, tmp_path / "plain")
    own = made.state
    own[GAIN][0], own[SHIFT][0] = 1e-2, 0.5
    anchor, donor = (made.write(own, tmp_path / name) for name in ("anchor", "donor"))
    for number, dtypes in enumerate(({"dtype": "bfloat16"}, {"out_dtype": "bfloat16"}, {})):
        asked = {**recipe(anchor, donor, residual="rotation"), **dtypes}
        done = mergekit_yaml(asked, tmp_path / f"out-{number}")
        assert (tmp_path / f"out-{number}").exists() == (not dtypes)
        assert not dtypes or "in bfloat16 the shift" in one_error(done.output)
    for flags in (("--dtype", "bfloat16"), ()):
        done = run("align", anchor.path, donor.path, tmp_path / "aligned", "--residual", "rotation", *flags)
        assert (tmp_path / "aligned").exists() == (not flags), done.output
        assert not flags or "in bfloat16 the shift" in done.output


def test_half_precision_is_widened_before_folding(tmp_path: Path) -> None:
    """Rounding happens once, at the end: what is folded from half precision is float32."""
    anchor = checkpoint("llama", "llama", tmp_path)
    half = {name: x.half() for name, x in anchor.state.items()}
    seen = folded_tensors(anchor.architecture, half, ("residual",))
    name = "model.layers.0.mlp.up_proj.weight"
    gain = half["model.layers.0.post_attention_layernorm.weight"].float()
    torch.testing.assert_close(seen[name], half[name].float() * gain, rtol=0, atol=0)
    assert seen["model.layers.0.mlp.down_proj.weight"] is half["model.layers.0.mlp.down_proj.weight"]
    folding = Fold(anchor.architecture, ("residual",))
    layer = anchor.architecture.layers("default")[0]
    touched = {i.key for i in layer.tensors if folding.touches(layer, i)}
    assert not any("o_proj" in key or "down_proj" in key for key in touched)
    assert sum("norm" not in key for key in touched) == 5
    with pytest.raises(KeyError):
        seen["absent"]
