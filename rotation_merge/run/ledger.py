"""Results of matching and of barriers, kept beside an output once a run has lasted a minute: short runs pay nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotation_merge.errors import SpaceError
from rotation_merge.files import MATCHING_UNFINISHED, Store

LOG = logging.getLogger(__name__)

SECONDS = 60.0
"""Seconds of work before anything is written, and between two writes of unfinished work."""


class _DelayedStore:
    """A store that is written at most once in `SECONDS`; parts wait in memory meanwhile (see `kept_beside`)."""

    def __init__(self, store: Store, key: Callable[[], str], device: str) -> None:
        self.store, self.key, self.device, self.lock = store, cache(key), device, threading.RLock()
        self.pending: dict[str, Callable[[], Any]] = {}
        self.written, self.begun, self.broken = time.monotonic(), False, False

    def get(self, name: str) -> Any:
        with self.lock:
            if not self.begun and self.store.path.exists():
                self.store.begin(self.key())
            self.begun = True
            return self.store.get(name, self.device)

    def keep(self, name: str, make_part: Callable[[], Any], large: bool) -> None:
        with self.lock:
            due = time.monotonic() - self.written >= SECONDS
            if due or not large:
                self.pending[name] = make_part
            if due:
                self.write()

    def write(self) -> None:
        """Write pending parts. On a full disk, warn once and store nothing more."""
        with self.lock:  # threads may still keep parts when an error ends the run
            pending, self.pending, self.written = self.pending, {}, time.monotonic()
            if self.broken or not pending:
                return
            try:
                self.store.begin(self.key())
                for name, make_part in pending.items():
                    self.store.put(name, make_part())
            except SpaceError as error:
                self.broken = True
                LOG.warning("%s %s; after an interruption the run starts again", error.where, error.what)


@dataclass(frozen=True)
class Ledger:
    """What is kept of one job, by name; without a store nothing is kept."""

    store: _DelayedStore | None = None
    prefix: str = ""

    def under(self, name: str) -> Ledger:
        """The scope of one part of the work."""
        return Ledger(self.store, f"{self.prefix}{name}/")

    def get(self, name: str) -> Any:
        """A part of an earlier run; None if there is none, or it is damaged."""
        return None if self.store is None else self.store.get(self.prefix + name)

    def keep(self, name: str, make_part: Callable[[], Any], large: bool = False) -> None:
        """Store a part; one of the same name is replaced.

        Args:
            make_part: makes it, when it is written.
            large: too large to wait in memory: it is written now or, where it is not yet time, not at all.
        """
        if self.store is not None:
            self.store.keep(self.prefix + name, make_part, large)


NOWHERE = Ledger()


@contextmanager
def kept_beside(
    out: str | None, key: Callable[[], str], device: str | torch.device = "cpu", ending: str = MATCHING_UNFINISHED
) -> Iterator[Ledger]:
    """A ledger beside an output (None: nowhere): deleted when the block ends without an error, else kept.

    Args:
        out, ending: see `Store`.
        key: returns the key of all inputs and options of the run; called with the first result.
        device: where tensors are put that are read.
    """
    if out is None:
        yield NOWHERE
        return
    delayed = _DelayedStore(Store(out, ending), key, str(device))
    store = delayed.store
    try:
        yield Ledger(delayed)
    except BaseException:
        if time.monotonic() - delayed.written >= SECONDS or store.path.exists():
            delayed.write()  # what was expensive
        if store.is_empty():
            store.remove()
        else:
            LOG.warning("progress is kept in %s; run the same command to continue", store.path)
        raise
    store.remove()
