"""Parts of carrying, each alone: how changes are cut and sliced, solved towards, and judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from carry_support import other_coordinates
from cli_support import run
from plugin_support import make as make_checkpoint
from plugin_support import merged, state, write_state
from residual_support import checkpoint, transport, twin
from test_transport import tuned as fine_tune
from tiny_models import ALL, Case, make, planted, reload, save
from torch import Tensor
from torch.nn.functional import kl_div

import rotation_merge as rm
from rotation_merge import AlignConfig, Delta, RotationMergeError
from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.wudi import added_by_wudi
from rotation_merge.carrying import delta as carry
from rotation_merge.carrying.config import MERGED, NONE, PLAIN
from rotation_merge.carrying.distil import best_target
from rotation_merge.carrying.judge import (
    RecoveredLift,
    halves,
    parted,
)
from rotation_merge.carrying.lora import of_low_rank
from rotation_merge.carrying.refit import of_rank, refit_change
from rotation_merge.carrying.sampled import ChangeCandidate, best_of
from rotation_merge.matching.match import match_model
from rotation_merge.model import apply, vocabulary
from rotation_merge.model.apply import read_tensor, transform_tensor
from rotation_merge.model.low_rank import dense
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Data


@pytest.mark.parametrize("case", list({case.family: case for case in ALL}.values()), ids=lambda case: case.family)
def test_at_full_rank_nothing_is_cut(case: Case) -> None:
    model = planted(case)
    for info in model.architecture.tensors():
        if (stored := read_tensor(info, model.state)) is not None and stored.ndim > 1:
            again = dense(of_low_rank(stored, info, 10**6), info)
            assert torch.allclose(again, stored, atol=1e-9), info.name


@pytest.mark.slow
def test_long_vocabularies_are_moved_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `align`, by `carry` and in a recipe, with the same result and no widened copy of one."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    old = twin(anchor, tmp_path / "old", "rotation")
    fine = fine_tune(old, tmp_path / "fine")
    base, sources = open_model(anchor.path, untie=True), [as_tensors(model.state) for model in (old, fine)]
    found = match_model(anchor.architecture, anchor.state, old.state, AlignConfig(residual="rotation"))
    tuned = Delta(base, *sources, found)
    largest: dict[str, int] = {}

    def watch(module: ModuleType) -> None:
        def watched(tensor: Tensor, info: TensorInfo, *rest: Any, **named: Any) -> Tensor:
            if info.vocabulary_axis is not None:
                largest[module.__name__] = max(largest.get(module.__name__, 0), tensor.numel())
            return transform_tensor(tensor, info, *rest, **named)

        monkeypatch.setattr(module, "transform_tensor", watched)

    for module in (apply, carry):
        watch(module)
    states, norms, seen = list[dict[str, Tensor]](), list[list[float]](), list[dict[str, int]]()
    for most in (vocabulary.LONG, 1000):
        monkeypatch.setattr(vocabulary, "LONG", most)
        norms.append([])
        carried = tuned.applied(record=lambda change, _: norms[-1].append(change)).state_dict()
        merge = merged(transport(anchor, (fine, old), residual="rotation"), tmp_path / str(most))
        aligned = rm.align(anchor.path, old.path, residual="rotation").apply(old.path)
        states.append({f"align {n}": x for n, x in aligned.items()})
        states[-1].update((f"carry {n}", x) for n, x in carried.items())
        states[-1].update((f"recipe {n}", x) for n, x in merge.items())
        seen.append(dict(largest))
        largest.clear()
    assert len(seen[0]) == 2
    assert all(seen[1][name] <= 1000 < size for name, size in seen[0].items())
    assert sum(norms[0]) == pytest.approx(sum(norms[1]), rel=1e-5)
    torch.testing.assert_close(states[1], states[0], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "residual"), [("llama", "llama", "rotation"), ("gpt2", "untied", "rotation")]
)
def test_a_refit_between_bases_that_are_one_in_other_coordinates(
    family: str, name: str, residual: str, tmp_path: Path
) -> None:
    """What the new base then gives on the samples is what the fine-tune gives."""
    case = next(c for c in ALL if (c.family, c.name) == (family, name))
    config, state = save(make(case), tmp_path)
    architecture = resolve(config, list(state), name, untie=True)
    draw = torch.Generator().manual_seed(0)
    tuned = {n: x + 0.05 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in state.items()}
    tuned |= {n: x for n, x in state.items() if x.ndim < 2 or "wte" in n or "wpe" in n or "embed" in n}
    new, alignment = other_coordinates((state, config), AlignConfig(heads="permutation", residual=residual))
    ids = torch.randint(0, config["vocab_size"], (24, 12), generator=draw)
    sources = [as_tensors(x) for x in (new, state, tuned)]
    solved = refit_change(
        Delta(View("new", config, architecture, sources[0]), *sources[1:], alignment),
        [{"input_ids": part} for part in ids.split(12)],
        ridge=1e-5,
    )
    assert solved
    with torch.no_grad():
        wanted, plain, found = (
            reload(case, tmp_path, s)(input_ids=ids).logits
            for s in (tuned, new, {n: solved.get(n, x).double() for n, x in new.items()})
        )
    assert float((found - wanted).norm()) <= 0.05 * float((plain - wanted).norm())


@pytest.fixture
def unlike(tmp_path: Path) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    """Between two tiny Llamas that have nothing in common: logits of the new base with a refitted change on some
    sequences, by options and text of the new base's own; and the sequences."""
    case = next(c for c in ALL if (c.family, c.name) == ("llama", "llama"))
    config, old = save(make(case), tmp_path)
    architecture = resolve(config, list(old), "llama", untie=True)
    draw = torch.Generator().manual_seed(0)
    new, tuned = (
        {n: x + (s * torch.randn(x.shape, generator=draw, dtype=x.dtype) if x.ndim > 1 else 0) for n, x in old.items()}
        for s in (0.3, 0.1)
    )
    texts = {n: torch.randint(0, config["vocab_size"], (8, 12), generator=draw) for n in ("samples", "own")}

    def logits(ids: torch.Tensor, options: dict[str, Any] | None, own: Collection[torch.Tensor] = ()) -> torch.Tensor:
        tensors: Mapping[str, torch.Tensor] = {}
        if options is not None:
            delta = Delta(View("new", config, architecture, as_tensors(new)), as_tensors(old), as_tensors(tuned))
            base_texts = [{"input_ids": text} for text in own]
            samples = [{"input_ids": texts["samples"]}]
            tensors = refit_change(delta, samples, base_texts, **options)
        with torch.no_grad():
            return reload(case, tmp_path, {n: tensors.get(n, x).double() for n, x in new.items()})(input_ids=ids).logits

    changed = [reload(case, tmp_path, state)(input_ids=texts["samples"]).logits.detach() for state in (new, tuned, old)]
    return logits, {**texts, "answers": changed[0] + changed[1] - changed[2]}


@pytest.mark.slow
def test_a_head_is_fitted_to_probabilities(
    unlike: tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    logits, texts = unlike
    divergence = {
        ridge: float(
            kl_div(*(x.log_softmax(-1) for x in (logits(texts["samples"], options), texts["answers"])), log_target=True)
        )
        for ridge, options in ((ridge, {"softmax": ridge}) for ridge in (None, 1e-4))
    }
    assert divergence[1e-4] < 0.9 * divergence[None]


@pytest.mark.slow
def test_text_of_the_new_base_holds_it(unlike: tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]) -> None:
    logits, texts = unlike
    before, free, held = (
        logits(texts["own"], options, own)
        for options, own in (
            (None, ()),
            ({"softmax": 1e-3}, ()),
            ({"softmax": 1e-3}, [texts["own"]]),
        )
    )
    assert float((held - before).norm()) < 0.7 * float((free - before).norm())


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


def test_the_recovered_lift() -> None:
    lift = RecoveredLift(2.0, 1.0, (2.5, 1.5), (2.2, 1.6), "refit", " at scale 1")
    assert lift.recovered == pytest.approx(0.3)
    assert lift.words()[-1] == "Recovered lift: 30% of what fine-tuning gained on the old base."
    assert "train on the new base instead" in replace(lift, carried=(2.45, 1.5)).words()[-1].lower()
    assert "none of the gain transfers" in replace(lift, carried=(2.6, 1.5)).words()[-1]
    assert "Recovered lift: 0%" in replace(lift, method="none", carried=lift.new).words()[-1]
    assert "recovered lift is unknown" in replace(lift, old=1.0).words()[-1]
    assert any("it writes no text" in line for line in replace(lift, writes=False).words())


def test_what_the_new_base_knows_already_is_said() -> None:
    """Between releases of one lineage the fine-tune itself stands below all of what it gained at home."""
    lift = RecoveredLift(2.0, 1.0, (1.75, 1.5), (1.05, 1.6), "wudi", " at scale 1")
    assert (lift.recovered, lift.known, lift.of_the_way) == pytest.approx((0.7, 0.25, 0.7 / 0.75))
    closing = (
        "Recovered lift: 70% of what fine-tuning gained on the old base (93% of the way from the new base to the "
        "fine-tune)."
    )
    assert lift.words()[-1] == closing
    assert "already has 25% of what fine-tuning gained" in lift.words()[-2]
    assert lift.facts()["of the way to the fine-tune"] == pytest.approx(0.7 / 0.75)
    assert lift.facts()["known to the new base"] == pytest.approx(0.25)
    nearly = replace(lift, new=(1.08, 1.5), carried=(1.02, 1.5))
    assert nearly.words()[-1].startswith("Recovered lift: 6%")  # three quarters of the way, so it is worth carrying
    beyond = replace(lift, new=(0.9, 1.5), carried=(0.7, 1.5))
    assert beyond.of_the_way is None
    assert "needs no fine-tune" in beyond.words()[-2]
    assert beyond.words()[-1] == "Recovered lift: 20% of what fine-tuning gained on the old base."
    assert "of the way" not in replace(lift, new=(2.5, 1.5)).words()[-1]


def test_halves_share_no_sample() -> None:
    rows = torch.arange(10)[:, None]
    first, second = halves(Data([{"input_ids": rows[:7]}, {"input_ids": rows[7:]}], "next token", 10))
    numbers = [sorted(int(row) for batch in half.batches for row in batch["input_ids"]) for half in (first, second)]
    assert sorted([*numbers[0], *numbers[1]]) == list(range(10))
    assert not set(numbers[0]) & set(numbers[1])
    with pytest.raises(RotationMergeError, match="one sample to judge by"):
        halves(Data([{"input_ids": rows[:1]}], "next token", 1))


@pytest.mark.parametrize(
    ("count", "held_out"), [(17, 8), (32, 16), (33, 16), (49, 16), (64, 16), (100, 25), (512, 128)]
)
def test_a_quarter_is_held_out_of_any_number(count: int, held_out: int) -> None:
    """At least a batch, and at most half: also where the last batch is one sample."""
    rows = torch.arange(count)[:, None]
    parts = parted(Data([{"input_ids": part} for part in rows.split(16)], "next token", count))
    numbers = [[int(row) for batch in part.batches for row in batch["input_ids"]] for part in parts]
    assert [*numbers[0], *numbers[1]] == list(range(count))
    assert len(numbers[1]) == held_out
    assert all(part.batches for part in halves(parts[1]))


def test_an_example_of_several_rows_stays_whole() -> None:
    """As examples of vision-language models are: one a batch, with many rows of patches."""
    batches = [{"input_ids": torch.full((1, 4), i), "pixel_values": torch.full((6, 2), i)} for i in range(8)]
    solved, held_out = parted(Data(batches, "next token", 8))
    pair = halves(held_out)
    assert [len(part.batches) for part in (solved, *pair)] == [4, 2, 2]
    assert all(len(batch["pixel_values"]) == 6 for part in (solved, *pair) for batch in part.batches)


@pytest.mark.parametrize(
    ("choice", "judged", "taken"),
    [
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 1, PLAIN: 2, NONE: 3}, "refit"),
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 3, PLAIN: 2, NONE: 4}, PLAIN),
        ({"refit": 1, PLAIN: 2, NONE: 3}, {"refit": 3, PLAIN: 2, NONE: 1}, NONE),
        ({"refit": 3, PLAIN: 2, NONE: 4}, {"refit": 1, PLAIN: 2, NONE: 3}, PLAIN),
        ({"refit": 3, PLAIN: 2, MERGED: 1, NONE: 4}, {"refit": 3, PLAIN: 2, MERGED: 1, NONE: 4}, MERGED),
        ({"refit": 3, PLAIN: 2, MERGED: 1, NONE: 4}, {"refit": 3, PLAIN: 1, MERGED: 2, NONE: 4}, PLAIN),
        ({PLAIN: 2, NONE: 3}, {"refit": 1, PLAIN: 2, NONE: 3}, PLAIN),
    ],
)
def test_never_below_plain_addition_nor_the_new_base(
    choice: dict[str, float], judged: dict[str, float], taken: str
) -> None:
    """On samples held out of every choice; what the new base loses counts as much as what is gained."""
    candidates = [ChangeCandidate(name, None) for name in choice]  # type: ignore[arg-type]
    both = ({name: (loss / 4, 3 * loss / 4) for name, loss in losses.items()} for losses in (choice, judged))
    assert best_of(candidates, *both).method == taken


class TokenTable(torch.nn.Module):
    """Logits of the next token by the present one alone."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_held_out_samples_choose_the_target(share: float) -> None:
    """Text that was drawn from one of the targets has its lowest loss there; a fine-tune's own text, at the half."""
    draw = torch.Generator().manual_seed(0)
    new, old, tuned = (TokenTable(torch.randn(8, 8, generator=draw)) for _ in range(3))
    chances = (tuned.logits + (share == 1) * (new.logits - old.logits)).detach().softmax(-1)
    columns = [torch.randint(8, (40,), generator=draw)]
    for _ in range(30):
        columns.append(torch.multinomial(chances[columns[-1]], 1, generator=draw)[:, 0])
    text = torch.stack(columns, 1)
    models = {"new": new, "old": old, "tuned": tuned}
    with torch.no_grad():
        target = best_target(models, Data([{"input_ids": text, "labels": text}], "next token", 40))
        expected = tuned.logits + share * (new.logits - old.logits)
        torch.testing.assert_close(target(input_ids=torch.arange(8)[None]).logits[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), [(PLAIN, False), (MERGED, False), (MERGED, True)])
def test_what_samples_chose_is_written(name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights, too, where another change is written than the one that the method moved."""
    maps = ("proj.weight", "embed_tokens.weight") if tied else ("proj.weight",)
    draw = torch.Generator().manual_seed(2)

    def chosen(usable: list[ChangeCandidate], *_: Any) -> ChangeCandidate:
        return next(each for each in usable if each.method == name)

    monkeypatch.setattr("rotation_merge.carrying.sampled.best_of", chosen)
    monkeypatch.setattr("rotation_merge.carrying.sampled.SCALES", (1.0,))
    old = make_checkpoint("llama", tmp_path / "old", tie_word_embeddings=tied)
    before = state(old)
    new, tuned = ({n: t + by * torch.randn(t.shape, generator=draw) for n, t in before.items()} for by in (0.1, 0.02))
    for folder, tensors in (("new", new), ("tuned", tuned)):
        write_state(tensors, old, tmp_path / folder)
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = ("--data", tmp_path / "texts.jsonl", "--samples", 32, "--scale", "auto")
    done = run("carry", tmp_path / "tuned", tmp_path / "out", "--from", old, "--to", tmp_path / "new", *flags)
    assert done.exit_code == 0, done.output
    for tensor, found in state(tmp_path / "out").items():
        wanted = plain = new[tensor] + tuned[tensor] - before[tensor]
        if name == MERGED and tensor.endswith(maps):
            changes = ((each[tensor] - before[tensor]).double() for each in (new, tuned))
            wanted = (new[tensor] + added_by_wudi(*changes)).float()
            assert not torch.allclose(found, plain, atol=1e-4)
        if name == PLAIN or tensor.endswith(maps):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
