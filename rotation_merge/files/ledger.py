"""What matching (or a barrier's path) has found so far, beside an output: an interrupted run goes on from there.

It lies in `OUT.matching.unfinished` (`OUT.unfinished` is that of who merges into OUT). Nothing is written before
matching has lasted `SECONDS`, and then as often at most: what is done in a minute costs nothing.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import short
from rotation_merge.files.durable import replacing
from rotation_merge.files.outputs import MATCHING
from rotation_merge.files.unfinished import Unfinished

LOG = logging.getLogger(__name__)

SECONDS = 60.0
"""How long matching lasts before anything is written, and between two times that it is."""

UNREADABLE = (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
"""What a damaged entry may raise."""


@dataclass(frozen=True)
class Entry:
    """Something that was found: tensors, and what JSON can hold."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Book:
    """The entries of one run.

    Args:
        out: the output that they stand beside.
        mark: says what the run is of: everything that decides what is found. Asked for once anything is found.
        device: where tensors are put that are read.
    """

    def __init__(self, out: str, mark: Callable[[], str], device: str = "cpu") -> None:
        self.place, self.device = Unfinished(f"{out}{MATCHING}"), device
        self._mark, self._asked = "", mark
        self._pending: dict[str, Callable[[], Entry]] = {}
        self._written, self._broken = time.monotonic(), False
        self._lock = threading.RLock()

    def get(self, name: str) -> Entry | None:
        """An entry that an earlier run has left; None: there is none, or it is damaged."""
        with self._lock:
            self._open()
        path = self._file(name)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                facts, turned = (json.loads(file.metadata()[part]) for part in ("facts", "turned"))
                tensors = {key: file.get_tensor(key).to(self.device) for key in file.keys()}  # noqa: SIM118
                return Entry(facts, {key: x.mT if key in turned else x for key, x in tensors.items()})
        except UNREADABLE as error:
            LOG.warning("%s is damaged (%s); its content is computed again", path, short(error))
            return None

    def keep(self, name: str, made: Callable[[], Entry], large: bool) -> None:
        """Keep an entry, in the place of one of the same name.

        Args:
            made: makes it, when it is written.
            large: too large to wait in memory: it is written now or, where it is not yet time, not at all.
        """
        with self._lock:
            due = time.monotonic() - self._written >= SECONDS
            if due or not large:
                self._pending[name] = made
            if due:
                self.write()

    def write(self) -> None:
        """Write what waits. A disk without space keeps nobody from matching: that is said, and nothing more is kept."""
        with self._lock:
            pending, self._pending = self._pending, {}
            if self._broken or not pending:
                return
            try:
                self._open()
                self.place.path.mkdir(parents=True, exist_ok=True)
                self.place.of(self._mark)
                for name, made in pending.items():
                    self._save(name, made())
            except (OSError, SafetensorError) as error:
                self._broken = True
                LOG.warning(
                    "%s cannot be written (%s); after an interruption the run starts again",
                    self.place.path,
                    short(error),
                )
            self._written = time.monotonic()

    def interrupted(self) -> None:
        """The run ends before its end: what has taken long is kept."""
        if time.monotonic() - self._written >= SECONDS or self.place.path.exists():
            self.write()
        if not any(self.place.path.glob("*.safetensors")):
            self.place.remove()
        else:
            LOG.warning("progress is kept in %s; run the same command to continue", self.place.path)

    def _open(self) -> None:
        """Throw away what another run has left."""
        if self._mark:
            return
        self._mark = self._asked()
        if self.place.path.exists() and not self.place.is_of(self._mark):
            LOG.warning("%s belongs to other weights, options or versions; it is replaced", self.place.path)
            self.place.remove()
        elif self.place.path.exists():
            LOG.info("continuing from %s", self.place.path)

    def _save(self, name: str, entry: Entry) -> None:
        own = entry.tensors
        turned = [key for key, x in own.items() if x.ndim > 1 and not x.is_contiguous() and x.mT.is_contiguous()]
        laid = {key: x.mT if key in turned else x for key, x in own.items()}  # read again, sums are added in one order
        meta = {"name": name, "facts": json.dumps(entry.facts), "turned": json.dumps(turned)}
        with replacing(self._file(name)) as temporary:
            save_file(_apart(laid), temporary, metadata=meta)

    def _file(self, name: str) -> Path:
        words = re.sub(r"[^\w.]+", "-", name)[-80:]
        return self.place.file(f"{words}-{zlib.crc32(name.encode()):08x}.safetensors")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: contiguous, and no two in the same memory."""
    found, seen = dict[str, Tensor](), set[int]()
    for key, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        found[key] = own.clone() if own.untyped_storage().data_ptr() in seen else own
        seen.add(own.untyped_storage().data_ptr())
    return found


@dataclass(frozen=True)
class Ledger:
    """Where matching looks for what it has found before, and leaves what it finds, by name; by default nowhere."""

    book: Book | None = None
    where: str = ""

    def under(self, name: str) -> Ledger:
        """The same, for one part of the work."""
        return Ledger(self.book, f"{self.where}{name}/")

    def get(self, name: str) -> Entry | None:
        """What was found before."""
        return None if self.book is None else self.book.get(self.where + name)

    def keep(self, name: str, made: Callable[[], Entry], large: bool = False) -> None:
        """See `Book.keep`."""
        if self.book is not None:
            self.book.keep(self.where + name, made, large)


NOWHERE = Ledger()


@contextmanager
def kept_beside(out: str | None, mark: Callable[[], str], device: str | torch.device = "cpu") -> Iterator[Ledger]:
    """A ledger beside an output, which goes where the block ends well, and stays where it does not.

    Args:
        out, mark, device: see `Book`; without an output nothing is kept.
    """
    if out is None:
        yield NOWHERE
        return
    book = Book(out, mark, str(device))
    try:
        yield Ledger(book)
    except BaseException:
        book.interrupted()
        raise
    book.place.remove()
