"""Independent pieces of work and their workers: threads, one device each, or (`cluster.py`) other machines.

Every executor runs the same work on the same pieces, and returns results in the order of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from rotation_merge.workers.threads import in_order


class Workload(Protocol):
    """The shared part of all pieces: for instance the opened models.

    For other processes it can be pickled: it then stores paths instead of contents, and opens the files on arrival.
    """

    @property
    def at_once(self) -> int:
        """The number of pieces that this process may run at once; 0: sequentially, on the calling thread."""

    @property
    def size(self) -> int:
        """Memory in bytes of a process that runs one piece after the other."""

    def on(self, device: str, home: str) -> Workload:
        """The same workload on another device, with results moved to `home`."""

    def piece(self, step: Any, item: Any) -> Any:
        """Do one piece.

        Args:
            step: the work; small, or needed for every piece.
            item: says which piece.
        """


class PieceExecutor(Protocol):
    """An executor: runs pieces of work."""

    apart: bool
    """Whether they are done by other processes, which share no memory with this one."""

    def each(self, work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
        """Results of the pieces, in order; as many run at once as fit."""


class LocalExecutor:
    """Runs pieces in this process, on as many threads as the workload allows."""

    apart = False

    def each(self, work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
        return in_order(lambda item: work.piece(step, item), items, work.at_once)


HERE = LocalExecutor()


class Devices:
    """Runs pieces on the devices of this machine, one at a time on each.

    Args:
        names: of the devices; results are moved to the first.
    """

    apart = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def each(self, work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
        free: SimpleQueue[Workload] = SimpleQueue()
        for name in self.names:
            free.put(work.on(name, self.names[0]))

        def one(item: Any) -> Any:
            chosen = free.get()
            try:
                return chosen.piece(step, item)
            finally:
                free.put(chosen)

        return in_order(one, items, len(self.names))
