"""Laws and planted truths that single lines of matching hang on: each fails when its line is broken."""

from __future__ import annotations

import pytest
import torch
from matching_support import gen
from test_devices import weights
from tiny_models import ALL, outputs, planted, reload

from rotation_merge import AlignConfig
from rotation_merge.architecture import families, table
from rotation_merge.architecture.build import Scope, stream_groups
from rotation_merge.architecture.model import Axis, Block, Norm, Part, Space, TensorInfo
from rotation_merge.architecture.registry import shipped
from rotation_merge.matching.match import match_model
from rotation_merge.matching.mean import _relative
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.stream import random_gauge

torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["vit", "gpt_neox", "mixtral"])
def test_relative_frames_undo_the_base_after_the_other(family: str) -> None:
    """A model moved into the common frame and from there into the base's coordinates is moved by the relative frame."""
    architecture = table.sample(shipped()[family])
    options = AlignConfig(heads="permutation", residual=architecture.residual_groups[-1])
    base, other = (random_gauge(architecture, options, gen(seed)) for seed in (1, 2))
    state = {name: x.double() for name, x in weights(architecture, 3).items()}
    common = dict(moved_tensors(architecture, state, other))
    shifts = {name: t for name, t in base.items() if t.kind == "translation"}
    there = dict(moved_tensors(architecture, common, {name: t.inverse() for name, t in shifts.items()}))  # added last
    there = dict(moved_tensors(architecture, there, {n: t.inverse() for n, t in base.items() if n not in shifts}))
    straight = dict(moved_tensors(architecture, state, _relative(architecture, base, other)))
    for name, tensor in there.items():
        torch.testing.assert_close(straight[name], tensor, rtol=1e-9, atol=1e-9)
    assert _relative(architecture, {}, other) == other


@pytest.mark.parametrize("family", ["deberta_v2", "mpnet", "nomic_bert"])
def test_biases_of_a_tied_head_are_shifted_alone(family: str) -> None:
    """Which pairs of models are refused before; where heads are their own, test_translations.py looks at all of it."""
    model = planted(next(c for c in ALL if c.family == family and c.class_name.endswith("ForMaskedLM")))
    shift = AlignConfig(attention="none", heads="none", ffn="none", scaling=False, shift_head=True)
    after = dict(moved_tensors(model.architecture, model.state, random_gauge(model.architecture, shift, gen(1))))
    assert [n.rpartition(".")[2] for n in after if not torch.equal(after[n], model.state[n])] == ["bias"]
    there = outputs(reload(model.case, model.folder, after), model.given)["logits"]
    assert (there - model.expected["logits"]).abs().max() > 1e-2
    assert (there.log_softmax(-1) - model.expected["logits"].log_softmax(-1)).abs().max() <= 1e-9
    found = match_model(model.architecture, model.state, after, shift)
    back = dict(moved_tensors(model.architecture, after, found.transforms))
    assert all((back[n] - model.state[n]).abs().max() <= 1e-9 for n in back)


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_what_reads_a_layer_normed_stream_raw_forbids_rotations(layer: bool, raw: bool) -> None:
    """Centring the writers is seen by a reader that no norm stands before."""
    stream = Space("residual", "stream", {"size": 4})

    def info(key: str, role: str) -> TensorInfo:
        return TensorInfo(key, (key,), (Axis(), Axis(((Part(stream, role),),))))

    tensors = [info("norm.weight", "gain"), info("up.weight", "read"), info("probe.weight", "read")]
    norm = Norm("residual", "norm.weight", None, ("up",) if raw else ("up", "probe"), layer, 0.0)
    block = Block("b", "m", None, "before", tuple(tensors), {}, (norm,))
    spec, config = families()["gpt2"], {"architectures": ["GPT2LMHeadModel"]}
    groups = stream_groups(Scope(spec, config, "", {}), "residual", [block])
    assert ("rotation" in groups) == (not (layer and raw))
    assert ("signed_permutation" in groups) == (not layer)
