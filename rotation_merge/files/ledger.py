"""Finished parts of a run beside its output, so that the same command continues after an interruption.

Every folder of unfinished work is an `Unfinished`: `OUT.unfinished` of whoever writes OUT (measuring, polishing,
distilling, the search for the best merge), and `OUT.matching.unfinished` of matching and barriers, whose intermediate
results a `ResumeStore` keeps. A store writes nothing before matching has lasted `SECONDS`, and later at most once in
that time: short runs pay nothing. A folder that no run wrote is refused; that of another run is replaced.

Every intermediate result is a `LedgerEntry` in a file of one format (`write_entry`, `read_entry`): those of a
`ResumeStore`, the records of a search, and the state of training (`matching/resume.py`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import RotationMergeError, SpaceError, short
from rotation_merge.files.durable import replacing
from rotation_merge.files.outputs import MATCHING, UNFINISHED

LOG = logging.getLogger(__name__)

MARK = "run.txt"
"""The file that says which run a folder belongs to."""

ENTRY = ".safetensors"
"""Suffix of the files of entries."""

STATE = f"state{ENTRY}"
"""The file in such a folder with the state of training."""

SECONDS = 60.0
"""Seconds of matching before anything is written, and between two writes of unfinished work."""

UNREADABLE = (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
"""Exceptions of a damaged entry."""


class Unfinished:
    """The folder `OUT.unfinished`, as a context manager: kept if the run is interrupted, removed when it ends.

    Unless it was there before, it is also removed if it holds no results yet, and on a user error other than a full
    disk.

    Args:
        out: the output that it stands beside.
    """

    def __init__(self, out: str) -> None:
        self.path = Path(f"{os.path.abspath(out)}{UNFINISHED}")
        self.new = not self.path.exists()

    def __enter__(self) -> Unfinished:
        self.path.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        full = isinstance(error, SpaceError) and any(self.path.glob(f"*{ENTRY}"))
        useless = not self.path.exists() or self.is_empty() or (isinstance(error, RotationMergeError) and not full)
        if error is None or (self.new and useless):
            self.remove()

    def remove(self) -> None:
        """Remove the folder, except files that no run wrote."""
        if self.new or self.file(MARK).exists():
            with suppress(OSError):
                self._empty()  # the mark goes last: after a kill here, the next run knows the folder
            shutil.rmtree(self.path, ignore_errors=True)

    def file(self, name: str) -> Path:
        return self.path / name

    def of(self, mark: str, *names: str) -> None:
        """Delete files (without names: everything) that a run with another mark left.

        Raises:
            RotationMergeError: no run wrote the folder.
        """
        if not self.is_of(mark):
            self._refuse_foreign()
            for name in names:
                self.file(name).unlink(missing_ok=True)
            if not names:
                self._empty()
            self.file(MARK).write_text(mark, encoding="utf-8")

    def is_of(self, mark: str) -> bool:
        """Whether the folder belongs to the run with this mark."""
        try:
            return self.file(MARK).read_text(encoding="utf-8") == mark
        except (OSError, ValueError):
            return False

    def is_empty(self) -> bool:
        """Whether there is nothing in the folder but its mark."""
        return all(path.name == MARK for path in self.path.iterdir())

    def resume_or_remove(self, mark: str) -> None:
        """Continue in a folder that is there, or remove it if it belongs to another run.

        Raises:
            RotationMergeError: no run wrote it.
        """
        self._refuse_foreign()
        if self.is_of(mark):
            LOG.info("continuing from %s", self.path)
        elif self.path.exists():
            LOG.warning("%s belongs to other weights, options or versions; it is replaced", self.path)
            self.remove()
        self.new = not self.path.exists()

    def begin(self, mark: str) -> None:
        """Make the folder, for the run with this mark."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.of(mark)

    def _refuse_foreign(self) -> None:
        """Refuse a folder with files that no run wrote."""
        if self.path.exists() and any(self.path.iterdir()) and not self.file(MARK).exists():
            remedy = "move it away, or write somewhere else"
            raise RotationMergeError("exists, but rotation-merge did not write it", where=str(self.path), remedy=remedy)

    def _empty(self) -> None:
        """Remove everything in the folder but its mark."""
        for path in list(self.path.iterdir()) if self.path.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class LedgerEntry:
    """An intermediate result: tensors, and facts that JSON can hold."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def write_entry(path: Path, name: str, entry: LedgerEntry) -> None:
    """Write an entry to a file, atomically; a tensor that has several names (tied weights) is stored once."""
    first, same = dict[tuple[Any, ...], str](), dict[str, str]()
    for key, x in entry.tensors.items():
        memory = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride())
        if x.numel() and first.setdefault(memory, key) != key:
            same[key] = first[memory]
    tensors = {key: x for key, x in entry.tensors.items() if key not in same}
    turned = [key for key, x in tensors.items() if x.ndim > 1 and not x.is_contiguous() and x.mT.is_contiguous()]
    laid = {key: x.mT if key in turned else x for key, x in tensors.items()}  # read again, sums are added in one order
    meta = {"name": name, **{k: json.dumps(v) for k, v in (("facts", entry.facts), ("turned", turned), ("same", same))}}
    with replacing(path) as temporary:
        save_file(_apart(laid), temporary, metadata=meta)


def read_entry(path: Path, device: str = "cpu") -> LedgerEntry:
    """Read an entry from its file.

    Raises:
        UNREADABLE: the file is damaged.
    """
    with safe_open(str(path), framework="pt") as file:
        facts, turned, same = (json.loads(file.metadata()[part]) for part in ("facts", "turned", "same"))
        tensors = {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118
    tensors = {key: x.mT if key in turned else x for key, x in tensors.items()}
    return LedgerEntry(facts, {**tensors, **{key: tensors[other] for key, other in same.items()}})


def stored_entry(path: Path, device: str = "cpu") -> LedgerEntry | None:
    """The entry in a file; None if there is none, or it is damaged."""
    if not path.exists():
        return None
    try:
        return read_entry(path, device)
    except UNREADABLE as error:
        LOG.warning("%s is damaged (%s); its content is computed again", path, short(error))
        return None


class ResumeStore:
    """The stored intermediate results of one run.

    Args:
        out: the output that they stand beside.
        mark: returns the key of all inputs and options of the run; called with the first result.
        device: where tensors are put that are read.
    """

    def __init__(self, out: str, mark: Callable[[], str], device: str = "cpu") -> None:
        self.place, self.device = Unfinished(f"{out}{MATCHING}"), device
        self._mark, self._asked = "", mark
        self._pending: dict[str, Callable[[], LedgerEntry]] = {}
        self._written, self._broken = time.monotonic(), False
        self._lock = threading.RLock()

    def get(self, name: str) -> LedgerEntry | None:
        """An entry of an earlier run; None if there is none, or it is damaged."""
        with self._lock:
            self._open()
        return stored_entry(self._file(name), self.device)

    def keep(self, name: str, make_entry: Callable[[], LedgerEntry], large: bool) -> None:
        """Store an entry; one of the same name is replaced.

        Args:
            make_entry: makes it, when it is written.
            large: too large to wait in memory: it is written now or, where it is not yet time, not at all.
        """
        with self._lock:
            due = time.monotonic() - self._written >= SECONDS
            if due or not large:
                self._pending[name] = make_entry
            if due:
                self.write()

    def write(self) -> None:
        """Write pending entries. On a full disk, warn once and store nothing more."""
        with self._lock:
            pending, self._pending = self._pending, {}
            if self._broken or not pending:
                return
            try:
                self._open()
                self.place.begin(self._mark)
                for name, make_entry in pending.items():
                    write_entry(self._file(name), name, make_entry())
            except (OSError, SafetensorError) as error:
                self._broken = True
                LOG.warning(
                    "%s cannot be written (%s); after an interruption the run starts again",
                    self.place.path,
                    short(error),
                )
            self._written = time.monotonic()

    def interrupted(self) -> None:
        """The run was interrupted: keep expensive results."""
        if time.monotonic() - self._written >= SECONDS or self.place.path.exists():
            self.write()
        if not any(self.place.path.glob(f"*{ENTRY}")):
            self.place.remove()
        else:
            LOG.warning("progress is kept in %s; run the same command to continue", self.place.path)

    def _open(self) -> None:
        """Delete the entries of other runs."""
        if not self._mark:
            self._mark = self._asked()
            self.place.resume_or_remove(self._mark)

    def _file(self, name: str) -> Path:
        words = re.sub(r"[^\w.]+", "-", name)[-80:]
        return self.place.file(f"{words}-{zlib.crc32(name.encode()):08x}{ENTRY}")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors needs them: contiguous, without shared memory."""
    copies, addresses = dict[str, Tensor](), set[int]()
    for key, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        copies[key] = copy.clone() if copy.untyped_storage().data_ptr() in addresses else copy
        addresses.add(copy.untyped_storage().data_ptr())
    return copies


@dataclass(frozen=True)
class Ledger:
    """A named scope of a `ResumeStore`; without a store, nothing is read or kept."""

    book: ResumeStore | None = None
    prefix: str = ""

    def under(self, name: str) -> Ledger:
        """The scope of one part of the work."""
        return Ledger(self.book, f"{self.prefix}{name}/")

    def get(self, name: str) -> LedgerEntry | None:
        """See `ResumeStore.get`."""
        return None if self.book is None else self.book.get(self.prefix + name)

    def keep(self, name: str, make_entry: Callable[[], LedgerEntry], large: bool = False) -> None:
        """See `ResumeStore.keep`."""
        if self.book is not None:
            self.book.keep(self.prefix + name, make_entry, large)


NOWHERE = Ledger()


@contextmanager
def kept_beside(out: str | None, mark: Callable[[], str], device: str | torch.device = "cpu") -> Iterator[Ledger]:
    """A ledger beside an output: deleted when the block ends without an error, else kept.

    Args:
        out, mark, device: see `ResumeStore`; without an output nothing is kept.
    """
    if out is None:
        yield NOWHERE
        return
    book = ResumeStore(out, mark, str(device))
    try:
        yield Ledger(book)
    except BaseException:
        book.interrupted()
        raise
    book.place.remove()
