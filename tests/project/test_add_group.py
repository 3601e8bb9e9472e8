"""docs/add-group.md, followed to the letter: its group runs through matching, gauges, learning, inspect and files."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_group_laws as laws
import test_groups as elements
import torch
from matching_support import save_for
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture import families
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.architecture.table import sample
from rotation_merge.matching.alignment import load_alignment
from rotation_merge.matching.fit import LearnedTransforms
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.match import match_model
from rotation_merge.model.biases import in_coordinates
from rotation_merge.report.spaces import matched_spaces
from rotation_merge.symmetry import KINDS
from rotation_merge.symmetry.admitted import QUERIES
from rotation_merge.symmetry.group import GROUPS

PAGE = (Path(__file__).parents[2] / "docs" / "add-group.md").read_text(encoding="utf-8")
FILE, LINE = re.findall(r"```python title=\"[^\"]*\"\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def shift() -> Iterator[Any]:
    """The page's file as a module, its line executed; forgotten afterwards."""
    module = types.ModuleType("page_shift")
    sys.modules["page_shift"] = module
    known = dict(KINDS), dict(GROUPS), dict(QUERIES)
    try:
        exec(compile(FILE, "docs/add-group.md", "exec"), module.__dict__)
        exec(LINE, {**module.__dict__, "QUERIES": QUERIES})
        yield module
    finally:
        for table, before in zip((KINDS, GROUPS, QUERIES), known, strict=True):
            table.clear()
            table.update(before)
        del sys.modules["page_shift"]


def test_laws_of_the_element(shift: Any) -> None:
    def make(seed: int) -> Any:
        return shift.Shift.random(elements.BATCH, elements.SIZE, elements.generator(seed + 1))

    for dual in (False, True):
        elements.test_element_laws(make, dual)
        elements.test_act_on_any_dimension(make, dual, (2, 6, 5, 3), 3, 1)
    elements.test_element_keeps_pairings(make)
    elements.test_distance_is_zero_only_at_the_identity(make)
    elements.test_select_picks_elements(make)
    elements.test_act_keeps_dtype_and_input(make, torch.bfloat16)
    elements.test_dump_and_load(make)
    elements.test_identity_moves_nothing("shift")


def test_laws_of_the_group(shift: Any) -> None:
    laws.check_group(shift.ShiftGroup())


def test_the_function_is_kept(shift: Any) -> None:
    """Scores of queries and keys after a circular convolution along the coordinates of a head."""
    kernel, q, k = (laws.normal(*shape, seed=s) for s, shape in enumerate(((6,), (2, 5, 6), (2, 4, 6))))

    def convolved(x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(kernel)).real

    g = shift.Shift.random(2, 6, laws.gen(4))
    moved = convolved(g.act(q, 0, 2, dual=True)) @ convolved(g.act(k, 0, 2)).mT
    laws.close(moved, convolved(q) @ convolved(k).mT)


def test_one_file_and_one_line_are_all(shift: Any, tmp_path: Path) -> None:
    """A family of this norm is matched, drawn from, learned, shown and stored."""
    spec = families()["bert"].model_dump()
    spaces = next(iter(spec["modules"].values()))["layer"]["spaces"]
    name = next(n for n, s in spaces.items() if s["kind"] == "attention")
    spaces[name]["norm"] = "circular"
    architecture = sample(ArchitectureSpec.model_validate(spec))
    options = AlignConfig(heads="permutation")
    anchor = {
        info.name: torch.randn([axis.size or 5 for axis in info.axes], generator=laws.gen(i), dtype=torch.float64)
        for i, info in enumerate(architecture.tensors())
    }
    gauge = random_gauge(architecture, options, laws.gen(1))
    heads = [t for t in gauge.values() if t.space_kind == "attention"]
    assert all(t.qk.kind == "shift" and not t.qk.is_identity() for t in heads)
    twin = dict(in_coordinates(architecture, anchor, gauge))
    found = match_model(architecture, anchor, twin, options)
    for key in [key for key, transform in gauge.items() if not transform.is_identity()]:
        again = found.transforms[key].compose(gauge[key])
        assert max(again.distances().values()) < 1e-6, key
    learned = LearnedTransforms(architecture, found.transforms).final_transforms()
    assert [t.group() for t in learned.values()] == [t.group() for t in found.transforms.values()]
    shapes = {key: tuple(x.shape) for key, x in anchor.items()}
    assert any("query/key: cyclic shifts" in line.group for line in matched_spaces(architecture, shapes, options).lines)
    save_for(tmp_path / "a.safetensors", found, architecture, "x", "y")
    again = load_alignment(tmp_path / "a.safetensors", architecture).alignment.transforms
    assert {k: t.distances() for k, t in again.items()}.keys() == found.transforms.keys()
    assert all(torch.equal(again[k].qk.steps, t.qk.steps) for k, t in found.transforms.items() if hasattr(t, "qk"))
    assert dataclasses.is_dataclass(shift.Shift)
