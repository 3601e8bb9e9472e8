"""Results of matching and of barriers, kept beside an output once a run has lasted a minute: short runs pay nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rotation_merge.errors import short
from rotation_merge.files import MATCHING_UNFINISHED, Store

LOG = logging.getLogger(__name__)

SECONDS = 60.0
"""Seconds of work before anything is written, and between two writes of unfinished work."""


class DelayedStore:
    """A store that is written at most once in `SECONDS`; parts wait in memory meanwhile.

    Args:
        store: for the parts.
        key: returns the key of all inputs and options of the run; called with the first result.
        device: where tensors are put that are read.
    """

    def __init__(self, store: Store, key: Callable[[], str], device: str = "cpu") -> None:
        self.store, self.device = store, device
        self._key, self._known_key = key, ""
        self._pending: dict[str, Callable[[], Any]] = {}
        self._written, self._broken = time.monotonic(), False
        self._lock = threading.RLock()

    def get(self, name: str) -> Any:
        """A part of an earlier run; None if there is none, or it is damaged."""
        with self._lock:
            if not self._known_key:
                self._known_key = self._key()
                if self.store.path.exists():
                    self.store.begin(self._known_key)
        return self.store.get(name, self.device)

    def keep(self, name: str, make_part: Callable[[], Any], large: bool) -> None:
        """Store a part; one of the same name is replaced.

        Args:
            make_part: makes it, when it is written.
            large: too large to wait in memory: it is written now or, where it is not yet time, not at all.
        """
        with self._lock:
            due = time.monotonic() - self._written >= SECONDS
            if due or not large:
                self._pending[name] = make_part
            if due:
                self.write()

    def write(self) -> None:
        """Write pending parts. On a full disk, warn once and store nothing more."""
        with self._lock:
            pending, self._pending = self._pending, {}
            if self._broken or not pending:
                return
            try:
                self._known_key = self._known_key or self._key()
                self.store.begin(self._known_key)
                for name, make_part in pending.items():
                    self.store.put(name, make_part())
            except OSError as error:
                self._broken = True
                problem = "%s cannot be written (%s); after an interruption the run starts again"
                LOG.warning(problem, self.store.path, short(error))
            self._written = time.monotonic()

    def interrupted(self) -> None:
        """The run was interrupted: keep expensive results."""
        if time.monotonic() - self._written >= SECONDS or self.store.path.exists():
            self.write()
        if self.store.is_empty():
            self.store.remove()
        else:
            LOG.warning("progress is kept in %s; run the same command to continue", self.store.path)


@dataclass(frozen=True)
class Ledger:
    """What is kept of one job, by name; without a store nothing is kept."""

    store: DelayedStore | None = None
    prefix: str = ""

    def under(self, name: str) -> Ledger:
        """The scope of one part of the work."""
        return Ledger(self.store, f"{self.prefix}{name}/")

    def get(self, name: str) -> Any:
        """See `DelayedStore.get`."""
        return None if self.store is None else self.store.get(self.prefix + name)

    def keep(self, name: str, make_part: Callable[[], Any], large: bool = False) -> None:
        """See `DelayedStore.keep`."""
        if self.store is not None:
            self.store.keep(self.prefix + name, make_part, large)


NOWHERE = Ledger()


@contextmanager
def kept_beside(
    out: str | None, key: Callable[[], str], device: str | torch.device = "cpu", ending: str = MATCHING_UNFINISHED
) -> Iterator[Ledger]:
    """A ledger beside an output (None: nowhere): deleted when the block ends without an error, else kept.

    Args:
        out, ending: see `Store`; `key`, `device`: see `DelayedStore`.
    """
    if out is None:
        yield NOWHERE
        return
    delayed = DelayedStore(Store(out, ending), key, str(device))
    try:
        yield Ledger(delayed)
    except BaseException:
        delayed.interrupted()
        raise
    delayed.store.remove()
