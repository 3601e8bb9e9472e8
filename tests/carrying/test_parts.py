"""Parts of carrying, each alone: how changes are cut and sliced, solved towards, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from carry_support import other_coordinates
from plugin_support import merged
from residual_support import case, checkpoint, transport, twin
from test_transport import tuned as fine_tune
from tiny_models import ALL, Case, Planted, difference, outputs, planted
from torch import Tensor
from torch.nn.functional import kl_div

import rotation_merge as rm
from rotation_merge import AlignConfig, Alignment, Delta, RotationMergeError
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.carrying import delta as carry
from rotation_merge.carrying.adapter import of_low_rank
from rotation_merge.carrying.config import MERGED, NONE, PLAIN
from rotation_merge.carrying.judge import RecoveredLift, halves, parted
from rotation_merge.carrying.refit import of_rank, refit_change
from rotation_merge.carrying.sampled import ChangeCandidate, answered_by_target, best_of
from rotation_merge.files import Store
from rotation_merge.matching import moving
from rotation_merge.matching.match import match_model
from rotation_merge.model import vocabulary
from rotation_merge.model.apply import read_tensor, transform_tensor
from rotation_merge.model.low_rank import dense, stacks, transposed
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Data

State = dict[str, Tensor]
FAMILIES = list({case.family: case for case in sorted(ALL, key=lambda case: "untied" in case.name)}.values())
"""A case of each family, one with a head of its own if there is one."""


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_a_change_moves_to_a_base_with_norms_of_its_own(case: Case) -> None:
    """In every family, with the largest residual groups; of each tensor by its factors, too, from which nothing is cut
    at full rank."""
    model, options = planted(case), AlignConfig(heads="permutation", residual="largest")
    if Alignment.random(model.pair, options, untie=True).folded:
        model = model.untied
    (start, alignment), draw = other_coordinates(model.pair, options), torch.Generator().manual_seed(1)
    noise = {name: torch.randn(x.shape, generator=draw, dtype=torch.float64) for name, x in start.items()}
    tuned = {name: x + 0.1 * x.std(correction=0) * noise[name] for name, x in start.items()}
    expected = outputs(model.holding(tuned), model.given)
    assert difference(model.expected, expected) > 1e-3
    moved = Delta.between((start, model.config), (tuned, model.config)).moved(alignment, model.pair)
    result = outputs(model.holding(moved.applied().state_dict()), model.given)
    assert difference(result, expected) <= 1e-8 * max(1.0, *(float(x.abs().max()) for x in expected.values()))
    maps = {name: x if x.ndim > 1 else start[name] for name, x in tuned.items()}
    moved = Delta.between((start, model.config), (maps, model.config)).moved(alignment, model.pair)
    for block in model.architecture.blocks:
        for info in block.tensors:
            before, after = (read_tensor(info, tensors) for tensors in (start, tuned))
            if before is None or after is None or before.ndim < 2 or "bias" in info.name:
                continue
            if before.ndim > 2 and not stacks(info) and (transposed(info) or 1 in before.shape[:2]):  # no maps
                continue
            by_factors = replace(moved, low={info.name: of_low_rank(after - before, info, 10**6)})
            tensors = [dense(delta.change(block, info), info) for delta in (by_factors, moved)]
            torch.testing.assert_close(*tensors, atol=1e-9, rtol=1e-9, msg=info.name)


@pytest.mark.slow
def test_long_vocabularies_are_moved_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `align`, by `carry` and in a recipe, with the same result and no widened copy of one."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    old = twin(anchor, tmp_path / "old", "rotation")
    fine = fine_tune(old, tmp_path / "fine")
    base, sources = open_model(anchor.path, untie=True), [as_tensors(model.state) for model in (old, fine)]
    alignment = match_model(anchor.architecture, anchor.state, old.state, AlignConfig(residual="rotation"))
    aligned, largest = rm.align(anchor.path, old.path, residual="rotation"), dict[str, int]()

    def watch(module: ModuleType) -> None:
        def watched(tensor: Tensor, info: TensorInfo, *rest: Any, **named: Any) -> Tensor:
            if info.vocabulary_axis is not None:
                largest[module.__name__] = max(largest.get(module.__name__, 0), tensor.numel())
            return transform_tensor(tensor, info, *rest, **named)

        monkeypatch.setattr(module, "transform_tensor", watched)

    for module in (moving, carry):
        watch(module)
    results, sizes = list[dict[str, State]](), list[dict[str, int]]()
    for most in (vocabulary.LONG, 1000):
        monkeypatch.setattr(vocabulary, "LONG", most)
        carried = Delta(base, *sources, alignment).applied().state_dict()
        recipe = merged(transport(anchor, (fine, old), residual="rotation"), tmp_path / str(most))
        results.append({"carry": carried, "recipe": recipe, "align": dict(aligned.apply(old.path))})
        sizes.append(dict(largest))
        largest.clear()
    assert len(sizes[0]) == 2
    assert all(sizes[1][name] <= 1000 < size for name, size in sizes[0].items())
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=0)


# --- refit of a change ------------------------------------------------------------------------------------------------


def changed(state: State, size: float, seed: int) -> State:
    """A model with all of its matrices but embeddings changed."""
    draw, still = torch.Generator().manual_seed(seed), ("wte", "wpe", "embed")
    moving = {n for n, x in state.items() if x.ndim > 1 and not any(part in n for part in still)}
    noise = {n: size * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in state.items()}
    return {n: x + noise[n] if n in moving else x for n, x in state.items()}


def ids_for(model: Planted, rows: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config["vocab_size"], (rows, 12), generator=draw)


def refitted(
    model: Planted, pair: Sequence[State], samples: list[Tensor], texts: list[Tensor], *alignment: Any, **options: Any
) -> State:
    """A model with the change of a pair of old base and fine-tune, refitted on samples."""
    new, *others = map(as_tensors, (model.state, *pair))
    delta = Delta(View("new", model.config, model.architecture, new), *others, *alignment)
    batches = ([{"input_ids": part} for part in parts] for parts in (samples, texts))
    return {**model.state, **{n: x.double() for n, x in refit_change(delta, *batches, **options).items()}}


def logits(model: Planted, tensors: State, ids: Tensor) -> Tensor:
    return outputs(model.holding(tensors), {"input_ids": ids})["logits"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("gpt2", "untied")])
def test_a_refit_between_bases_that_are_one_in_other_coordinates(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the new base then gives on the samples is what the fine-tune gives."""
    monkeypatch.setattr("rotation_merge.carrying.refit.RIDGE", 1e-5)
    model, options = planted(case(family, name)), AlignConfig(heads="permutation", residual="rotation")
    old, alignment = other_coordinates(model.pair, options)
    tuned, ids = changed(old, 0.05, seed=0), ids_for(model, 24)
    result = refitted(model, (old, tuned), list(ids.split(12)), [], alignment)
    expected, plain, given = (logits(model, tensors, ids) for tensors in (tuned, model.state, result))
    assert float((given - expected).norm()) <= 0.05 * float((plain - expected).norm())


@pytest.mark.slow
def test_bases_that_have_nothing_in_common() -> None:
    """A head is fitted to probabilities; text of the new base's own holds what it knows."""
    model = planted(case("llama", "llama"))
    old, samples, texts = changed(model.state, 0.3, seed=1), ids_for(model, 8), ids_for(model, 8, seed=1)
    tuned = changed(old, 0.1, seed=2)
    new_answers, tuned_answers, old_answers = (logits(model, x, samples) for x in (model.state, tuned, old))
    answers = (new_answers + tuned_answers - old_answers).log_softmax(-1)
    losses = []
    for ridge in (1e-4, None):
        given = logits(model, refitted(model, (old, tuned), [samples], [], softmax=ridge), samples)
        losses.append(float(kl_div(given.log_softmax(-1), answers, log_target=True)))
    assert losses[0] < 0.9 * losses[1]
    moved = []
    for own in ([texts], []):
        given = logits(model, refitted(model, (old, tuned), [samples], own, softmax=1e-3), texts)
        moved.append(float((given - logits(model, model.state, texts)).norm()))
    assert moved[0] < 0.7 * moved[1]


def test_rank_is_cut_where_the_inputs_see_least() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 9, generator=draw, dtype=torch.float64) * torch.logspace(0, -2, 9, dtype=torch.float64)
    with_one = torch.cat([x, torch.ones(200, 1, dtype=torch.float64)], 1)
    change = torch.randn(7, 10, generator=draw, dtype=torch.float64)
    cut = of_rank(change, with_one.mT @ with_one, 2)
    assert int(torch.linalg.matrix_rank(cut[:, :9])) == 2
    assert torch.equal(cut[:, 9], change[:, 9])
    best = torch.linalg.svdvals(x @ change[:, :9].mT)[2:].norm()
    torch.testing.assert_close((x @ (change - cut)[:, :9].mT).norm(), best)


# --- judging ----------------------------------------------------------------------------------------------------------

LIFT = RecoveredLift(2.0, 1.0, (2.5, 1.5), (2.2, 1.6), "refit", " at scale 1", margin=0.1, margin_at_home=0.2)
NEAR = RecoveredLift(2.0, 1.0, (1.75, 1.5), (1.05, 1.6), "wudi", " at scale 1")
"""Between releases of one lineage the fine-tune itself stands below all of what it gained at home."""
VERDICTS: dict[str, tuple[RecoveredLift, str]] = {
    "some": (LIFT, "gained on the old base (0.300 ± 0.1 of 1.000 ± 0.2 nats)."),
    "no clear gain at home": (replace(LIFT, old=1.1), "Recovered lift: unknown, the fine-tune's gain"),
    "unknown errors": (replace(LIFT, margin_at_home=None), "(1.000 ± an unknown error nats); give more samples"),
    "perhaps some": (replace(LIFT, margin=0.25), "Not clear whether the change transfers; give more samples."),
    "perhaps little": (replace(LIFT, carried=(2.45, 1.5)), "Not clear whether"),
    "too few samples": (replace(LIFT, margin=None), "0.300 ± an unknown error of"),
    "little": (replace(LIFT, carried=(2.45, 1.5), margin=0.04), "Train on the new base instead: little transfers."),
    "less than none": (replace(LIFT, carried=(2.6, 1.5)), "Train on the new base instead: nothing transfers."),
    "nothing": (replace(LIFT, method="none", carried=LIFT.new, margin=0.0), "Recovered lift: 0%"),
    "no gain at home": (replace(LIFT, old=1.0), "Recovered lift: unknown"),
    "near": (NEAR, "nats; 93% of the way from the new base to the fine-tune; the new base alone already has 25%)."),
    "three quarters of the way": (replace(NEAR, new=(1.08, 1.5), carried=(1.02, 1.5)), "Recovered lift: 6%"),
    "beyond the fine-tune": (replace(NEAR, new=(0.9, 1.5), carried=(0.7, 1.5)), "20% of what"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_recovered_lift_in_words_and_numbers(name: str) -> None:
    """With half of the 95% interval of each difference; a verdict only where these allow it."""
    lift, words = VERDICTS[name]
    assert words in lift.words()[-1]
    assert ("of the way" in lift.words()[-1]) == (name in ("near", "three quarters of the way"))
    if name == "near":
        names = ("recovered", "known to the new base", "of the way to the fine-tune")
        assert [lift.facts()[each] for each in names] == pytest.approx([0.7, 0.25, 0.7 / 0.75])
    assert len(replace(lift, writes=False).words()) < len(lift.words())


@pytest.mark.parametrize(("count", "held_out"), [(17, 8), (32, 16), (33, 16), (64, 16), (100, 25), (512, 128)])
def test_a_quarter_is_held_out_of_any_number(count: int, held_out: int) -> None:
    """At least a batch, and at most half: also where the last batch is one sample; halves of it share none."""
    numbers = torch.arange(count)[:, None]
    parts = parted(Data([{"input_ids": part} for part in numbers.split(16)], "next token", count))
    solved, aside, *pair = (
        [int(row) for batch in part.batches for row in batch["input_ids"]] for part in (*parts, *halves(parts[1]))
    )
    assert [*solved, *aside] == list(range(count))
    assert len(aside) == held_out
    assert all(pair)
    assert sorted([*pair[0], *pair[1]]) == aside


def test_examples_that_cannot_be_cut() -> None:
    """One sample has no halves; an example of several rows stays whole, as those of vision-language models."""
    with pytest.raises(RotationMergeError, match="one sample to judge by"):
        halves(Data([{"input_ids": torch.zeros(1, 1)}], "next token", 1))
    batches = [{"input_ids": torch.full((1, 4), i), "pixel_values": torch.full((6, 2), i)} for i in range(8)]
    solved, held_out = parted(Data(batches, "next token", 8))
    pair = halves(held_out)
    assert [len(part.batches) for part in (solved, *pair)] == [4, 2, 2]
    assert all(len(batch["pixel_values"]) == 6 for part in (solved, *pair) for batch in part.batches)


@pytest.mark.parametrize(
    ("choice", "judged", "best"),
    [
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 1, PLAIN: 2, NONE: 3}, "refit"),
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 3, PLAIN: 2, NONE: 4}, PLAIN),
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 3, PLAIN: 2, NONE: 1}, NONE),
        ({"refit": 3, PLAIN: 2, NONE: 4}, {"refit": 1, PLAIN: 2, NONE: 3}, PLAIN),
        ({"refit": 3, PLAIN: 2, MERGED: 1, NONE: 4}, {"refit": 3, PLAIN: 1, MERGED: 2, NONE: 4}, PLAIN),
        ({PLAIN: 2, NONE: 3}, {"refit": 1, PLAIN: 2, NONE: 3}, PLAIN),
    ],
)
def test_never_below_plain_addition_nor_the_new_base(
    choice: dict[str, float], judged: dict[str, float], best: str
) -> None:
    """On samples held out of every choice; what the new base loses counts as much as what is gained."""
    candidates = [ChangeCandidate(name, None, loss=loss) for name, loss in choice.items()]  # type: ignore[arg-type]
    assert best_of(candidates, {name: (loss / 4, 3 * loss / 4) for name, loss in judged.items()}).method == best


class TokenTable(torch.nn.Module):
    """Logits of the next token by the present one alone."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_held_out_samples_choose_the_target(share: float, tmp_path: Path) -> None:
    """Text that was drawn from one of the targets has its lowest loss there; a fine-tune's own text, at the half."""
    draw = torch.Generator().manual_seed(0)
    new, old, tuned = (TokenTable(torch.randn(8, 8, generator=draw)) for _ in range(3))
    with torch.no_grad():
        logits = [tuned.logits + part * (new.logits - old.logits) for part in (share == 1, share)]
    columns = [torch.randint(8, (40,), generator=draw)]
    for _ in range(30):
        columns.append(torch.multinomial(logits[0].softmax(-1)[columns[-1]], 1, generator=draw)[:, 0])
    text = torch.stack(columns, 1)
    models = {name: lambda model=model: model for name, model in {"new": new, "old": old, "tuned": tuned}.items()}
    choice = Data([{"input_ids": text, "labels": text}], "next token", 40)
    with torch.no_grad(), Store(str(tmp_path / "out")) as work:
        work.begin("key")
        chosen, (answered,) = answered_by_target(models, choice, [{"input_ids": torch.arange(8)[None]}], [], work)
        logs = answered[0][1]["log"][0]
    assert chosen == share
    torch.testing.assert_close(logs, logits[1].log_softmax(-1).sort(-1, descending=True).values)
