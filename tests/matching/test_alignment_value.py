"""An alignment as a value: drawn, applied, inverted; models in any form; views that are lazy; errors of one line."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import output_of
from plugin_support import reads_of_files
from residual_support import Checkpoint, checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import ALL, difference, inputs, outputs, planted

import rotation_merge as rm
from rotation_merge import RotationMergeError

DRAWN = [
    ("llama", "llama", {"residual": "rotation"}),
    ("vit", "classifier", {"residual": "rotation"}),
    ("llama", "llama", {"residual": "none", "layers": "1"}),
    ("t5", "plain", {"residual": "largest"}),
    ("llama", "llama, tied, biases", {"residual": "rotation", "untie": True}),
    ("mixtral", "untied", {"residual": "permutation"}),
]
"""RMSNorm and LayerNorm folded, some layers, two streams, an untied head, experts."""

UP = "model.layers.0.mlp.up_proj.weight"
VALUES = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("anchor") / "0")


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("donor") / "1", seed=1)


@pytest.fixture(scope="module")
def aligned(anchor: Checkpoint, donor: Checkpoint) -> rm.Alignment:
    return rm.align(anchor.path, donor.path, heads="permutation")


def loaded(model: Checkpoint, **options: Any) -> Any:
    return model.case.model_class.from_pretrained(model.path, attn_implementation="eager", **options).eval()


def answers(view: rm.View, like: Checkpoint, where: Path) -> dict[str, torch.Tensor]:
    """What a view computes once it has been written."""
    view.save_pretrained(where)
    return like.outputs(where)


def equal(view: Any, tensors: Any) -> bool:
    return all(torch.equal(view[name], tensor) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("vit", "classifier")])
def test_an_alignment_of_independent_models(family: str, name: str, tmp_path: Path) -> None:
    """Any form of the donor is moved alike, keeps its function, and comes back; averaged with the folded anchor."""
    anchor, donor = (checkpoint(family, name, tmp_path / str(seed), seed=seed) for seed in range(2))
    alignment = rm.align(anchor.path, donor.path, heads="permutation", residual="rotation")
    moved, stored, folded = alignment.apply(donor.path), donor.state, alignment.apply_anchor(anchor.path)
    back = alignment.inverse().apply(moved)
    for name, model, view in (("moved", donor, moved), ("folded", anchor, folded), ("back", donor, back)):
        assert difference(answers(view, model, tmp_path / name), model.outputs()) <= 1e-4
    assert not equal(moved, stored)
    assert {name: tensor.dtype for name, tensor in moved.items()} == {n: t.dtype for n, t in stored.items()}
    assert equal(alignment.apply((stored, donor.config)), moved.state_dict())
    module = loaded(donor, dtype=torch.float64)
    computed, given = alignment.apply(module, strict=False).to_module(), inputs(donor.case, module)
    assert difference(outputs(computed, given), outputs(module, given)) <= 1e-4
    for models in ([anchor.path, moved], [moved, anchor.path]):
        with pytest.raises(RotationMergeError, match=rf"{anchor.path}: '.*' is not folded into its .*apply_anchor"):
            rm.average(models)
    with pytest.raises(RotationMergeError, match="is not folded into its readers"):
        rm.barrier(anchor.path, moved, tokens(1))
    assert equal(rm.average([tmp_path / "folded", moved]), rm.average([folded, moved]))


@pytest.mark.parametrize("options", [{"heads": "spectral"}, {"heads": "permutation", "layers": "0-3"}])
def test_layers_that_meet_the_keys_and_values_of_another_one(options: dict[str, str], tmp_path: Path) -> None:
    """Of five layers the last two meet those of the second and third; in the third, keys are values.

    Their coordinates stay, query heads move inside their groups: a donor with nothing in common keeps its function.
    """
    model = planted(next(case for case in ALL if (case.family, case.name) == ("gemma4", "shared keys")))
    draw = torch.Generator().manual_seed(3)
    donor = {n: x + 9 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    alignment = rm.align(model.pair, (donor, model.config), **options)
    moved = alignment.apply((donor, model.config)).state_dict()
    assert model.differs(moved) == pytest.approx(model.differs(donor), abs=1e-8)
    alignment.save(tmp_path / "file")
    assert rm.Alignment.load(tmp_path / "file").transforms.keys() == alignment.transforms.keys()


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2].values()))}")
def test_a_random_alignment_is_saved_and_inverted_like_any(
    case: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    parent = checkpoint(*case[:2], tmp_path / "model")
    alignment, other = (rm.Alignment.random(parent.path, heads="permutation", seed=s, **case[2]) for s in (0, 1))
    twin = alignment.apply(parent.path)
    assert not equal(other.apply(parent.path), twin)
    for name, value in {"twin": alignment, "inverse": alignment.inverse()}.items():
        value.save(tmp_path / "new" / name)
    assert equal(rm.Alignment.load(tmp_path / "new" / "twin").apply(parent.path), twin)
    back = rm.Alignment.load(tmp_path / "new" / "inverse").apply(twin)
    assert difference(answers(back, parent, tmp_path / "back"), parent.outputs()) <= 1e-4
    for name, tensor in {} if alignment.irreversible_notes() else parent.state.items():
        torch.testing.assert_close(back[name], tensor, atol=1e-5, rtol=1e-4)


# --- views


def test_nothing_is_read_before_it_is_asked_for(
    anchor: Checkpoint, donor: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor reads one; checksums of stored models are taken when the alignment is saved, or pickled."""
    alignment, taken, real = rm.align(anchor.path, donor.path, heads="permutation"), list[int](), zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: (taken.append(1), real(data))[1])
    reads, view = reads_of_files(monkeypatch), alignment.apply(donor.path)
    assert not reads
    view[UP]
    assert set(reads) == {(str(donor.path), UP)}
    moved = view.state_dict()
    assert not taken
    alignment.save(tmp_path / "map.safetensors")
    assert len(taken) == len(anchor.state) + len(donor.state)
    for again in (rm.Alignment.load(tmp_path / "map.safetensors"), pickle.loads(pickle.dumps(alignment))):
        assert equal(again.apply(donor.path), moved)
        with pytest.raises(RotationMergeError, match="is not that of"):
            again.apply(anchor.path).state_dict()


def test_a_model_that_was_moved_is_another(aligned: rm.Alignment, anchor: Checkpoint, donor: Checkpoint) -> None:
    """Also where it comes from the very files that the alignment was made for."""
    moved = aligned.apply(donor.path)
    unmoved = rm.align(donor.path, anchor.path, heads="permutation").apply_anchor(donor.path)
    again = rm.align(anchor.path, moved, heads="permutation")
    for alignment, model in ((aligned, moved), (aligned, unmoved.to(torch.bfloat16)), (again, donor.path)):
        with pytest.raises(RotationMergeError, match="is not that of"):
            alignment.apply(model).state_dict()
    assert len(again.apply(moved).state_dict()) == len(aligned.apply(moved, strict=False).state_dict())


def test_a_model_that_changed_after_it_was_aligned_is_not_saved_for(anchor: Checkpoint, tmp_path: Path) -> None:
    donor = checkpoint("llama", "llama", tmp_path / "donor", seed=1)
    alignment, weights = rm.align(anchor.path, donor.path), donor.path / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    for use in (lambda: alignment.save(tmp_path / "map"), lambda: alignment.apply(donor.path).state_dict()):
        with pytest.raises(RotationMergeError, match="was changed after it was aligned"):
            use()


def test_gradients_flow_through_a_view(anchor: Checkpoint, donor: Checkpoint) -> None:
    alignment = rm.align(anchor.path, donor.path, heads="permutation", scaling=False)
    state = {name: tensor.clone().requires_grad_() for name, tensor in donor.state.items()}
    view = alignment.apply((state, donor.config))
    weights = torch.randn(view[VALUES].shape, generator=torch.Generator().manual_seed(0))
    (view[VALUES] * weights).sum().backward()
    gradient = state[VALUES].grad
    assert gradient is not None
    torch.testing.assert_close(gradient.norm(), weights.norm())  # rotations and orders keep norms


def test_dtypes_are_rounded_to_once(anchor: Checkpoint, donor: Checkpoint, tmp_path: Path) -> None:
    loaded(donor, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    alignment = rm.align(anchor.path, tmp_path / "half", heads="permutation")
    wide, narrow = (alignment.apply(tmp_path / "half", dtype=dtype)[VALUES] for dtype in (torch.float32, None))
    assert torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, narrow.float())


def test_training_a_module_leaves_the_model_that_it_came_from(aligned: rm.Alignment, anchor: Checkpoint) -> None:
    """Readers of safetensors give the same memory again, also to whoever opens the folder next."""
    state = anchor.state
    before = {name: tensor.clone() for name, tensor in state.items()}
    for form in (anchor.path, (state, anchor.config)):
        for parameter in aligned.apply_anchor(form).to_module().parameters():
            parameter.data.zero_()
        for tensor in aligned.apply_anchor(form).state_dict().values():
            tensor.zero_()
        assert equal(aligned.apply_anchor(form), before)


# --- forms of models, and what is said of values


def tokens(count: int = 4, rows: int = 2, length: int = 8, word: int | None = None) -> list[dict[str, torch.Tensor]]:
    generator, size = torch.Generator().manual_seed(0), (rows, length)
    drawn = (torch.randint(3, 32, size, generator=generator) for _ in range(count))
    return [{"input_ids": x if word is None else torch.full(size, word)} for x in drawn]


@pytest.mark.slow
def test_any_form_of_a_model_is_matched_on_samples_and_fitted(
    aligned: rm.Alignment, anchor: Checkpoint, donor: Checkpoint, tmp_path: Path
) -> None:
    """Folders, states with a config and views as modules; files that are loaded again move the stored model.

    A view is matched on its own activations, not on those of the module it was made of.
    """
    batches, module = tokens(), loaded(donor)
    for number, form in enumerate([donor.path, (donor.state, donor.config), aligned.apply(donor.path)]):
        matched = rm.align(anchor.path, form, match_on="both", samples=batches)
        learned = rm.fit(anchor.path, form, batches, options=rm.FitConfig(steps=2)).alignments[0]
        for name, alignment in {"matched": matched, "learned": learned}.items():
            alignment.save(tmp_path / f"{name}-{number}")
            moved = rm.Alignment.load(tmp_path / f"{name}-{number}").apply(form).to_module()
            assert difference(outputs(moved, batches[0]), outputs(module, batches[0])) <= 1e-4
    assert rm.align(anchor.path, donor.path, match_on="activations", samples="self").report is not None
    assert rm.fit(anchor.path, [donor.path], "self", options=rm.FitConfig(steps=2)).alignments
    samples, twin = tokens(1, 8, 12), rm.Alignment.random(module, scaling=False).apply(module)
    back = rm.align(module, twin, match_on="activations", samples=samples, scaling=False).apply(twin)
    torch.testing.assert_close(back[UP], module.state_dict()[UP], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["anchor", "donor"])
def test_a_model_without_its_task_is_moved_under_its_own_names(
    side: str, aligned: rm.Alignment, anchor: Checkpoint, donor: Checkpoint, tmp_path: Path
) -> None:
    """By the value and by the command: as many of its tensors change, to what they are under the task's names."""
    models, moved = {"anchor": anchor, "donor": donor}, aligned.apply(donor.path)
    loaded(models[side], dtype=torch.float32).model.save_pretrained(tmp_path / "body")
    paths = [tmp_path / "body" if name == side else model.path for name, model in models.items()]
    output_of("align", *paths, tmp_path / "out", "--heads", "permutation")
    view = rm.align(*paths, heads="permutation").apply(paths[1])
    for tensors in (view, load_file(tmp_path / "out" / "model.safetensors")):
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, moved[name if name in moved else f"model.{name}"], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_values_say_what_they_are_in_one_line(anchor: Checkpoint, donor: Checkpoint) -> None:
    """In a notebook; and nothing is read for it."""
    alignment = rm.align(anchor.path, donor.path, residual="rotation")
    statistics, view = rm.measure(donor.path, tokens()), alignment.apply(donor.path, dtype=torch.float64)
    delta = 0.5 * rm.Delta.between(anchor.path, donor.path)
    fitted = rm.fit(anchor.path, donor.path, tokens(), options=rm.FitConfig(steps=1))
    assert repr(alignment) == f"Alignment({donor.path} to {anchor.path}, 5 spaces, folded: residual)"
    assert repr(view) == f"View({donor.path}, 21 tensors, torch.float64)"
    assert repr(statistics) == f"Statistics({donor.path}, gram, 8 samples of samples)"
    assert repr(delta) == f"Delta(for {anchor.path}, scale 0.5)"
    values = (alignment, alignment.report, view, statistics, delta, fitted)
    assert all("\n" not in repr(value) and len(repr(value)) < 1000 for value in values)
    assert (view in [view], len({view, view})) == (True, 1)


# --- what is refused


@pytest.fixture(scope="module")
def scene(anchor: Checkpoint, donor: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What calls are made with: two models in several forms, others that do not fit, an alignment, samples."""
    folder = tmp_path_factory.mktemp("scene")
    grown = {**donor.config, "vocab_size": donor.config["vocab_size"] + 8}
    donor.case.model_class(donor.case.model_class.config_class.from_dict(grown)).save_pretrained(folder / "grown")
    (folder / "file").write_text("kept")
    return {
        **{"file": folder / "file", "A": anchor.path, "B": donor.path, "a": loaded(anchor), "b": loaded(donor)},
        **{"state": donor.state, "config": donor.config},
        "arrays": {name: tensor.numpy() for name, tensor in donor.state.items()},
        "bert": checkpoint("bert", "classifier", folder / "bert").path,
        "tied": checkpoint("llama", "llama, tied, biases", folder / "tied").path,
        **{"grown": folder / "grown", "empty": loaded(anchor).to("meta")},
        **{"maps": rm.align(anchor.path, donor.path), "delta": rm.Delta.between(anchor.path, donor.path)},
        **{"batches": tokens(), "far": tokens(word=4000)},
    }


LOCAL = rm.AlignConfig(attention="none", scaling=False, residual="permutation")
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: rm.align(s.state, s.A), "state dict without its config"),
    (lambda s: rm.align(s.A, (s.config, s.state)), "donor: entry '.*' is of type .* in its state dict"),
    (lambda s: rm.align(s.A, (s.arrays, s.config)), "is of type ndarray in its state dict; give a pair"),
    (lambda s: rm.align(s.empty, s.A), r"anchor: tensor '.*' has no numbers \(device 'meta'\); load its"),
    (lambda s: rm.align(s.a, s.b, untie="no"), "option 'untie' is 'no'; it must be true or false"),
    (lambda s: rm.align(s.a, s.b, match_on="both"), "give 'samples'"),
    (lambda s: rm.align(s.a, s.b, match_on="both", samples=s.batches[0]), "are no batches"),
    (lambda s: rm.align(s.a, s.b, match_on="both", samples=s.far), "token id 4000 is outside"),
    (lambda s: rm.align(s.a, s.b, match_on="inputs"), "one of: weights, activations, both"),
    (lambda s: rm.average([]), "no models are given"),
    (lambda s: rm.average([s.A, s.A], weights=[1, -1]), "sum is zero"),
    (lambda s: rm.average([s.delta]), "is of type Delta, which is not a model"),
    (lambda s: rm.Alignment({}).apply(s.A), "has no facts on its models"),
    (lambda s: rm.Alignment.random(s.tied, residual="rotation"), "untie"),
    (lambda s: rm.Alignment.random(s.A, seed="x"), "whole number"),
    (lambda s: s.maps.apply(s.A).state_dict(), "tensor '.*' is not that of .*1, which .*strict=False"),
    (lambda s: s.maps.apply(s.a).state_dict(), "^the given model: tensor '.*' is not that of .*1, which"),
    (lambda s: s.maps.apply(s.bert), "architecture is bert, that of .* is llama"),
    *((lambda s, dtype=dtype: s.maps.apply(s.B, dtype=dtype), "'dtype' is") for dtype in ("bfloat16", torch.int8)),
    (lambda s: s.maps.apply(s.B).to("cpu"), "'dtype' is .*; it must be one of: torch.bfloat16"),
    (lambda s: rm.fit(s.a, s.b, s.far), "token id 4000 is outside"),
    (lambda s: rm.fit(s.a, [], s.batches), "no donors are given"),
    (lambda s: rm.fit(s.a, s.bert, s.batches), "only models of one architecture"),
    (lambda s: rm.fit(s.a, s.b, s.batches[:1]), "two batches"),
    (lambda s: rm.fit(s.a, s.b, s.batches, LOCAL, rm.FitConfig(steps=1)), "nothing to learn"),
    (lambda s: rm.fit(s.a, s.b, s.batches, options=rm.FitConfig(objective="labels")), "needs data with labels"),
    (lambda s: rm.fit(s.a, s.b, s.batches, options=rm.FitConfig(coefficients=(1.0,))), "1 'coefficients' for 2 models"),
    (lambda s: rm.fit(s.a, s.b, s.batches, options=rm.FitConfig(state=s.file)), "is in the way"),
    (lambda s: rm.fit(s.a, s.b, s.batches, options=rm.FitConfig(state=s.A)), "did not write"),
    (lambda s: rm.fit(s.a, s.b, s.batches, rm.FitConfig()), "of type FitConfig; it must be of type AlignConfig"),
    (lambda s: rm.fit(s.a, s.b, s.batches, options={"steps": 2}), "of type dict; it must be of type FitConfig"),
    (lambda s: rm.measure(s.a, s.batches, {"kinds": "gram"}), "of type dict; it must be of type MeasureConfig"),
    (lambda s: rm.transfer(s.a, s.b, s.a, rm.AlignConfig()), "it must be of type TransferConfig"),
    (lambda s: rm.transfer(s.B, s.B, s.A, alignment=3), "option 'alignment' is 3; it must be an Alignment"),
    (lambda s: rm.transfer(s.A, s.A, s.B, alignment=s.maps), "is not that of .*1, which the alignment was made for"),
    *(
        (lambda s, call=call: call(s.A, s.grown, s.batches), r"grown: tensor '.*' is \[58, 32\], in .* is \[50, 32\]")
        for call in (rm.barrier, rm.fit)
    ),
    (lambda s: s.maps.apply(s.B).save_pretrained(s.B), "already exists; write to a new folder"),
    (lambda s: s.maps.apply(s.B).save_pretrained(s.file), "is a file, which is in the way"),
    (lambda s: s.maps.save(s.file / "alignment.safetensors"), "a file stands in the way"),
    (lambda s: rm.polish(s.A, [s.grown], s.batches), r"0: no tokenizer says .*50, 58 tokens"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[f"{n}: {words[:40]}" for n, (_, words) in enumerate(REFUSED)])
def test_what_cannot_be_is_one_line(call: Callable[[Any], Any], words: str, scene: dict[str, Any]) -> None:
    with pytest.raises(RotationMergeError, match=words) as error:
        call(SimpleNamespace(**scene))
    assert "\n" not in str(error.value)
