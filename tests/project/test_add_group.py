"""docs/add-group.md, followed to the letter: its group runs through matching, gauges, learning, inspect and files."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_groups as laws
import torch
from matching_support import save_for
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture import families
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.architecture.table import sample
from rotation_merge.matching.alignment import load_file
from rotation_merge.matching.between import LearnedTransforms
from rotation_merge.matching.match import match_model
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.stream import random_gauge
from rotation_merge.report.spaces import matched_spaces
from rotation_merge.symmetry.admitted import QUERIES

PAGE = (Path(__file__).parents[2] / "docs" / "add-group.md").read_text(encoding="utf-8")
FILE, LINE = re.findall(r"```python title=\"[^\"]*\"\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def shifts() -> Iterator[Any]:
    """The group of the page, its line executed; forgotten afterwards."""
    module = types.ModuleType("page_shift")
    sys.modules["page_shift"] = module
    known = dict(QUERIES)
    try:
        exec(compile(FILE, "docs/add-group.md", "exec"), module.__dict__)
        exec(LINE, {**module.__dict__, "QUERIES": QUERIES})
        yield vars(module)["Shifts"]()
    finally:
        QUERIES.clear()
        QUERIES.update(known)
        del sys.modules["page_shift"]


def test_laws_of_the_group(shifts: Any) -> None:
    for dual in (False, True):
        g, h = shifts.random(3, 6, laws.gen(1)), shifts.random(3, 6, laws.gen(2))
        x = laws.normal(3, 6, 4)
        laws.close(g.inverse().act(g.act(x, 0, 1, dual), 0, 1, dual), x)
        laws.close(g.compose(h).act(x, 0, 1, dual), g.act(h.act(x, 0, 1, dual), 0, 1, dual))
    laws.check_best(shifts)
    laws.check_planted(shifts)
    laws.check_membership(shifts)


def test_the_function_is_kept(shifts: Any) -> None:
    """Scores of queries and keys after a circular convolution along the coordinates of a head."""
    kernel, q, k = (laws.normal(*shape, seed=s) for s, shape in enumerate(((6,), (2, 5, 6), (2, 4, 6))))

    def convolved(x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(kernel)).real

    g = shifts.random(2, 6, laws.gen(4))
    moved = convolved(g.act(q, 0, 2, dual=True)) @ convolved(g.act(k, 0, 2)).mT
    laws.close(moved, convolved(q) @ convolved(k).mT)


def test_one_class_and_one_line_are_all(shifts: Any, tmp_path: Path) -> None:
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
    assert not any(t.elements["qk"].is_identity() for t in gauge.values() if t.kind == "attention")
    twin = dict(moved_tensors(architecture, anchor, gauge))
    found = match_model(architecture, anchor, twin, options)
    for key in [key for key, transform in gauge.items() if not transform.is_identity()]:
        again = found.transforms[key].compose(gauge[key])
        assert max(again.distances().values()) < 1e-6, key
    learned = LearnedTransforms(architecture, found.transforms).final_transforms()
    assert learned.keys() == found.transforms.keys()
    shapes = {key: tuple(x.shape) for key, x in anchor.items()}
    assert any("query/key: cyclic shifts" in line.group for line in matched_spaces(architecture, shapes, options).lines)
    save_for(tmp_path / "a.safetensors", found, architecture, "x", "y")
    again = load_file(tmp_path / "a.safetensors", architecture).transforms
    for key, transform in found.transforms.items():
        stored = again[key].tensors()
        assert all(torch.equal(stored[part], tensor) for part, tensor in transform.tensors().items())
