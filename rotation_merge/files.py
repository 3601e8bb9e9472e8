"""Files: replaced whole, locked while they are written, checked against what is read, and kept for interrupted work."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rotation_merge.errors import RotationMergeError, SpaceError, no_space, short

LOG = logging.getLogger(__name__)

PARTIAL, LOCK = ".partial", ".lock"
"""Endings of the hidden names beside an output: of what is not whole yet, and of the file that is locked."""
ELSEWHERE, CONTINUES = "write somewhere else", "free some space (the same command continues), or write somewhere else"
SPILL = "free some space, or name a folder that has more in TMPDIR"
"""Remedies for what cannot be written."""
WAIT = 10.0
"""Seconds to wait for another process that replaces the same file."""


# --- written whole ---------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A hidden name to write to; when the block ends without an error, the file is synced and replaces `path`.

    If the block raises, the old file stays.

    Raises:
        RotationMergeError: another run is writing it.
    """
    target = os.path.abspath(path)
    with locked(target, wait=WAIT):
        temporary = companion(target, PARTIAL)
        with suppress(FileNotFoundError):  # of a killed process
            os.remove(temporary)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                os.remove(temporary)
        sync(os.path.dirname(target))


def companion(target: str, ending: str) -> str:
    """The hidden name that belongs to a file or folder: beside it, or in a folder that nothing can be moved into."""
    parent, name = os.path.split(target)
    if os.path.isdir(target) and (os.path.ismount(target) or not os.access(parent, os.W_OK | os.X_OK)):
        return os.path.join(target, f".rotation-merge{ending}")
    return os.path.join(parent, f".{name[:200]}{ending}")


def name_when_whole(path: str) -> str:
    """The final name of a file that `replacing` writes under a hidden one; other names are returned unchanged."""
    return re.sub(rf"(^|/)\.([^/]+){re.escape(PARTIAL)}$", r"\1\2", path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path: str, content: object) -> None:
    """Write a JSON file into a folder that is replaced as a whole."""
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def sync(path: str) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    with suppress(PermissionError, FileNotFoundError):  # made unreadable, a folder on Windows, a link to nothing
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: str) -> None:
    """`sync` for everything in a folder, the innermost first, and the folder itself."""
    for path in [*sorted(Path(folder).rglob("*"), reverse=True), Path(folder)]:
        sync(str(path))


@contextmanager
def writing(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Say in one line that something beside or in a place cannot be written within the block.

    Raises:
        SpaceError: the disk is full, or the place takes nothing.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not no_space(error):  # as torch and safetensors say it
            raise
        problem = f"cannot be written ({short(getattr(error, 'strerror', None) or error)})"
        raise SpaceError(problem, where=str(path), remedy=remedy) from error


# --- locked ----------------------------------------------------------------------------------------------------------


@contextmanager
def locked(*outs: str | os.PathLike[str], wait: float = 0.0) -> Iterator[None]:
    """Lock outputs against other processes and threads within the block; a folder's lock covers its contents.

    Missing folders above them are made, and removed again where nothing has come into them. A block within a block of
    the same output holds it already.

    Args:
        wait: seconds to wait for another run.

    Raises:
        RotationMergeError: another run is writing one, or it cannot be written.
    """
    paths = list(dict.fromkeys(map(os.path.realpath, outs)))
    with ExitStack() as stack:
        for path in paths:
            if not any(path.startswith(os.path.join(folder, "")) for folder in paths):
                stack.enter_context(_locked(path, wait))
        yield


@contextmanager
def _locked(path: str, wait: float) -> Iterator[None]:
    missing = [folder for folder in Path(path).parents if not folder.exists()]
    lock = FileLock(companion(path, LOCK), is_singleton=True)
    try:
        with writing(path, ELSEWHERE), suppress(Timeout):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            lock.acquire(timeout=wait, poll_interval=0.05)
        if not lock.is_locked:
            remedy = f"wait until that has ended, or {ELSEWHERE}"
            raise RotationMergeError("another run is writing it", where=path, remedy=remedy)
        yield
    finally:
        with suppress(OSError):
            if not lock.is_locked:  # interrupted on the way: what it left is removed, unless another run has it
                lock.acquire(timeout=0)
            if lock.lock_counter == 1:
                os.remove(lock.lock_file)  # before it is released: whoever opened it meanwhile sees it has no name
        lock.release()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


# --- checked ---------------------------------------------------------------------------------------------------------

WORD = re.compile("self|synthetic|demo:.*")
"""A word that stands where data may be named, and names no file."""


def paths_of(name: str, cache: str | None = None) -> list[str]:
    """The paths of what is read, and the targets of links in a folder; of a model of the hub, the folder in the cache.

    Args:
        name: as the user wrote it: a path, a name on the hub, BASE+ADAPTER.
    """
    if os.path.lexists(name):
        entries = os.scandir(name) if os.path.isdir(name) else ()
        return [name, *(os.path.realpath(entry) for entry in entries if entry.is_symlink())]
    if "+" in name:
        return [path for part in name.split("+") if part for path in paths_of(part, cache)]
    from huggingface_hub.constants import HF_HUB_CACHE

    name = name.partition("@")[0]
    kind, repo = ("datasets", name.removeprefix("datasets/")) if name.startswith("datasets/") else ("models", name)
    parts = repo.partition(":")[0].split("/")[:2]
    return [name, *filter(os.path.isdir, [os.path.join(cache or HF_HUB_CACHE, "--".join([kind, *parts]))])]


FILE, FOLDER, WORK = "file", "folder", "work"
"""Kinds of outputs: a file; a folder in which other files stay; the folder of unfinished work beside an output."""


@dataclass(frozen=True)
class Output:
    """A file or folder that a run writes.

    Attributes:
        path: where.
        kind: FILE, FOLDER or WORK.
        wrote: says of a file that is there whether the same option wrote it, so that it may be replaced unasked.
        beside: whether a new file, or one that the same option wrote, may lie in a folder that is read.
        remedy: where something lies there already.
    """

    path: str
    kind: str = FILE
    wrote: Callable[[str], bool] = lambda _: False
    beside: bool = False
    remedy: str = ELSEWHERE

    def overlap(self, read: str) -> str:
        """How it lies to a path that is read, in words; empty if they lie apart."""
        places, inputs = _places(self.path), _places(read)
        if places & inputs:
            return "is one of the inputs"
        if any(place.is_relative_to(path) for place in places for path in inputs):
            new = self.kind == WORK or not os.path.lexists(self.path) or self.wrote(self.path)
            return "" if self.beside and new else "is inside one of the inputs"
        holds = any(path.is_relative_to(place) for place in places for path in inputs)
        return "holds one of the inputs" if holds else ""

    def obstacle(self, force: bool) -> str:
        """What lies at its path and may not be replaced, in words; empty if nothing does."""
        if self.kind == WORK or not os.path.lexists(self.path):
            return ""
        is_folder = os.path.isdir(self.path)
        if is_folder == (self.kind == FILE):
            return f"is a {'directory' if is_folder else 'file'}, which is in the way"
        replaced = bool(os.listdir(self.path)) if is_folder else not self.wrote(self.path)
        return "already exists" if replaced and not force else ""


def _places(path: str) -> set[Path]:
    """The real places of a path: of itself, which may be a link, and of what it stands for."""
    parent, name = os.path.split(os.path.abspath(path))
    return {Path(os.path.realpath(path)), Path(os.path.realpath(parent), name)}


def check_output(output: Output, inputs: Iterable[str] = (), force: bool = False, cache: str | None = None) -> None:
    """Refuse an output that is, lies in, or holds an input, by real paths; that is there already; or has no place.

    Args:
        inputs: names of what is read, as of `paths_of`.
        force: whether it may be there already, as long as a file comes for a file, and a folder for a folder.
        cache: where models of the hub are kept, if not in the usual place.

    Raises:
        RotationMergeError: names the place.
    """
    for name in dict.fromkeys(inputs):
        if words := next(filter(None, map(output.overlap, paths_of(name, cache))), ""):
            raise RotationMergeError(f"{words} ({name})", where=output.path, remedy=ELSEWHERE)
    if words := output.obstacle(force):
        raise RotationMergeError(words, where=output.path, remedy=output.remedy)
    path = Path(os.path.realpath(os.path.dirname(output.path) if output.kind == FILE else output.path))
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        words = "cannot be written into" if place.is_dir() else "a file stands in the way"
        raise RotationMergeError(words, where=str(place), remedy=ELSEWHERE)


# --- for a while -----------------------------------------------------------------------------------------------------


class TemporaryFolder:
    """A new folder that goes with its block, its owner or the process; after a kill, with the next one in its place.

    Attributes:
        path: where it is.
        close: removes it.

    Args:
        parent: folder to create it in, created if missing; None: the system's folder for temporary files.
    """

    PREFIX, OWNER = "rotation-merge-", "owner.lock"

    def __init__(self, parent: str | None = None) -> None:
        self._shared, place = parent is None, parent or tempfile.gettempdir()
        os.makedirs(place, exist_ok=True)
        for file in Path(place).glob(f"{self.PREFIX}*/{self.OWNER}"):
            with suppress(OSError), FileLock(file, blocking=False):  # else its owner lives, or it is somebody else's
                shutil.rmtree(file.parent, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=self.PREFIX, dir=place)
        self._lock = FileLock(os.path.join(self.path, "new"), thread_local=False)
        self._lock.acquire()
        os.rename(self._lock.lock_file, os.path.join(self.path, self.OWNER))  # nobody finds it before it is locked
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if self._shared and no_space(error):
            raise SpaceError(f"the disk is full ({short(error)})", where=os.path.dirname(self.path), remedy=SPILL)


# --- for interrupted work --------------------------------------------------------------------------------------------

UNFINISHED, MATCHING_UNFINISHED = ".unfinished", ".matching.unfinished"
"""Suffixes of an output's name for the folder of unfinished work, and for that of unfinished matching."""
KEY = "run.txt"
"""In such a folder, the file that says which run it belongs to."""


class Store:
    """Finished parts of a run, a file each in a folder beside its output, from which the same command continues.

    As a context manager it is kept if the run is interrupted, and removed when it ends, and when a new one is of no
    use: without parts, or after an error of the user's.

    Attributes:
        path: of the folder.

    Args:
        out: the output that the folder lies beside.
        ending: of the folder's name.
    """

    def __init__(self, out: str, ending: str = UNFINISHED) -> None:
        self.path = Path(f"{os.path.abspath(out)}{ending}")
        self._new = not self.path.exists()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        wrong = isinstance(error, RotationMergeError) and not isinstance(error, SpaceError)
        if error is None or (self._new and (wrong or self.is_empty())):
            self.remove()

    def begin(self, key: str) -> None:
        """Make the folder, or continue in it; that of a run with another key is replaced.

        Raises:
            RotationMergeError: no run wrote it.
            SpaceError: it cannot be made.
        """
        if self.is_of(key):
            LOG.info("continuing from %s", self.path)
            return
        if (self.path / KEY).exists():
            LOG.warning("%s belongs to other weights, options or versions; it is replaced", self.path)
            self.remove()
        elif not self.is_empty():
            problem, remedy = "exists, but rotation-merge did not write it", f"move it away, or {ELSEWHERE}"
            raise RotationMergeError(problem, where=str(self.path), remedy=remedy)
        self._new = True
        with writing(self.path, CONTINUES):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / KEY).write_text(key, encoding="utf-8")

    def is_of(self, key: str) -> bool:
        """Whether the folder belongs to the run with this key."""
        with suppress(OSError, ValueError):
            return (self.path / KEY).read_text(encoding="utf-8") == key
        return False

    def is_empty(self) -> bool:
        """Whether there is nothing in the folder but its key."""
        return not self.path.exists() or all(path.name == KEY for path in self.path.iterdir())

    def remove(self) -> None:
        """Remove the folder, unless no run wrote it; the key last, so that after a kill the next run knows it."""
        if not (self.path / KEY).exists():
            return
        for path in (path for path in self.path.iterdir() if path.name != KEY):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def put(self, name: str, part: Any) -> None:
        """Keep a part, atomically: dictionaries and lists of numbers, words and tensors; one of its name is replaced.

        Raises:
            SpaceError: it cannot be written.
        """
        import torch

        with writing(self.path, CONTINUES), replacing(self._file(name)) as temporary:
            torch.save(part, temporary)

    def get(self, name: str, device: str = "cpu", mapped: bool = False) -> Any:
        """A part that is kept; None if there is none, or it is damaged.

        Args:
            mapped: tensors are read from the file when they are used.
        """
        import torch

        path = self._file(name)
        try:
            return torch.load(path, device, weights_only=True, mmap=mapped) if path.exists() else None
        except Exception as error:  # torch has one of its own for every kind of damage
            LOG.warning("%s is damaged (%s); its content is computed again", path, short(error))
            return None

    def _file(self, name: str) -> Path:
        words = re.sub(r"[^\w.]+", "-", name)[-80:]
        return self.path / f"{words}-{zlib.crc32(name.encode()):08x}.pt"
