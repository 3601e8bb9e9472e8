"""Refit: the rule itself in double precision, in every family, map by map; through mergekit: test_refit_recipes.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from memory_support import alive, forget
from tiny_models import ALL, Case, inputs, keep_float64, make, save
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture, resolve
from rotation_merge.averaging.refit import EXPERTS, UNSEEN, Refit, RefitResult, Teachers
from rotation_merge.averaging.ridge import ridge_change
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import batched_by_length
from rotation_merge.run.runner import Runner
from rotation_merge.run.stages import BlockHooks, Branch, stages
from rotation_merge.run.store import StateStore

FIRST = list({case.family: case for case in reversed(ALL)}.values())
State = dict[str, Tensor]


class Few:
    """Tiny models of one class, in float64, and what a refit of their average gives."""

    def __init__(self, case: Case, folder: Path, seeds: tuple[int, ...] = (0, 3)) -> None:
        models = [make(case, seed) for seed in seeds]
        self.given = [inputs(case, models[0], seed=i) for i in range(1, 1 + len(models))]
        found = [save(model, folder / str(i)) for i, model in enumerate(models)]
        self.states = [one[1] for one in found]
        self.config: Any = transformers.AutoConfig.from_pretrained(folder / "0")
        self.architecture: Architecture = resolve(found[0][0], list(self.states[0]), case.name)

    def average(self) -> State:
        first = self.states[0]
        mean = {name: sum(s[name] for s in self.states) / len(self.states) for name in first}
        return {name: mean[name] if x.is_floating_point() else x for name, x in first.items()}  # type: ignore[misc]

    def runner(self, of: State, batches: list[Any], store: StateStore) -> Runner:
        view = View("tiny", self.config.to_dict(), self.architecture, as_tensors(of))
        return Runner(view, batches, store, torch.float64)

    def refit(
        self,
        ridge: float = 0.01,
        mean: bool = False,
        batches: list[Any] | None = None,
        store: StateStore | None = None,
    ) -> tuple[State, RefitResult]:
        """Each model answers to its own samples, or all to all (`batches`)."""
        store = store or StateStore()
        given = batches or self.given
        count = len(self.states)
        if mean:
            who = [[(k, i, 1 / count) for k in range(count)] for i in range(len(given))]
            teachers = [self.runner(state, given, store) for state in self.states]
        else:
            who = [[(k, 0, 1.0)] for k in range(count)]
            teachers = [self.runner(state, [batch], store) for state, batch in zip(self.states, given, strict=True)]
        start, out = self.average(), {}

        def write(name: str, tensor: Tensor) -> Tensor:
            assert tensor.shape == start[name].shape, name
            out[name] = tensor.clone()
            return tensor

        merge = self.runner(start, given, store)
        answers = Teachers(teachers, who, store)
        with keep_float64():
            done = Refit(merge, self.architecture, answers, [1.0] * len(given), ridge, write).run()
        return {**start, **out}, done


def case_of(family: str, name: str | None = None) -> Case:
    return next(c for c in ALL if c.family == family and name in (None, c.name))


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.family)
def test_refit_of_planted_twins_is_the_anchor(case: Case, tmp_path: Path) -> None:
    """In every family: a donor that is the anchor again, brought back from other coordinates, changes nothing."""
    few = Few(case, tmp_path, (0,))
    anchor = few.states[0]
    model = anchor, few.config.to_dict()
    drawn = rm.Alignment.random(model, heads="permutation", seed=1)
    back = drawn.inverse().apply(drawn.apply(model)).state_dict()
    few.states, few.given = [anchor, back], [few.given[0], inputs(case, make(case), seed=7)]
    found, done = few.refit(ridge=1e-3)
    assert max(float((found[name] - anchor[name]).abs().max()) for name in anchor) <= 1e-6
    maps_kept = [name for names in done.kept.values() for name in names]
    assert len(done.maps) > len(maps_kept) or EXPERTS in done.kept or UNSEEN in done.kept
    assert done.maps


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart"])
def test_equal_models_stay(family: str, mean: bool, tmp_path: Path) -> None:
    """No output lacks anything, so that no map changes."""
    few = Few(case_of(family), tmp_path, (0,))
    few.states, few.given = few.states * 2, [few.given[0]] * 2
    found, done = few.refit(mean=mean)
    assert max(one.before for one in done.maps) <= 1e-12
    assert max(float((found[name] - x).abs().max()) for name, x in few.states[0].items()) <= 1e-9


def test_what_comes_before_the_first_difference_stays(tmp_path: Path) -> None:
    """Models that share their first layer: it is theirs, and what differs is solved."""
    few = Few(case_of("llama"), tmp_path)
    shared = {name: x for name, x in few.states[0].items() if "embed" in name or "layers.0." in name}
    few.states[1] |= shared
    found, done = few.refit(mean=True)
    assert max(float((found[name] - x).abs().max()) for name, x in shared.items()) <= 1e-9
    assert {"layers.0." in one.name for one in done.maps if one.before <= 1e-12} == {True}
    assert any(one.before > one.after > 0 for one in done.maps if "layers.1." in one.name)


PLACES = {
    ("llama", "llama"): ("post_attention_layernorm", "layer", 1.0),
    ("llama", "granite"): ("post_attention_layernorm", "layer", 0.5),
    ("bert", "bare"): ("attention.output.LayerNorm", "output.LayerNorm", 1.0),
    ("gemma2", "tied"): ("post_attention_layernorm", "post_feedforward_layernorm", 1.0),
    ("opt", "tied"): ("final_layer_norm", "layer", 1.0),
}
"""Pre-norm, with a multiplier; post-norm; sandwich: where the two writers of a layer are seen, and what they count."""


def branches_of_first_layer(few: Few) -> list[Branch]:
    run = few.runner(few.states[0], few.given, StateStore())
    with keep_float64():
        while (block := run.advance()) is not None and block.index != 0:
            continue
        assert block is not None
        hooks = BlockHooks(run, block)
        return [branch for stage in stages(hooks, set(hooks.maps)) for branch in stage.branches.values()]


@pytest.mark.parametrize("key", PLACES, ids="-".join)
def test_where_writers_aim(key: tuple[str, str], tmp_path: Path) -> None:
    branches = branches_of_first_layer(Few(case_of(*key), tmp_path, (0,)))
    assert len(branches) == 2
    for branch, place in zip(branches, PLACES[key], strict=False):
        assert place in branch.place
        assert torch.allclose(branch.gain, torch.full_like(branch.gain, PLACES[key][2]))


def test_layer_scales_and_parallel_branches(tmp_path: Path) -> None:
    """A layer scale is found as the gain of each coordinate; attention leaves the MLP of its own layer out."""
    few = Few(case_of("dinov2", "bare"), tmp_path / "dino", (0,))
    scales = [few.states[0][name] for name in sorted(few.states[0]) if "layer.0.layer_scale" in name]
    branches = branches_of_first_layer(few)
    assert all(torch.allclose(b.gain, scale) for b, scale in zip(branches, scales, strict=True))
    branches = branches_of_first_layer(Few(case_of("phi"), tmp_path / "phi", (0,)))
    assert [[key.rpartition("mlp")[2] for key, _ in b.added] for b in branches] == [[".fc2.weight"], []]


def reference(few: Few, ridge: float, mean: bool) -> State:
    """The rule once more on whole Llamas, every stage running all of them again (RESULTS H's plain version)."""
    kind = getattr(transformers, few.config.architectures[0])

    def model(of: State) -> Any:
        made = kind(few.config).double().eval()
        made.load_state_dict(of)
        return made

    def seen(one: Any, names: list[str], batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        found: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = [
            one.get_submodule(n).register_forward_hook(
                lambda _, x, y, n=n: found.__setitem__(n, (x[0].flatten(0, -2), y.flatten(0, -2)))
            )
            for n in names
        ]
        with torch.no_grad():
            one(**batch)
        for hook in hooks:
            hook.remove()
        return found

    layers = few.config.num_hidden_layers
    plan: list[tuple[list[str], str | None]] = []
    for i in range(layers):
        p, after = f"model.layers.{i}.", f"model.layers.{i + 1}.input_layernorm" if i + 1 < layers else "model.norm"
        plan += [([f"{p}self_attn.{x}_proj" for x in "qkv"], None)]
        plan += [([f"{p}self_attn.o_proj"], f"{p}post_attention_layernorm")]
        plan += [([f"{p}mlp.gate_proj", f"{p}mlp.up_proj"], None), ([f"{p}mlp.down_proj"], after)]
    plan.append((["lm_head"], None))
    names = [n for maps, place in plan for n in [*maps, *([place] if place else [])]]
    donors, merge = [model(s) for s in few.states], model(few.average())
    answers = []
    for i, batch in enumerate(few.given):
        each = [seen(d, names, batch) for d in (donors if mean else [donors[i]])]
        answers.append({n: tuple(sum(e[n][k] for e in each) / len(each) for k in (0, 1)) for n in names})
    for maps, place in plan:
        mine = [seen(merge, names, batch) for batch in few.given]
        for name in maps:
            x = torch.cat([m[name][0] for m in mine])
            target = torch.cat([a[name][1] for a in answers])  # type: ignore[misc]
            if place:
                stream = torch.cat([a[place][0] for a in answers])  # type: ignore[misc]
                target = stream - torch.cat([m[place][0] - m[name][1] for m in mine])
            weight = merge.get_submodule(name).weight.data
            gram = x.T @ x + ridge * (x * x).sum(0).mean() * torch.eye(x.shape[1], dtype=x.dtype)
            weight += torch.linalg.solve(gram, x.T @ (target - x @ weight.T)).T
    return dict(merge.state_dict())


@pytest.mark.parametrize("mean", [False, True])
def test_the_rule(mean: bool, tmp_path: Path) -> None:
    few = Few(case_of("llama"), tmp_path)
    with keep_float64():
        expected = reference(few, 0.03, mean)
    found, _ = few.refit(0.03, mean)
    start = few.average()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in found}
    assert max(apart.values()) <= 1e-6, apart
    assert sum(not torch.equal(found[name], start[name]) for name in found) == 15


@pytest.mark.slow
def test_how_samples_are_cut_and_where_they_wait_changes_nothing(tmp_path: Path) -> None:
    few = Few(case_of("llama", "qwen2"), tmp_path)
    ids = torch.randint(3, 50, (6, 9), generator=torch.Generator().manual_seed(0))
    once, _ = few.refit(mean=True, batches=[{"input_ids": ids}])
    cut, _ = few.refit(mean=True, batches=[{"input_ids": part} for part in ids.split([1, 3, 2])])
    spilled, _ = few.refit(mean=True, batches=[{"input_ids": ids}], store=StateStore(str(tmp_path / "spill")))
    texts = [{"input_ids": row[None, :length]} for row, length in zip(ids, (9, 8, 8, 7, 9, 3), strict=True)]
    alone, padded = (few.refit(mean=True, batches=batches)[0] for batches in (texts, batched_by_length(texts, 30)))
    assert max(float((alone[name] - padded[name]).abs().max()) for name in alone) <= 1e-9
    assert max(float((once[name] - cut[name]).abs().max()) for name in once) <= 1e-9
    assert max(float((once[name] - spilled[name]).abs().max()) for name in once) <= 1e-9


def test_a_batch_goes_through_a_layer_once_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the stage, and once to the end; beside that only when stages are looked for, on the first batch."""
    counts: dict[int, int] = {}
    plain = torch.nn.Linear.forward

    def counted(self: torch.nn.Linear, x: Tensor) -> Tensor:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return plain(self, x)

    few = Few(case_of("llama"), tmp_path)
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    few.refit(mean=True, batches=[{"input_ids": ids[None]} for ids in torch.arange(60).view(10, 6) % 40])
    stages_of_a_layer = 4  # queries with keys and values, outputs, both maps of the gate, down
    assert max(counts.values()) <= (stages_of_a_layer + 1) * 10 + 4
    assert sorted(set(counts.values()))[0] <= 10 + 1  # a teacher's


def test_least_squares_optimum() -> None:
    """Without a ridge each map is the optimum that lstsq finds; too few samples are told."""
    draw = torch.Generator().manual_seed(0)
    x, r = (torch.randn(40, n, generator=draw, dtype=torch.float64) for n in (7, 5))
    found = ridge_change(x.T @ x, x.T @ r, torch.zeros(7))
    assert found is not None
    assert torch.allclose(found.T, torch.linalg.lstsq(x, r).solution)
    few = x[:5]
    assert ridge_change(few.T @ few, few.T @ r[:5], torch.zeros(7)) is None


FIRST_MAPS = {
    "llama": "model.layers.0.self_attn.q_proj.weight",
    "nomic_bert": "encoder.layers.0.attn.Wqkv.weight",  # one tensor of the file, three maps of the module
}


@pytest.mark.parametrize("family", FIRST_MAPS)
def test_enough_samples_and_no_ridge_leave_nothing_to_gain(family: str, tmp_path: Path) -> None:
    """The first maps of a merge whose embeddings agree read what the donor reads: they become the donor's."""
    few = Few(case_of(family), tmp_path, (0,))
    name = next(name for name in few.states[0] if name.endswith(FIRST_MAPS[family]))
    ids = torch.arange(48).view(4, 12) % 40 + 2
    average = Few.average

    def other(self: Few) -> State:
        return {n: x + 0.1 * torch.sin(7 * x) if n == name else x for n, x in average(self).items()}

    few.average = other.__get__(few)  # type: ignore[method-assign]
    assert float((few.average()[name] - few.states[0][name]).abs().max()) > 0.01
    found, _ = few.refit(ridge=0.0, batches=[{"input_ids": ids}])
    assert torch.allclose(found[name], few.states[0][name], atol=1e-8)


class Copies(dict[str, Tensor]):
    """Tensors that are read anew each time, as from files."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).clone()


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """Two layers or eight: one layer of each model, and its sums; hidden states are on disk."""
    peaks, case = [], case_of("llama")
    for layers in (2, 5):
        sizes = {**case.config, "num_hidden_layers": layers}
        few = Few(replace(case, config=sizes), tmp_path / str(layers), (0, 3))
        seen: list[int] = []

        def write(_: str, tensor: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(alive())
            return tensor

        forget()
        with keep_float64():
            store = StateStore(str(tmp_path / "states"))
            teachers = [few.runner(Copies(few.states[k]), [few.given[k]], store) for k in range(2)]
            merge = few.runner(Copies(few.states[0]), few.given, store)
            answers = Teachers(teachers, [[(k, 0, 1.0)] for k in range(2)], store)
            Refit(merge, few.architecture, answers, [1.0, 1.0], 0.01, write).run()
        peaks.append(max(seen))
    assert 0 < peaks[1] <= 1.02 * peaks[0]
