"""Folding norm gains into their readers: gains that are refused, and rounding (of the outputs, see the laws)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_support import run
from plugin_support import mergekit_yaml, one_error
from residual_support import checkpoint, recipe
from tiny_models import ALL, planted

from rotation_merge.errors import AlignmentError
from rotation_merge.model.fold import folded_tensors

GPTJ = next(case for case in ALL if case.family == "gptj")
"""Whose norm has readers without biases: its shift is divided by its gain."""
GAIN, SHIFT = "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias"
HALF, WHOLE, DOUBLE = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("gain", "dtype"), [(0.0, WHOLE), (1e-4, torch.bfloat16), (1e-4, HALF), (3e-6, WHOLE), (1e-13, DOUBLE)]
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
def test_the_dtype_of_the_output_counts(tmp_path: Path) -> None:
    """A gain that folds well in float32 is refused where the recipe or the command writes fewer digits."""
    plain, out = checkpoint("gptj", GPTJ.name, tmp_path / "plain"), tmp_path / "out"
    state = plain.state
    state[GAIN][0], state[SHIFT][0] = 1e-2, 0.5
    anchor, donor = (plain.write(state, tmp_path / name) for name in ("anchor", "donor"))
    align = ("align", anchor.path, donor.path, tmp_path / "aligned", "--residual", "rotation")
    rotated = recipe(anchor, donor, residual="rotation")
    calls = [mergekit_yaml({**rotated, key: "bfloat16"}, out) for key in ("dtype", "out_dtype")]
    for done in (*calls, run(*align, "--dtype", "bfloat16")):
        assert "in bfloat16 the shift" in one_error(done.output)
    assert not {out, tmp_path / "aligned"} & set(tmp_path.iterdir())
    for done in (mergekit_yaml(rotated, out), run(*align)):
        assert done.exit_code == 0, done.output


def test_half_precision_is_widened_before_folding(tmp_path: Path) -> None:
    """Rounding happens once, at the end: a tensor that is folded from half precision is float32."""
    anchor = checkpoint("llama", "llama", tmp_path)
    half = {name: x.half() for name, x in anchor.state.items()}
    folded = folded_tensors(anchor.architecture, half, ("residual",))
    name, layer = "model.layers.0.mlp.up_proj.weight", "model.layers.0."
    gain = half[f"{layer}post_attention_layernorm.weight"].float()
    torch.testing.assert_close(folded[name], half[name].float() * gain, rtol=0, atol=0)
    same = [name for name in half if layer in name and folded[name] is half[name]]
    assert {name.removeprefix(layer) for name in same} == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    with pytest.raises(KeyError):
        folded["absent"]
