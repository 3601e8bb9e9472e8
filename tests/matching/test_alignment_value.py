"""An alignment as a value: applied, inverted, saved, loaded; models in any form; views that are lazy."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import reads_of_files
from residual_support import Checkpoint, checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import difference, inputs, outputs

import rotation_merge as rm
from rotation_merge import RotationMergeError
from rotation_merge.matching.alignment import load_file as read_alignment_file

CASES = [
    ("llama", "llama", "rotation"),
    ("vit", "classifier", "rotation"),
    ("bert", "classifier", "permutation"),
    ("gemma2", "tied", "signed_permutation"),
]
"""Rotary and not, LayerNorm folded, biases that softmax cannot see, a tied head."""


Pair = tuple[Checkpoint, Checkpoint, rm.Alignment]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two independent models of one class, aligned."""
    (family, name, residual), folder = request.param, tmp_path_factory.mktemp("pair")
    anchor, donor = (checkpoint(family, name, folder / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    return anchor, donor, rm.align(anchor.path, donor.path, heads="permutation", residual=residual)


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("anchor") / "0")


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("donor") / "1", seed=1)


def answers(view: rm.View, like: Checkpoint, where: Path) -> dict[str, torch.Tensor]:
    """What a view computes once it has been written."""
    view.save_pretrained(where)
    return like.outputs(where)


@pytest.mark.slow
def test_applied_alignment_keeps_the_function(pair: Pair, tmp_path: Path) -> None:
    anchor, donor, alignment = pair
    moved = alignment.apply(donor.path)
    assert difference(answers(moved, donor, tmp_path / "moved"), donor.outputs()) <= 1e-4
    stored = donor.state
    assert any(not torch.equal(moved[name], stored[name]) for name in stored)
    assert {name: tensor.dtype for name, tensor in moved.items()} == {n: t.dtype for n, t in stored.items()}
    still = answers(alignment.apply_anchor(anchor.path), anchor, tmp_path / "still")
    assert difference(still, anchor.outputs()) <= 1e-4


def test_any_form_of_a_model_is_moved_alike(pair: Pair) -> None:
    _, donor, alignment = pair
    moved = alignment.apply(donor.path).state_dict()
    again = alignment.apply((donor.state, donor.config)).state_dict()
    assert all(torch.equal(again[name], moved[name]) for name in moved)
    module = donor.case.model_class.from_pretrained(donor.path, dtype=torch.float64, attn_implementation="eager").eval()
    computed = alignment.apply(module, strict=False).to_module()
    given = inputs(donor.case, module)
    assert difference(outputs(computed, given), outputs(module, given)) <= 1e-4
    assert module is not computed


def test_the_inverse_brings_the_function_back_to_the_old_coordinates(pair: Pair, tmp_path: Path) -> None:
    _, donor, alignment = pair
    back = alignment.inverse().apply(alignment.apply(donor.path))
    assert difference(answers(back, donor, tmp_path / "back"), donor.outputs()) <= 1e-4
    if not alignment.irreversible_notes():
        for name, tensor in donor.state.items():
            torch.testing.assert_close(back[name], tensor, atol=1e-5, rtol=1e-4)
    else:
        assert bool(alignment.folded) or "Biases" in alignment.irreversible_notes()[-1]


def test_weights_of_an_average_count(tmp_path: Path) -> None:
    first, second = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    mean = rm.average([first.path, second.path], weights=[3, 1])
    a, b = first.state, second.state
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, 0.75 * a[name] + 0.25 * b[name])
    assert torch.equal(rm.average([first.path])["lm_head.weight"], a["lm_head.weight"])


def test_views_compute_nothing_before_they_are_asked(
    anchor: Checkpoint, donor: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment = rm.align(anchor.path, donor.path, heads="permutation")
    reads, name = reads_of_files(monkeypatch), "model.layers.1.mlp.up_proj.weight"
    view = alignment.apply(donor.path)
    assert not reads
    view[name]
    assert set(reads) == {(str(donor.path), name)}


def test_checksums_are_taken_when_they_are_needed(
    anchor: Checkpoint, donor: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alignment that is not saved reads stored models for nothing but itself."""
    taken: list[int] = []
    real = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: (taken.append(1), real(data))[1])
    alignment = rm.align(anchor.path, donor.path, heads="permutation")
    moved = alignment.apply(donor.path).state_dict()
    assert not taken
    alignment.save(tmp_path / "map.safetensors")
    assert len(taken) == len(anchor.state) + len(donor.state)
    again = rm.Alignment.load(tmp_path / "map.safetensors")
    assert all(torch.equal(moved[name], tensor) for name, tensor in again.apply(donor.path).state_dict().items())
    with pytest.raises(RotationMergeError, match="is not that of"):
        again.apply(anchor.path).state_dict()


def test_a_model_that_was_moved_is_another(anchor: Checkpoint, donor: Checkpoint) -> None:
    """Also where it comes from the very files that the alignment was made for."""
    alignment = rm.align(anchor.path, donor.path, heads="permutation")
    moved = alignment.apply(donor.path)
    unmoved = rm.align(donor.path, anchor.path, heads="permutation").apply_anchor(donor.path)
    others = [moved, unmoved.to(torch.bfloat16)]
    for model in others:
        with pytest.raises(RotationMergeError, match=f"is not that of {donor.path}"):
            alignment.apply(model).state_dict()
    again = rm.align(anchor.path, moved, heads="permutation")
    with pytest.raises(RotationMergeError, match="is not that of"):
        again.apply(donor.path).state_dict()
    assert len(again.apply(moved).state_dict()) == len(alignment.apply(moved, strict=False).state_dict())


def test_a_model_that_changed_after_it_was_aligned_is_not_saved_for(tmp_path: Path) -> None:
    anchor, donor = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    alignment = rm.align(anchor.path, donor.path, heads="permutation")
    weights = donor.path / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(RotationMergeError, match="was changed after it was aligned"):
        alignment.save(tmp_path / "map.safetensors")
    with pytest.raises(RotationMergeError, match="was changed after it was aligned"):
        alignment.apply(donor.path).state_dict()


@pytest.mark.parametrize("form", ["folder", "module"])
def test_classes_in_another_order_take_their_names_along(form: str, tmp_path: Path) -> None:
    anchor, donor = (checkpoint("bert", "classifier", tmp_path / str(seed), seed=seed) for seed in range(2))
    count = len(donor.config["id2label"])
    names = [f"class {number}" for number in range(count)]
    orders = {anchor.path: names, donor.path: names[::-1]}
    for path, order in orders.items():
        config = json.loads((path / "config.json").read_text())
        config |= {"id2label": dict(enumerate(order)), "label2id": {name: i for i, name in enumerate(order)}}
        (path / "config.json").write_text(json.dumps(config))
    models = [anchor.path, donor.path]
    if form == "module":
        models = [anchor.case.model_class.from_pretrained(path, attn_implementation="eager").eval() for path in models]
    alignment = rm.align(*models, heads="permutation")
    moved = alignment.apply(models[1])
    assert torch.equal(moved["classifier.bias"], donor.state["classifier.bias"].flip(0))
    mean = rm.average([alignment.apply_anchor(models[0]), moved])
    ends = anchor.state["classifier.bias"], donor.state["classifier.bias"].flip(0)
    torch.testing.assert_close(mean["classifier.bias"], (ends[0] + ends[1]) / 2)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    torch.testing.assert_close(mean[name], (anchor.state[name] + moved[name]) / 2)
    moved.save_pretrained(tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [kept["id2label"][str(i)] for i in range(count)] == names
    assert [moved.to_module().config.id2label[i] for i in range(count)] == names


def test_gradients_flow_through_a_view(anchor: Checkpoint, donor: Checkpoint) -> None:
    alignment = rm.align(anchor.path, donor.path, heads="permutation", scaling=False)
    state = {name: tensor.clone().requires_grad_() for name, tensor in donor.state.items()}
    view = alignment.apply((state, donor.config))
    name = "model.layers.0.self_attn.v_proj.weight"
    weights = torch.randn(view[name].shape, generator=torch.Generator().manual_seed(0))
    (view[name] * weights).sum().backward()
    gradient = state[name].grad
    assert gradient is not None
    torch.testing.assert_close(gradient.norm(), weights.norm())  # rotations and orders keep norms


def test_dtypes_are_rounded_to_once(anchor: Checkpoint, donor: Checkpoint, tmp_path: Path) -> None:
    half = tmp_path / "half"
    module = donor.case.model_class.from_pretrained(donor.path, dtype=torch.bfloat16)
    module.save_pretrained(half)
    alignment = rm.align(anchor.path, half, heads="permutation")
    wide, narrow = alignment.apply(half, dtype=torch.float32), alignment.apply(half)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert wide[name].dtype == torch.float32
    assert torch.equal(wide[name].bfloat16(), narrow[name])
    assert not torch.equal(wide[name], narrow[name].float())


def test_shards_and_small_files_are_written(tmp_path: Path) -> None:
    anchor, donor = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    (donor.path / "tokenizer_config.json").write_text("{}")
    view = rm.align(anchor.path, donor.path, heads="permutation").apply(donor.path)
    view.save_pretrained(tmp_path / "out", max_shard_size="20K")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    with pytest.raises(RotationMergeError, match="already exists; write to a new folder"):
        view.save_pretrained(tmp_path / "out")


def test_other_weights_are_refused_and_fine_tunes_where_asked(
    anchor: Checkpoint, donor: Checkpoint, tmp_path: Path
) -> None:
    alignment = rm.align(anchor.path, donor.path, heads="permutation")
    with pytest.raises(RotationMergeError, match=r"tensor '.*' is not that of .*donor|1.*strict=False"):
        alignment.apply(anchor.path).state_dict()
    assert alignment.apply(anchor.path, strict=False).state_dict()
    small = checkpoint("bert", "classifier", tmp_path / "bert")
    with pytest.raises(RotationMergeError, match=r"architecture is bert, that of .* is llama"):
        alignment.apply(small.path)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    with pytest.raises(RotationMergeError, match=r"there is no option 'head'.*did you mean 'heads'"):
        rm.align(anchor.path, anchor.path, head="permutation")
    with pytest.raises(RotationMergeError, match="state dict without its config"):
        rm.align(anchor.state, anchor.path)
    with pytest.raises(RotationMergeError, match="no such directory"):
        rm.align(str(tmp_path / "gone"), anchor.path)
    with pytest.raises(RotationMergeError, match="of type int"):
        rm.align(3, anchor.path)
    with pytest.raises(RotationMergeError, match="no models are given"):
        rm.average([])
    with pytest.raises(RotationMergeError, match="sum is zero"):
        rm.average([anchor.path, anchor.path], weights=[1, -1])
    with pytest.raises(RotationMergeError, match="has no facts on its models"):
        rm.Alignment({}).apply(anchor.path)


@pytest.mark.slow
def test_any_form_of_a_model_is_matched_on_samples_and_fitted(
    anchor: Checkpoint, donor: Checkpoint, tmp_path: Path
) -> None:
    """Folders, states with a config and views as modules; files that are loaded again move the stored model."""
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 32, (2, 8), generator=generator)} for _ in range(4)]
    given = batches[0]
    module = donor.case.model_class.from_pretrained(donor.path, attn_implementation="eager").eval()
    view = rm.align(anchor.path, donor.path).apply(donor.path)
    for number, form in enumerate([donor.path, (donor.state, donor.config), view]):
        matched = rm.align(anchor.path, form, match_on="both", samples=batches)
        learned = rm.fit(anchor.path, form, batches, options=rm.FitConfig(steps=2)).alignments[0]
        for name, alignment in {"matched": matched, "learned": learned}.items():
            path = tmp_path / f"{name}-{number}.safetensors"
            alignment.save(path)
            moved = rm.Alignment.load(path).apply(form).to_module()
            assert difference(outputs(moved, given), outputs(module, given)) <= 1e-4
    assert rm.align(anchor.path, donor.path, match_on="activations", samples="self").report is not None
    assert rm.fit(anchor.path, [donor.path], "self", options=rm.FitConfig(steps=2)).alignments


def test_a_view_is_matched_on_its_own_activations(anchor: Checkpoint, donor: Checkpoint) -> None:
    """Not on those of the module that it was made of, whose neurons have another order."""
    modules = [c.case.model_class.from_pretrained(c.path, attn_implementation="eager").eval() for c in (anchor, donor)]
    samples = [{"input_ids": torch.randint(3, 32, (8, 12), generator=torch.Generator().manual_seed(0))}]
    twin_view = rm.Alignment.random(modules[1], scaling=False).apply(modules[1])
    alignment = rm.align(modules[1], twin_view, match_on="activations", samples=samples, scaling=False)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(alignment.apply(twin_view)[name], modules[1].state_dict()[name], atol=1e-4, rtol=1e-4)


def test_bad_samples_and_options_of_matching_are_one_line(anchor: Checkpoint, donor: Checkpoint) -> None:
    models = [c.case.model_class.from_pretrained(c.path, attn_implementation="eager").eval() for c in (anchor, donor)]
    batches = [{"input_ids": torch.randint(3, 32, (2, 8))} for _ in range(4)]
    far = [{"input_ids": torch.full((2, 8), 4000)} for _ in range(4)]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: rm.align(*models, match_on="both"), "give 'samples'"),
        (lambda: rm.align(*models, match_on="both", samples=batches[0]), "are no batches"),
        (lambda: rm.align(*models, match_on="both", samples=far), "token id 4000 is outside"),
        (lambda: rm.align(*models, untie="no"), "option 'untie' is 'no'; it must be true or false"),
        (lambda: rm.fit(*models, far), "token id 4000 is outside"),
        (lambda: rm.fit(models[0], [], batches), "no donors are given"),
        (lambda: rm.fit(*models, batches, rm.FitConfig()), "of type FitConfig; it must be of type AlignConfig"),
        (lambda: rm.fit(*models, batches, options={"steps": 2}), "of type dict; it must be of type FitConfig"),
        (lambda: rm.fit(*models, batches, options=rm.FitConfig(coefficients=(1.0,))), "1 'coefficients' for 2 models"),
        (lambda: rm.FitConfig(coefficients=("a", "b")), "it must be a tuple of numbers"),
        (lambda: rm.measure(models[0], batches, {"kinds": "gram"}), "of type dict; it must be of type MeasureConfig"),
        (lambda: rm.transfer(*models, models[0], rm.AlignConfig()), "it must be of type TransferConfig"),
    ]
    for call, words in calls:
        with pytest.raises(RotationMergeError, match=words) as error:
            call()
        assert "\n" not in str(error.value)


def test_what_is_refused_is_called_by_another_name_than_what_was_expected(
    anchor: Checkpoint, donor: Checkpoint
) -> None:
    module = anchor.case.model_class.from_pretrained(anchor.path)
    alignment = rm.align(anchor.path, donor.path)
    with pytest.raises(RotationMergeError, match=rf"^the given model: tensor '.*' is not that of {donor.path}, which"):
        alignment.apply(module).state_dict()


def test_dtypes_and_places_that_cannot_be_are_one_line(anchor: Checkpoint, donor: Checkpoint, tmp_path: Path) -> None:
    """And nothing is left behind."""
    alignment = rm.align(anchor.path, donor.path)
    view = alignment.apply(donor.path)
    for dtype in ("bfloat16", "cpu", torch.int8):
        for call in (view.to, lambda dtype: alignment.apply(donor.path, dtype=dtype)):
            with pytest.raises(RotationMergeError, match=r"'dtype' is .*; it must be one of: torch.bfloat16"):
                call(dtype)
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RotationMergeError, match="is a file, which is in the way; name a directory to write"):
        view.save_pretrained(tmp_path / "file")
    with pytest.raises(RotationMergeError, match="a file stands in the way"):
        alignment.save(tmp_path / "file" / "alignment.safetensors")
    assert sorted(tmp_path.iterdir()) == before
    alignment.save(tmp_path / "new" / "folder" / "alignment.safetensors")
    assert rm.Alignment.load(tmp_path / "new" / "folder" / "alignment.safetensors").basis is not None


def test_another_vocabulary_is_one_line_that_names_both(anchor: Checkpoint, donor: Checkpoint, tmp_path: Path) -> None:
    config = {**donor.config, "vocab_size": donor.config["vocab_size"] + 8}
    grown = donor.case.model_class(donor.case.model_class.config_class.from_dict(config))
    grown.save_pretrained(tmp_path / "grown")
    batches = [{"input_ids": torch.randint(3, 32, (2, 8))} for _ in range(2)]
    for call in (rm.barrier, rm.fit):
        words = rf"{tmp_path / 'grown'}: tensor '.*' is \[58, 32\], in {anchor.path} it is \[50, 32\]; bring"
        with pytest.raises(RotationMergeError, match=words):
            call(anchor.path, tmp_path / "grown", batches)
    with pytest.raises(RotationMergeError, match=rf"{anchor.path}: has 50 tokens, {tmp_path / 'grown'} has 58, and"):
        rm.polish(anchor.path, [tmp_path / "grown"], batches)


@pytest.mark.slow
def test_an_alignment_that_is_given_to_a_transfer_is_checked(tmp_path: Path) -> None:
    new, old, other = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(3))
    alignment = rm.align(new.path, old.path, residual="rotation")
    path = tmp_path / "alignment.safetensors"
    alignment.save(path)
    expected = rm.transfer(old.path, old.path, new.path, alignment=alignment).state_dict()
    by_file = rm.transfer(old.path, old.path, new.path, alignment=path)
    assert all(torch.equal(by_file[name], tensor) for name, tensor in expected.items())
    with pytest.raises(RotationMergeError, match=r"is not that of .*1, which the alignment was made for"):
        rm.transfer(old.path, other.path, new.path, alignment=alignment)
    with pytest.raises(RotationMergeError, match="option 'alignment' is 3; it must be an Alignment"):
        rm.transfer(old.path, old.path, new.path, alignment=3)


def test_a_module_without_numbers_is_one_line(tmp_path: Path) -> None:
    """As it is when accelerate keeps weights on disk."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    empty = anchor.case.model_class.from_pretrained(anchor.path).to("meta")
    with pytest.raises(RotationMergeError, match=r"anchor: tensor '.*' has no numbers \(device 'meta'\); load its"):
        rm.align(empty, anchor.path)


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """An alignment file with other tensors, or another head."""
    with safe_open(path, framework="pt") as file:
        meta, tensors = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    head = json.loads(meta["head"])
    change(tensors, head)
    save_file(tensors, path, metadata={**meta, "head": json.dumps(head)})


def without_a_bias(tensors: dict[str, torch.Tensor], head: dict[str, Any]) -> None:
    del tensors[next(key for key in tensors if key.startswith("bias of the anchor|"))]


def with_a_bias_of_nan(tensors: dict[str, torch.Tensor], head: dict[str, Any]) -> None:
    tensors[next(key for key in tensors if key.startswith("bias of the anchor|"))].fill_(torch.nan)


def with_a_class_twice(tensors: dict[str, torch.Tensor], head: dict[str, Any]) -> None:
    head["rows"] = {"classifier.weight": [0, [0, 0]]}


def with_layers_by_the_million(tensors: dict[str, torch.Tensor], head: dict[str, Any]) -> None:
    head["config"]["num_hidden_layers"] = 400_000_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_bias, "is missing in its head"),
        (with_a_bias_of_nan, "bias '.*' is damaged"),
        (with_a_class_twice, "loses classes"),
        (with_layers_by_the_million, "map.safetensors: its config says 400000000 layers"),
    ],
)
def test_what_a_file_says_of_its_models_is_not_believed(change: Any, words: str, tmp_path: Path) -> None:
    anchor, donor = (checkpoint("bert", "classifier", tmp_path / str(seed), seed=seed) for seed in range(2))
    path = tmp_path / "map.safetensors"
    rm.align(anchor.path, donor.path, heads="permutation").save(path)
    rewritten(path, change)
    for architecture in (None, anchor.architecture)[: 1 if change is with_layers_by_the_million else 2]:
        with pytest.raises(RotationMergeError, match=words):
            read_alignment_file(path, architecture)


def test_an_alignment_is_pickled_with_what_it_knows_of_its_models(anchor: Checkpoint, donor: Checkpoint) -> None:
    alignment = rm.align(anchor.path, donor.path)
    again = pickle.loads(pickle.dumps(alignment))
    assert again.basis.donor.fingerprint == alignment.basis.donor.fingerprint
    assert all(
        torch.equal(tensor, alignment.apply(donor.path)[name]) for name, tensor in again.apply(donor.path).items()
    )


@pytest.mark.parametrize("side", ["anchor", "donor"])
def test_a_model_without_its_task_is_moved_under_its_own_names(side: str, tmp_path: Path) -> None:
    """By the value and by the command: as many of its tensors change, to what they are under the task's names."""
    models = {s: checkpoint("llama", "llama", tmp_path / s, seed=seed) for seed, s in enumerate(("anchor", "donor"))}
    moved = rm.align(models["anchor"].path, models["donor"].path, heads="permutation").apply(models["donor"].path)
    body = models[side].case.model_class.from_pretrained(models[side].path, dtype=torch.float32).model
    body.save_pretrained(tmp_path / "body")
    paths = {**{s: str(model.path) for s, model in models.items()}, side: str(tmp_path / "body")}
    written = run("align", paths["anchor"], paths["donor"], tmp_path / "out", "--heads", "permutation")
    assert written.exit_code == 0, written.output
    views = [rm.align(paths["anchor"], paths["donor"], heads="permutation").apply(paths["donor"])]
    for tensors in (*views, load_file(tmp_path / "out" / "model.safetensors")):
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, moved[name if name in moved else f"model.{name}"], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_values_say_what_they_are_in_one_line(anchor: Checkpoint, donor: Checkpoint) -> None:
    """In a notebook; and nothing is read for it."""
    batches = [{"input_ids": torch.randint(3, 32, (2, 8))} for _ in range(4)]
    alignment = rm.align(anchor.path, donor.path, residual="rotation")
    statistics, view = rm.measure(donor.path, batches), alignment.apply(donor.path, dtype=torch.float64)
    delta = 0.5 * rm.Delta.between(anchor.path, donor.path)
    fitted = rm.fit(anchor.path, donor.path, batches, options=rm.FitConfig(steps=1))
    assert repr(alignment) == f"Alignment({donor.path} to {anchor.path}, 5 spaces, folded: residual)"
    assert repr(view) == f"View({donor.path}, 21 tensors, torch.float64)"
    assert repr(statistics) == f"Statistics({donor.path}, gram, 8 samples of samples)"
    assert repr(delta) == f"Delta(for {anchor.path}, scale 0.5)"
    for value in (alignment, alignment.report, view, statistics, delta, fitted):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 1000
    assert view in [view]
    assert len({view, view}) == 1
    assert list(statistics) == sorted(statistics.keys)


def test_what_is_no_model_is_one_line(anchor: Checkpoint, donor: Checkpoint) -> None:
    alignment, delta = rm.align(anchor.path, donor.path), rm.Delta.between(anchor.path, donor.path)
    arrays = {name: tensor.numpy() for name, tensor in donor.state.items()}
    for call, words in [
        (lambda: alignment.apply_anchor(delta), "is of type Delta, which is not a model"),
        (lambda: rm.average([delta]), "is of type Delta, which is not a model"),
        (lambda: rm.align(anchor.path, (donor.config, donor.state)), r"donor: entry '.*' of its state dict is of type"),
        (lambda: rm.align(anchor.path, (arrays, donor.config)), "is of type ndarray; give a pair"),
    ]:
        with pytest.raises(RotationMergeError, match=words):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("vit", "classifier")])
def test_a_folded_donor_is_not_averaged_with_the_anchor_as_it_is(family: str, name: str, tmp_path: Path) -> None:
    """Their gains would differ, and their readers too; a folded anchor that was written is folded."""
    anchor, donor = (checkpoint(family, name, tmp_path / str(seed), seed=seed) for seed in range(2))
    alignment = rm.align(anchor.path, donor.path, residual="rotation")
    moved, folded = alignment.apply(donor.path), alignment.apply_anchor(anchor.path)
    for models in ([anchor.path, moved], [moved, anchor.path]):
        with pytest.raises(
            RotationMergeError, match=rf"{anchor.path}: '.*' is not folded into its readers, .*apply_anc"
        ):
            rm.average(models)
    with pytest.raises(RotationMergeError, match="is not folded into its readers"):
        rm.barrier(anchor.path, moved, [{"input_ids": torch.randint(3, 32, (2, 8))}])
    folded.save_pretrained(tmp_path / "folded")
    expected = rm.average([folded, moved])
    again = rm.average([tmp_path / "folded", moved])
    assert all(torch.equal(again[key], tensor) for key, tensor in expected.items())


def test_training_a_module_leaves_the_model_that_it_came_from(anchor: Checkpoint, donor: Checkpoint) -> None:
    """Readers of safetensors give the same memory again, also to whoever opens the folder next."""
    alignment, state = rm.align(anchor.path, donor.path), anchor.state
    before = {name: tensor.clone() for name, tensor in state.items()}
    for form in (anchor.path, (state, anchor.config)):
        for parameter in alignment.apply_anchor(form).to_module().parameters():
            parameter.data.zero_()
        for tensor in alignment.apply_anchor(form).state_dict().values():
            tensor.zero_()
        again = alignment.apply_anchor(form)
        assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
