"""Checks that outputs and inputs of a run do not overlap, and locks the outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.files.locks import output_lock

DATA = "data"
WORDS = ("self", "synthetic")
"""Words that stand where data may be named, and name no file."""
UNFINISHED, MATCHING = ".unfinished", ".matching"
"""Suffixes of an output's name for the folder of unfinished work, and for that of unfinished matching."""
MATCHING_UNFINISHED = f"{MATCHING}{UNFINISHED}"


@dataclass(frozen=True)
class Input:
    """A file or folder that a run reads.

    Attributes:
        name: as the user wrote it: a path, a name on the hub, BASE+ADAPTER.
        kind: noun for it.
    """

    name: str
    kind: str

    def paths(self, cache: str | None = None) -> list[str]:
        """Its real path, and the targets of links in it."""
        if self.kind == DATA and (self.name in WORDS or self.name.startswith("demo:")):
            return []
        if os.path.lexists(self.name):
            return [self.name, *(_linked(self.name) if os.path.isdir(self.name) else [])]
        parts = [part.partition("@")[0] for part in self.name.split("+")]
        if len(parts) > 1:
            return [path for part in parts if part for path in Input(part, self.kind).paths(cache)]
        return [parts[0], *_on_the_hub(parts[0], cache)]


FILE, FOLDER, ROOM, WORK = "file", "folder", "room", "work"
"""Kinds of outputs: a file; a folder in which other files stay; a temporary folder inside another one; the folder of
unfinished work beside an output."""


@dataclass(frozen=True)
class Output:
    """A file or folder that a run writes.

    Attributes:
        path: where.
        option: its name for the user: an argument, an option, a key of the recipe.
        kind: FILE, FOLDER, ROOM or WORK.
        wrote: says of a file that is there whether this option wrote it, so that it may be replaced unasked.
        beside: whether a new file, or one that the option wrote, may lie in a folder that is read.
        remedy: for an output that cannot be written.
        in_existing: whether the folder that it lies in must exist, as the one of a merged model.
    """

    path: str
    option: str
    kind: str = FILE
    wrote: Callable[[str], bool] = lambda _: False
    beside: bool = False
    remedy: str = "write somewhere else"
    in_existing: bool = False

    @property
    def may_lie_beside(self) -> bool:
        return self.beside and (self.kind == WORK or not os.path.lexists(self.path) or self.wrote(self.path))


def check_outputs(outputs: Iterable[Output], inputs: Iterable[Input], cache: str | None = None) -> None:
    """Refuse an output that is, lies in, or contains an input, by real paths.

    Args:
        cache: where models of the hub are kept, if not in the usual place.

    Raises:
        RotationMergeError: names the two.
    """
    places = [(read, path, _Place(path)) for read in dict.fromkeys(inputs) for path in read.paths(cache)]
    for output in outputs:
        target = _Place(output.path)
        for read, _, place in places:
            words = target.against(place)
            allowed = (words == INSIDE and output.may_lie_beside) or (words == AROUND and output.kind == ROOM)
            if words and not allowed:
                problem = f"{words} ({read.kind} {read.name})"
                raise RotationMergeError(problem, where=output.path, remedy=output.remedy)


SAME, INSIDE, AROUND = "is one of the inputs", "is inside one of the inputs", "holds one of the inputs"


class _Place:
    """A path by its real place: itself and every folder above it, by device and inode."""

    def __init__(self, path: str) -> None:
        above, name = os.path.split(os.path.abspath(path))
        places = os.path.realpath(path), os.path.join(os.path.realpath(above), name)  # the second may be a link
        self.marks = set(map(_mark, places))
        self.above = {mark for place in places for mark in _above(place)}

    def against(self, read: _Place) -> str:
        """The overlap of an output with an input in words; empty if there is none."""
        if self.marks & read.marks:
            return SAME
        return INSIDE if read.marks & self.above else AROUND if self.marks & read.above else ""


def _mark(path: str) -> tuple[int, int] | str:
    try:
        status = os.lstat(path)
    except OSError:
        return path
    return status.st_dev, status.st_ino


def _above(path: str) -> Iterator[tuple[int, int] | str]:
    while (parent := os.path.dirname(path)) != path:
        path = parent
        yield _mark(path)


def _linked(folder: str) -> list[str]:
    """Targets of the links in a folder, as in the hub's cache."""
    paths = [os.path.join(place, name) for place, folders, names in os.walk(folder) for name in (*folders, *names)]
    return [os.path.realpath(path) for path in paths if os.path.islink(path)]


def _on_the_hub(name: str, cache: str | None) -> list[str]:
    """The cache folder of a hub repository."""
    parts = name.partition(":")[0].split("/")  # org/repo:file.gguf
    kind = "datasets" if parts[0] == "datasets" else "models"
    repository = parts[1:3] if kind == "datasets" else parts[:2]
    if len(repository) < 2 or not all(repository) or name.startswith((".", "~")):
        return []
    if cache is None:
        from huggingface_hub.constants import HF_HUB_CACHE as cache
    folder = os.path.join(str(cache), "--".join((kind, *repository)))
    return [folder] if os.path.isdir(folder) else []


def check_replaced(outputs: Iterable[Output], force: bool = False, remedy: str = "") -> None:
    """Refuse to overwrite files that the same option did not write.

    With `force`, refuse only a file in place of a folder, or a folder in place of a file.

    Args:
        remedy: instead of the output's.

    Raises:
        RotationMergeError: names the path.
    """
    for output in outputs:
        if output.kind == WORK or not os.path.lexists(output.path):
            continue
        is_folder = os.path.isdir(output.path)
        if is_folder == (output.kind == FILE):
            problem, kind = ("is a directory", "a file") if is_folder else ("is a file", "a directory")
            raise RotationMergeError(problem, where=output.path, remedy=f"name {kind} to write")
        replaced = not output.wrote(output.path) if output.kind == FILE else bool(os.listdir(output.path))
        if replaced and output.kind != ROOM and not force:
            raise RotationMergeError("already exists", where=output.path, remedy=remedy or output.remedy)


def check_writable(outputs: Iterable[Output]) -> None:
    """Refuse paths that cannot be written to.

    Raises:
        RotationMergeError: names the place.
    """
    for output in outputs:
        folder = os.path.dirname(output.path)
        if output.in_existing and not os.path.isdir(folder):
            remedy = nearest_path(folder, "name the merged model's directory")
            raise RotationMergeError("no such directory", where=folder, remedy=remedy)
        place = os.path.realpath(output.path)
        while not os.path.exists(place) or (output.kind == FILE and place == os.path.realpath(output.path)):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise RotationMergeError("a file stands in the way", where=place, remedy="write somewhere else")
        if not os.access(place, os.W_OK | os.X_OK):
            raise RotationMergeError("cannot be written into", where=place, remedy="write somewhere else")


def prepare_file(output: Output) -> None:
    """Check that a file may be written or replaced, and make the folders above it.

    Raises:
        RotationMergeError: names the place.
    """
    check_replaced([output])
    check_writable([output])
    os.makedirs(os.path.dirname(os.path.abspath(output.path)), exist_ok=True)


@contextmanager
def outputs_locked(outputs: Iterable[Output]) -> Iterator[None]:
    """Lock several outputs within the block; a folder's lock covers its contents.

    Raises:
        RotationMergeError: another run is writing one.
    """
    paths = [os.path.abspath(output.path) for output in outputs if output.kind in (FILE, FOLDER)]
    with ExitStack() as stack:
        for path in dict.fromkeys(paths):
            if not any(path.startswith(os.path.join(folder, "")) for folder in paths):
                stack.enter_context(output_lock(path))
        yield
