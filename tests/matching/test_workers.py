"""Blocks matched side by side: the same bytes however many workers, errors in order, nothing far ahead."""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from cli_support import error_of
from mergekit import common, multigpu_executor
from plugin_support import (
    make,
    merged,
    mergekit_yaml,
    one_error,
    recipe_for,
)

from rotation_merge import workers
from rotation_merge.architecture import table
from rotation_merge.architecture.registry import shipped
from rotation_merge.errors import AlignmentError
from rotation_merge.matching import match
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin import views
from rotation_merge.workers import BYTES_A_WEIGHT, SHARE, in_order, in_threads, on_devices, workers_for


@pytest.mark.parametrize("at_once", [0, 2])
def test_a_workload_says_whether_it_runs_in_threads(at_once: int) -> None:
    work: Any = SimpleNamespace(at_once=at_once, piece=lambda step, item: (threading.current_thread(), step + item))
    threads, results = zip(*in_threads(work, 1, range(4)), strict=True)
    assert results == (1, 2, 3, 4)
    assert (threading.current_thread() in threads) == (at_once == 0)


def test_results_come_in_order_from_as_many_workers_and_few_items_are_taken_ahead() -> None:
    """All three wait for each other: with fewer at once none would ever come."""
    meet, taken = threading.Barrier(3, timeout=60), list[int]()

    def items() -> Iterator[int]:
        for n in range(99):
            taken.append(n)
            yield n

    results = in_order([lambda n: (meet.wait(), n * n)[1]] * 3, items())
    assert [next(results), len(taken)] == [0, 4]
    assert list(results) == [n * n for n in range(1, 99)]


def test_the_first_error_in_order_ends_it_and_workers_compute_with_one_thread() -> None:
    before, threads, begun = torch.get_num_threads(), set[threading.Thread](), list[int]()

    def work(n: int) -> int:
        threads.add(threading.current_thread())
        begun.append(n)
        if n >= 2:
            raise AlignmentError(f"block {n}")
        return torch.get_num_threads()

    results = in_order([work] * 3, range(9))
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(AlignmentError, match="block 2"):
        next(results)
    for thread in threads:
        thread.join()
    assert torch.get_num_threads() == before
    assert len(begun) <= 2 + len(threads)  # whoever fails begins nothing more
    with torch.no_grad():
        assert list(in_order([lambda _: torch.is_grad_enabled()], [0])) == [False]


def test_an_interrupted_process_does_not_wait_for_running_blocks() -> None:
    """Ctrl-C: what other threads compute meanwhile is for nobody."""
    code = """
import os, signal, threading, time
from rotation_merge.workers import in_order

def endless(block):
    while block == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)  # then again: Python misses one that comes just before the main thread waits for a lock
    threading.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job's shell has it ignore
list(in_order([endless] * 2, range(2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_workers_are_as_many_as_memory_and_threads_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "free_memory", lambda: int(10e9))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    weights = int(10e9 * SHARE / BYTES_A_WEIGHT / 3)
    assert [workers_for(count) for count in (weights, 1, 10**12)] == [3, 8, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"residual": "permutation"}, {"residual": "permutation", "anchor": "mean"}], ids=" ".join
)
def test_merges_are_the_same_bytes_however_many_workers_and_devices(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mergekit's executor for several GPUs, given two devices that are both the CPU.

    Also where results are taken late, as on a busy machine, where the devices are done before.
    """
    anchor, *donors = (make("llama", tmp_path / f"model-{seed}", seed=seed) for seed in range(3))
    recipe = recipe_for("linear", anchor, *donors)
    recipe["parameters"] |= options
    results = []
    for count in (1, 3):
        with monkeypatch.context() as patch:
            for part in (views, match):
                patch.setattr(part, "workers_for", lambda _, count=count: count)
            results.append(merged(recipe, tmp_path / str(count)))
    two_devices(monkeypatch)
    used: set[tuple[str, str]] = set()
    for part in (match, views):
        stock = part.match_block

        def watched(*given: Any, stock: Any = stock, part: Any = part, **named: Any) -> Any:
            used.add((part.__name__.rpartition(".")[2], threading.current_thread().name))
            return stock(*given, **named)

        monkeypatch.setattr(part, "match_block", watched)
    results.append(merged(recipe, tmp_path / "together", "--multi-gpu"))
    for other in results[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in results[0].items())
    threads = {thread for part, thread in used if part == ("match" if options else "views")}
    assert threads  # of the devices: how many blocks each gets is up to the clock
    assert threading.current_thread().name not in threads


def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mergekit believe in two accelerators, and take results late."""

    class Slow(queue.Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            time.sleep(0.003)
            return super().get(block, timeout)

    for module in (common, multigpu_executor):
        monkeypatch.setattr(module, "get_torch_accelerator_type", lambda *_: "cpu")
        monkeypatch.setattr(module, "get_torch_accelerator_count", lambda *_: 2)
    nothing = SimpleNamespace(synchronize=lambda **_: None)
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_module", lambda *_: nothing)
    monkeypatch.setattr(multigpu_executor, "queue", SimpleNamespace(Queue=Slow, Empty=queue.Empty))
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def test_multi_gpu_without_one_is_said_in_one_line(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "get_torch_accelerator_count", lambda *_: 0)
    result = mergekit_yaml(recipe_for("linear", *pair), tmp_path / "out", "--multi-gpu")
    assert "--multi-gpu: this machine has no GPU" in one_error(result.output)
    assert not (tmp_path / "out").exists()


def test_devices_share_pieces_and_each_does_one_at_a_time() -> None:
    meet, running = threading.Barrier(2, timeout=60), Counter[str]()

    def on(device: str, home: str) -> Any:
        def piece(step: str, item: int) -> tuple[str, int, str]:
            assert (running[device], home) == (0, "first")
            running[device] += 1
            meet.wait()  # for the other device's piece
            running[device] -= 1
            return step, item, device

        return SimpleNamespace(piece=piece)

    done = list(on_devices(["first", "second"])(SimpleNamespace(on=on), "step", range(20)))  # type: ignore[arg-type]
    assert [result[:2] for result in done] == [("step", n) for n in range(20)]
    assert {device for *_, device in done} == {"first", "second"}


def test_every_device_matches_blocks_of_its_own_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, here = threading.Barrier(2, timeout=60), threading.local()

    def match(device: Any) -> Any:
        meet.wait()  # for the other device's block
        return SimpleNamespace(rows=[], transforms={"matched": device})

    monkeypatch.setattr(views, "on_device", lambda transforms, device: {**transforms, "asked": device})
    blocks = views.BlockMatches(Run(watched=False), lambda: here.device)
    finders = [blocks.add(label, "d", 1, match) for label in "ab"]

    def merge(device: str, find: Callable[[], Any]) -> Any:
        here.device = device
        return [find() for _ in range(2)]  # found once

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(merge, ["cuda:0", "cuda:1"], finders))
    assert found == [[{"matched": device, "asked": device}] * 2 for device in ("cuda:0", "cuda:1")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["ray"], "--backend ray: ray is not installed; pip install 'rotation-merge[ray]'"),
        (["dask"], "--backend dask: distributed is not installed; pip install 'rotation-merge[dask]'"),
        (["dask", "--match-on", "both"], "leave out --match-on"),
        (["ray", "--device", "cuda:1"], "use --device cuda"),
    ],
)
def test_backends_that_cannot_be_used_are_said_in_one_line(
    options: list[str], words: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ray", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    assert words in error_of("align", *pair, tmp_path / "out", "--backend", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failing", [False, True])
def test_the_merge_computes_with_the_threads_that_workers_leave(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    monkeypatch.setattr(views, "workers_for", lambda weights: 2)

    def match(device: None) -> Any:
        if failing:
            raise AlignmentError("no")
        transforms = {"threads": torch.get_num_threads()}
        return SimpleNamespace(rows=[], transforms=transforms, part=lambda: transforms)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        blocks = views.BlockMatches(Run(watched=False), lambda: None)
        finders = [blocks.add(label, "d", 1, match) for label in "abc"]
        for find in finders[:1] if failing else finders:
            with pytest.raises(AlignmentError) if failing else contextlib.nullcontext():
                assert find() == {"threads": 1}  # type: ignore[comparison-overlap]
                assert torch.get_num_threads() == (3 if find is finders[-1] else 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", sorted(shipped()))
def test_work_on_any_family_travels_to_other_processes(family: str) -> None:
    architecture = table.sample(shipped()[family])
    work = pickle.loads(cloudpickle.dumps(match.Visits(architecture, {}, {}, {}, ("stream",), cached=True)))
    assert (work.architecture, work.folded, work.cached) == (architecture, ("stream",), True)
