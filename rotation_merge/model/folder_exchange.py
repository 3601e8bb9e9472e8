"""Replaces the model in a folder by another one, and restores the old one on failure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rotation_merge.errors import RotationMergeError
from rotation_merge.files.durable import sync, write_text
from rotation_merge.record import REPORT_FILE

WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
CONFIGS = ("config.json", "adapter_config.json")
"""Without one of these nothing in a directory loads; with both it loads as an adapter."""
JOURNAL = "exchange.json"
"""Journal of an exchange in progress: the moved files."""
OLD = "old"
HEADS = "heads"
"""Folder of checkpoints of one merged body under the head of each donor."""


@dataclass(frozen=True)
class FolderExchange:
    """Files to move from `staging` into `target`, and files to move out of the way, by relative paths.

    The config goes first and comes last, so that at no moment a mixture of two models, or of a model and an adapter,
    loads. Replaced files wait beside `staging`, with a journal of all moves.

    Attributes:
        incoming: files, links, and folders of which the target has none.
        outgoing: files in their places, and the weights and configs of the replaced model.
    """

    staging: str
    target: str
    incoming: list[str]
    outgoing: list[str]

    @classmethod
    def of(cls, staging: str, target: str) -> FolderExchange:
        """Plan an exchange from both folders; nothing is moved.

        Raises:
            RotationMergeError: a folder stands where a file is to come.
        """
        incoming, outgoing = list[str](), list[str]()
        for moves_in, moves_out in _moves(staging, target, ""):
            incoming += moves_in
            outgoing += moves_out
        return cls(staging, target, incoming, outgoing)

    @property
    def holder(self) -> str:
        """The folder of the journal and of the files moved out."""
        return os.path.dirname(self.staging)

    def run(self) -> None:
        """Move the old files out and the new ones in; on failure, restore everything.

        Raises:
            OSError: a move is impossible.
        """
        moves = {"incoming": self.incoming, "outgoing": self.outgoing, "staging": os.path.basename(self.staging)}
        write_text(os.path.join(self.holder, JOURNAL), json.dumps(moves))
        try:
            for path in sorted(self.outgoing, key=_is_no_config):
                self._move(self.target, path, self._old)
            for path in sorted(self.incoming, key=_is_config):
                self._move(self.staging, path, self.target)
            self._sync()
        except BaseException:
            self.undo()
            raise
        self._end()

    def undo(self) -> None:
        """Move everything back; may be called again if it was interrupted.

        Raises:
            RotationMergeError: something else stands there by now.
        """
        for path in sorted(self.incoming, key=_is_no_config):
            moved = not os.path.lexists(os.path.join(self.staging, path))
            if moved and os.path.lexists(os.path.join(self.target, path)):
                self._move(self.target, path, self.staging)
        for path in sorted(self.outgoing, key=_is_config):
            if os.path.lexists(os.path.join(self._old, path)):
                self._move(self._old, path, self.target)
        self._sync()
        self._end()

    def _end(self) -> None:
        os.remove(os.path.join(self.holder, JOURNAL))
        sync(self.holder)

    @property
    def _old(self) -> str:
        return os.path.join(self.holder, OLD)

    def _move(self, source: str, path: str, to: str) -> None:
        destination = os.path.join(to, path)
        if os.path.lexists(destination):
            problem = f"is in the way of '{path}', which must be restored from {source}"
            raise RotationMergeError(problem, where=destination, remedy="move it away and run again")
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        os.rename(os.path.join(source, path), destination)

    def _sync(self) -> None:
        """Flush the directory entries of all folders involved to disk."""
        for folder in {os.path.dirname(path) for path in (*self.incoming, *self.outgoing)}:
            for place in (self.target, self._old):
                if os.path.isdir(os.path.join(place, folder)):
                    sync(os.path.join(place, folder))


def interrupted(holder: str, target: str) -> FolderExchange | None:
    """The exchange that a killed process left unfinished; None if there is none.

    Raises:
        RotationMergeError: its journal is none that we write.
    """
    path = os.path.join(holder, JOURNAL)
    if not os.path.lexists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            moves = json.load(file)
        names = [*moves["incoming"], *moves["outgoing"], moves["staging"]]
        if not all(isinstance(name, str) and _is_inside(name) for name in names):
            raise ValueError("it names a path outside its folder")
        staging = os.path.join(holder, moves["staging"])
        return FolderExchange(staging, target, moves["incoming"], moves["outgoing"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a record of an interrupted write ({error})"
        raise RotationMergeError(problem, where=path, remedy="look at the files beside it, and move it away") from error


def _is_inside(path: str) -> bool:
    return bool(path) and not os.path.isabs(path) and os.pardir not in path.split(os.sep)


def _moves(staging: str, target: str, folder: str) -> Iterator[tuple[list[str], list[str]]]:
    """Files to move into a folder that both have, and files to move out; then the same for its subfolders."""
    names = sorted(os.listdir(os.path.join(staging, folder)))
    incoming, outgoing = list[str](), list[str]()
    for path in (os.path.join(folder, name) for name in names):
        new_is_folder, old_is_folder = _is_folder(os.path.join(staging, path)), _is_folder(os.path.join(target, path))
        if new_is_folder and old_is_folder:
            yield from _moves(staging, target, path)
            continue
        if old_is_folder:
            problem = "is a folder, where a file is to be written"
            raise RotationMergeError(problem, where=os.path.join(target, path), remedy="move it away")
        incoming.append(path)
        if os.path.lexists(os.path.join(target, path)):
            outgoing.append(path)
    if any(is_of_a_model(name) for name in names):
        outgoing_names = sorted(set(os.listdir(os.path.join(target, folder))) - set(names))
        outgoing += [os.path.join(folder, name) for name in outgoing_names if is_of_a_model(name)]
    if folder == HEADS:  # what an earlier merge wrote there is a model that nobody merged this time
        outgoing_names = sorted(set(os.listdir(os.path.join(target, folder))) - set(names))
        places = (os.path.join(folder, name) for name in outgoing_names)
        outgoing += [place for place in places if os.path.isfile(os.path.join(target, place, REPORT_FILE))]
    yield incoming, outgoing


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def is_of_a_model(name: str) -> bool:
    """Whether a file of this name is a config or weights of the model in its folder."""
    return name in CONFIGS or WEIGHTS.fullmatch(name) is not None


def _is_config(path: str) -> bool:
    return os.path.basename(path) in CONFIGS


def _is_no_config(path: str) -> bool:
    return not _is_config(path)
