"""Two processes with half of each batch are one with all of it."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fit import tiny_llama, token_batches
from torch import distributed
from transformers import ViTConfig, ViTModel

from rotation_merge.learning.fit import FitResult, fit
from rotation_merge.learning.records import FitOptions
from rotation_merge.matching.options import MatchOptions


def _one(rank: int, count: int, place: str, work: Callable[[int], Any], out: Any) -> None:
    try:
        distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count)
        out.put((rank, pickle.dumps(work(rank))))  # tensors by value, not by files of this process
        distributed.destroy_process_group()
    except BaseException as error:
        out.put((rank, error))


def together(work: Callable[[int], Any], tmp_path: Path, count: int = 2) -> list[Any]:
    """What `work` gives in each of some processes that are joined."""
    fork = multiprocessing.get_context("fork")
    out, place = fork.SimpleQueue(), tempfile.mktemp(dir=tmp_path)
    started = [fork.Process(target=_one, args=(rank, count, place, work, out)) for rank in range(count)]
    for process in started:
        process.start()
    found = dict(out.get() for _ in started)
    for process in started:
        process.join()
    for error in found.values():
        if isinstance(error, BaseException):
            raise error
    return [pickle.loads(found[rank]) for rank in range(count)]


OPTIONS = FitOptions(steps=2, start="identity", learning_rate=0.01)


def _llama(**labels: bool) -> FitResult:
    models, data = [tiny_llama(seed) for seed in (0, 1)], token_batches(4)
    data[1]["attention_mask"] = torch.ones_like(data[1]["input_ids"]).triu(2)
    data[3] = {name: tensor[:1] for name, tensor in data[3].items()}  # fewer rows than processes
    if labels:
        for number, batch in enumerate(data):
            batch["labels"] = batch["input_ids"].clone()
            batch["labels"][0, : 3 * number] = -100
    return fit(*models, data, options=OPTIONS)


def _hidden() -> FitResult:
    """Of hidden states, and with mixes of samples."""
    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(ViTModel(config, add_pooling_layer=False).eval())
    generator = torch.Generator().manual_seed(0)
    data = [{"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)} for _ in range(4)]
    return fit(*models, data, MatchOptions(), OPTIONS)


@pytest.mark.parametrize("work", [_llama, lambda: _llama(labels=True), _hidden], ids=["logits", "labels", "hidden"])
def test_two_processes_with_half_of_each_batch_are_one_with_all(work: Callable[[], FitResult], tmp_path: Path):
    once = work()
    results = together(lambda _: work(), tmp_path)
    for result in results:
        assert [row[0] for row in result.report.history] == [row[0] for row in once.report.history]
        for mine, wanted in zip(result.report.history, once.report.history, strict=True):
            assert mine[2:] == pytest.approx(wanted[2:], rel=1e-4, abs=1e-5)
        for name, transform in once.alignments[0].transforms.items():
            for key, tensor in transform.tensors().items():
                own = result.alignments[0].transforms[name].tensors()[key]
                torch.testing.assert_close(own, tensor, rtol=1e-3, atol=1e-4)
                assert torch.equal(own, results[0].alignments[0].transforms[name].tensors()[key])
