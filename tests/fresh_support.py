"""Work in forked processes that begin as new ones do: without mergekit and this package, all else imported already.

A new interpreter that imports what a merge needs takes eight seconds of a processor, such a process a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from rotation_merge.mergekit_plugin import SWITCH

torch.set_num_threads(1)  # a forked process has no other threads
START = (Path(__file__).resolve().parent.parent / "rotation_merge.pth").read_text()


def fresh(work: Callable[[], Any], plugin: str = "1", start: str = START) -> Any:
    """What some work gives.

    Args:
        work: may import mergekit and this package, and must not use what this process has imported of them.
        plugin: the switch of the plugin.
        start: the line of a `.pth` file that every new interpreter runs, or nothing.

    Returns:
        What `work` returns, or {"broken": the exception}.
    """
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: writing.send(begun_anew(work, plugin, start)))
    child.start()
    writing.close()
    answer = reading.recv()
    child.join()
    return answer


def begun_anew(work: Callable[[], Any], plugin: str, start: str) -> Any:
    """What some work gives in this process, as if mergekit and ourselves had never been imported."""
    try:
        torch.set_num_threads(1)  # OpenMP waits forever for threads that are not forked
        gc.freeze()
        constants.HF_HUB_OFFLINE = True
        os.environ[SWITCH] = plugin
        for module in [name for name in sys.modules if name.split(".")[0] in ("mergekit", "rotation_merge")]:
            del sys.modules[module]
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "MergekitFinder"]
        exec(start, {})
        return work()
    except BaseException as error:
        return {"broken": repr(error)}
