"""What a refit does not run again: layers by themselves, and in them what is settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import assert_equal_up_to_rounding
from test_refit import Few, case_of
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from rotation_merge.run.store import SettledOutputs, StateStore


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, left: dict[str, Tensor] | None = None) -> tuple[Tensor, None]:
        self.runs += 1
        if left is not None:
            left["x"] = x
        return 2 * self.inner(x), None


class Layer(nn.Module):
    """A part, and a map after it that is still to be solved."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.part, self.last, self.what = Part(), nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        first = self.last(x) if self.what == "late" else 0.0
        y, _ = self.part(x, {} if self.what == "leaves" else None)
        if self.what == "in place":
            y += 1
        return first + y + self.last(y)


@pytest.mark.parametrize(("what", "runs"), [("", 1), ("late", 3), ("leaves", 3), ("in place", 3)])
def test_parts_give_what_they_gave(what: str, runs: int) -> None:
    """Not where a map that is to be solved ran before, where the part leaves something, or is changed afterwards."""
    torch.manual_seed(0)
    layer, x, cpu = Layer(what), torch.randn(3, 4), torch.device("cpu")
    settled = SettledOutputs(StateStore(), "one", {"a": layer.part.inner, "b": layer.last}, layer)
    settled.pending.update("ab")
    with torch.no_grad():
        with settled.counting():
            wanted = layer(x)
        settled.settle("a")
        layer.part.runs = 0
        for _ in range(3):
            with settled.replaying(0, cpu):
                assert_equal_up_to_rounding(layer(x), wanted)
    assert layer.part.runs == runs


def test_attention_runs_once_and_embeddings_once_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all models, but for looks at the smallest batch."""
    counts: dict[type, dict[int, int]] = {modeling_bert.BertSelfAttention: {}, modeling_bert.BertEmbeddings: {}}
    for kind, found in counts.items():

        def counted(self: Any, *args: Any, plain: Any = kind.forward, found: Any = found, **options: Any) -> Any:
            given = plain(self, *args, **options)
            found[id(self)] = found.get(id(self), 0) + 1
            return given

        monkeypatch.setattr(kind, "forward", counted)
    few = Few(case_of("bert", "bare"), tmp_path)
    few.refit(mean=True, batches=[{"input_ids": ids[None]} for ids in torch.arange(60).view(10, 6) % 40])
    attention, embeddings = counts.values()
    assert max(attention.values()) <= 10 + 4
    assert max(embeddings.values()) <= 3 * (10 + 4)
