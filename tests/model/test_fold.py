"""Folding norm gains into their readers and centring writers: other weights, same outputs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cli_support import run
from plugin_support import mergekit_yaml, one_error
from residual_support import checkpoint, recipe
from tiny_models import ALL, planted
from torch import Tensor

from rotation_merge.architecture.model import Axis, Block, Norm, Part, Scale, Space, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.model.fold import Fold, folded_tensors

STREAM = Space("s", "stream", {"size": 3})
WIDE = Space("n", "ffn", {"size": 2})


def info(key: str, *axes: tuple[Space, str] | None) -> TensorInfo:
    found = tuple(Axis(((Part(*axis),),)) if axis is not None else Axis() for axis in axes)
    return TensorInfo(key, (key,), found)


def block(*tensors: TensorInfo, norm: Norm, scales: tuple[Scale, ...] = ()) -> Block:
    return Block("b", "m", None, "before", tensors, {}, (norm,), scales)


GAIN, SHIFT = info("norm.weight", (STREAM, "gain")), info("norm.bias", (STREAM, "shift"))
READ, BIAS = info("up.weight", (WIDE, "in"), (STREAM, "read")), info("up.bias", (WIDE, "in"))
WRITE = info("down.weight", (STREAM, "write"), (WIDE, "out"))
VALUES = {
    "norm.weight": torch.tensor([2.0, 0.5, -1.0]),
    "norm.bias": torch.tensor([1.0, 2.0, 3.0]),
    "up.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "up.bias": torch.tensor([0.5, -0.5]),
    "down.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]),
    "scale": torch.tensor([1.0, 10.0, 100.0]),
}


def folded(where: Block, key: str, centred: tuple[str, ...] = (), **values: Tensor) -> list[object]:
    found = where.tensor(key)
    assert found is not None
    result: list[object] = fold(["s"], centred).tensor(where, found, (VALUES | values).get).tolist()
    return result


def fold(streams: list[str], centred: tuple[str, ...] = ()) -> Fold:
    return Fold(cast(Any, SimpleNamespace(layer_normed=lambda stream: stream in centred)), streams)


def test_gain_and_shift_go_into_weight_and_bias() -> None:
    where = block(GAIN, SHIFT, READ, BIAS, norm=Norm("s", "norm.weight", "norm.bias", ("up",), True, 0.0))
    assert folded(where, "norm.weight") == [1, 1, 1]
    assert folded(where, "norm.bias") == [0, 0, 0]
    assert folded(where, "up.weight") == [[2, 1, -3], [8, 2.5, -6]]
    assert folded(where, "up.bias") == [0.5 + 1 + 4 + 9, -0.5 + 4 + 10 + 18]
    assert fold(["s"]).inputs(where, BIAS) == ["up.bias", "norm.weight", "norm.bias", "up.weight"]
    assert fold([]).inputs(where, READ) == ["up.weight"]


def test_shift_is_divided_where_a_reader_has_no_bias() -> None:
    where = block(GAIN, SHIFT, READ, norm=Norm("s", "norm.weight", "norm.bias", ("up",), True, 0.0))
    assert folded(where, "norm.bias") == [0.5, 4, -3]


def test_shift_over_a_zero_gain_is_refused() -> None:
    where = block(GAIN, SHIFT, READ, norm=Norm("s", "norm.weight", "norm.bias", ("up",), True, 0.0))
    gain = torch.tensor([2.0, 0.0, 1.0])
    with pytest.raises(AlignmentError, match=r"norm\.weight.*too small"):
        folded(where, "norm.bias", **{"norm.weight": gain})
    assert folded(where, "norm.bias", **{"norm.weight": gain, "norm.bias": torch.tensor([1.0, 0, 1])}) == [0.5, 0, 1]


@pytest.mark.parametrize(
    ("gain", "dtype"), [(1e-4, torch.bfloat16), (1e-4, torch.float16), (3e-6, torch.float32), (1e-13, torch.float64)]
)
def test_a_gain_too_small_for_the_storage_is_refused(gain: float, dtype: torch.dtype) -> None:
    """The shift over it would be so large that rounding it, once rotated, spoils the other coordinates."""
    where = block(GAIN, SHIFT, READ, norm=Norm("s", "norm.weight", "norm.bias", ("up",), True, 0.0))
    small = torch.tensor([1.0, gain, 2.0], dtype=dtype)
    shift = torch.tensor([0.5, 0.5, 0.5], dtype=dtype)
    with pytest.raises(AlignmentError, match=r"norm\.weight' is too small to be folded.*off by"):
        folded(where, "norm.bias", **{"norm.weight": small, "norm.bias": shift})
    assert folded(where, "norm.bias", **{"norm.weight": small, "norm.bias": shift * (small > 0.1)})[1] == 0


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
    made = checkpoint("gptj", next(c.name for c in ALL if c.family == "gptj"), tmp_path / "plain")
    own = made.state
    own["transformer.h.0.ln_1.weight"][0], own["transformer.h.0.ln_1.bias"][0] = 1e-2, 0.5
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


def test_offset_gain() -> None:
    """Gemma's norms multiply by 1 + weight."""
    where = block(GAIN, READ, norm=Norm("s", "norm.weight", None, ("up",), False, 1.0))
    assert folded(where, "norm.weight") == [0, 0, 0]
    assert folded(where, "up.weight") == [[3, 3, 0], [12, 7.5, 0]]


def test_writers_are_centred_after_layer_scale() -> None:
    scale = Scale("s", "scale", ("down.weight",))
    norm = Norm("s", "norm.weight", None, (), True, 0.0)
    where = block(GAIN, WRITE, info("scale", (STREAM, "gain")), norm=norm, scales=(scale,))
    assert folded(where, "scale") == [1, 1, 1]
    assert folded(where, "down.weight") == [[1, 2], [30, 40], [500, 900]]
    centred = torch.tensor(folded(where, "down.weight", ("s",)))
    torch.testing.assert_close(centred.sum(0), torch.zeros(2), atol=1e-4, rtol=0)
    assert fold(["s"]).inputs(where, WRITE) == ["down.weight", "scale"]


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
