"""The folder beside an output that holds the finished parts of an interrupted run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from rotation_merge.errors import RotationMergeError
from rotation_merge.files.outputs import UNFINISHED

MARK = "run.txt"


class Unfinished:
    """The folder `OUT.unfinished`, as a context manager: kept if the run is interrupted, removed when it ends.

    It is also removed on a user error, unless it was there before.

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
        if error is None or (self.new and isinstance(error, RotationMergeError)):
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def file(self, name: str) -> Path:
        return self.path / name

    def of(self, mark: str, *names: str) -> None:
        """Delete files (without names: all) that a run with another mark left."""
        if not self.is_of(mark):
            for path in [self.file(name) for name in names] if names else list(self.path.iterdir()):
                path.unlink(missing_ok=True)
            self.file(MARK).write_text(mark, encoding="utf-8")

    def is_of(self, mark: str) -> bool:
        """Whether the folder belongs to the run with this mark."""
        try:
            return self.file(MARK).read_text(encoding="utf-8") == mark
        except (OSError, ValueError):
            return False
