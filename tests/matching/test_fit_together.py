"""Two processes with half of each batch are one with all of it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cli_support
import pytest
import torch
from safetensors.torch import save_file
from test_fit import tiny_llama, token_batches
from torch import distributed
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTModel,
)

from rotation_merge import AlignConfig, FitConfig, fit
from rotation_merge.errors import RecipeError


@contextmanager
def joined() -> Iterator[None]:
    """As a program of several processes joins them itself."""
    distributed.init_process_group("gloo")
    yield
    distributed.destroy_process_group()


def _one(rank: int, port: int, work: Callable[[int], Any], out: Any) -> None:
    """As `torchrun` starts a process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        out.put((rank, pickle.dumps(work(rank))))  # tensors by value, not by files of this process
    except BaseException as error:
        out.put((rank, error))


def together(work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in each of two processes, which may join."""
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = fork.SimpleQueue()
    started = [fork.Process(target=_one, args=(rank, port, work, out)) for rank in range(2)]
    for process in started:
        process.start()
    found = dict(out.get() for _ in started)
    for process in started:
        process.join()
    for error in found.values():
        if isinstance(error, BaseException):
            raise error
    return [pickle.loads(found[rank]) for rank in range(2)]


OPTIONS = FitConfig(steps=2, start="identity", learning_rate=0.01)


def _llama(**labels: bool) -> Any:
    models, data = [tiny_llama(seed) for seed in (0, 1)], token_batches(4)
    data[1]["attention_mask"] = torch.ones_like(data[1]["input_ids"]).triu(2)
    data[3] = {name: tensor[:1] for name, tensor in data[3].items()}  # fewer rows than processes
    if labels:
        for number, batch in enumerate(data):
            batch["labels"] = batch["input_ids"].clone()
            batch["labels"][0, : 3 * number] = -100
    return fit(*models, data, options=OPTIONS)


def _hidden() -> Any:
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
    return fit(*models, data, AlignConfig(), OPTIONS)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PARTS = {"max_position_embeddings": 16, "vocab_size": 40, **SMALL}
LABELLED: dict[str, tuple[type, type, dict[str, Any]]] = {
    "next tokens": (GPT2LMHeadModel, GPT2Config, {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40}),
    "classes": (BertForSequenceClassification, BertConfig, {**PARTS, "num_labels": 3}),
    "tokens": (BertForTokenClassification, BertConfig, {**PARTS, "num_labels": 3}),
}


def _labelled(kind: str) -> Any:
    """Labels of which some do not count, other ones in each row."""
    made, config, sizes = LABELLED[kind]
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(made(config(**sizes)).eval())
    data = token_batches(4)
    for batch in data:
        labels = batch["input_ids"] % 3
        labels[:1, :1] = labels[1:2, 2:] = -100
        batch["labels"] = labels[:, 0] if kind == "classes" else labels
    return fit(*models, data, options=OPTIONS)


WORK: dict[str, Callable[[], Any]] = {
    "logits": _llama,
    "labels": lambda: _llama(labels=True),
    "hidden": _hidden,
    **{kind: partial(_labelled, kind) for kind in LABELLED},
}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK.values(), ids=list(WORK))
def test_two_processes_with_half_of_each_batch_are_one_with_all(work: Callable[[], Any]):
    once = work()

    def both(_: int) -> Any:
        with joined():
            return work()

    results = together(both)
    for result in results:
        assert [row[0] for row in result.report.history] == [row[0] for row in once.report.history]
        for mine, wanted in zip(result.report.history, once.report.history, strict=True):
            assert mine[2:] == pytest.approx(wanted[2:], rel=1e-4, abs=1e-5)
        for name, transform in once.alignments[0].transforms.items():
            for key, tensor in transform.tensors().items():
                own = result.alignments[0].transforms[name].tensors()[key]
                torch.testing.assert_close(own, tensor, rtol=1e-3, atol=1e-4)
                assert torch.equal(own, results[0].alignments[0].transforms[name].tensors()[key])


def test_a_model_that_compares_the_examples_of_a_batch_is_refused():
    torch.manual_seed(0)
    config = CLIPConfig(text_config=PARTS, vision_config={**SMALL, "image_size": 8, "patch_size": 4}, projection_dim=8)
    models = [CLIPModel(config).eval() for _ in range(2)]
    data = [{**batch, "pixel_values": torch.randn(len(batch["input_ids"]), 3, 8, 8)} for batch in token_batches(2)]

    def work(_: int) -> Any:
        with joined():
            return fit(*models, data, AlignConfig(), OPTIONS)

    with pytest.raises(RecipeError, match="CLIPModel compares all examples of a batch"):
        together(work)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """What `rotation-merge fit` of two small models and some data says, and how it ends."""
    paths = [str(tmp_path / name) for name in ("anchor", "donor")]
    for seed, path in enumerate(paths):
        tiny_llama(seed).save_pretrained(path)
    save_file({"input_ids": torch.cat([b["input_ids"] for b in token_batches(2)])}, tmp_path / "data.safetensors")

    def run(rank: int, data: str = "data.safetensors") -> tuple[int, str, str]:
        given = ["fit", *paths, "--data", tmp_path / data, "--batch-size", "4", "--steps", "1", "--start", "identity"]
        result = cli_support.run(*given, "--alignment", tmp_path / f"of-{rank}")
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.mark.slow
def test_a_process_whose_fellow_ends_says_so(command: Callable[..., tuple[int, str, str]]):
    (first, _, said), (second, _, reason) = together(
        lambda rank: command(rank, "nothing.npz" if rank else "data.safetensors")
    )
    assert (first, second) == (2, 2)
    assert "another process of this fit has ended, or cannot be reached; read its message" in said
    assert "nothing.npz" in reason


@pytest.mark.slow
def test_the_first_process_writes_and_speaks(command: Callable[..., tuple[int, str, str]], tmp_path: Path):
    (code, said, _), (other, nothing, errors) = together(command)
    assert (code, other) == (0, 0), said + errors
    assert "written to" in said
    assert nothing + errors == ""
    assert (tmp_path / "of-0").exists()
    assert not (tmp_path / "of-1").exists()
    assert not list(tmp_path.glob("*.unfinished"))
