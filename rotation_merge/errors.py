"""Exceptions with a message of one line: problem, place, remedy."""

from __future__ import annotations

import difflib
import errno
import os
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""


class RotationMergeError(Exception):
    """Base of all errors of this package.

    Args:
        what: the problem, with the name of the thing.
        where: file, model, tensor or recipe entry it stands in.
        remedy: what to do.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        parts = [f"{where}: {what}" if where else what]
        if remedy:
            parts.append(remedy)
        super().__init__(printable(" ".join("; ".join(parts).split())))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), where=self.where, remedy=self.remedy), (self.what,)


class RecipeError(RotationMergeError):
    """The recipe is wrong."""


class ArchitectureError(RotationMergeError):
    """An architecture file is wrong, or a model's architecture is not supported."""


class CheckpointError(RotationMergeError):
    """A checkpoint is missing, unreadable, incomplete or of the wrong shape."""


class AlignmentError(RotationMergeError):
    """These tensors cannot be matched, or the alignment cannot be applied to them."""


class DataError(RotationMergeError):
    """The data cannot be read or used by the model."""


class StatisticsError(RotationMergeError):
    """Statistics of a model are missing, unreadable, of another model, or unusable."""


class SpaceError(RotationMergeError):
    """A file cannot be written, as the disk is full or refuses it; what is done stays, and the next run resumes."""


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, turn the direction of writing, or stand for bytes that are no text."""


def printable(text: str) -> str:
    """Escapes control characters in a text, except line breaks and tabs."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def no_space(error: object) -> bool:
    """Whether an error of the system, torch or safetensors means a full disk."""
    words = ("No space left", "os error 28", "Os { code: 28,", ". unexpected pos ")
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(word in str(error) for word in words)


def short(error: object) -> str:
    """The message of another library's error, shortened to part of a line."""
    lacks = isinstance(error, KeyError) and str(error).strip("'").isidentifier()
    return textwrap.shorten(f"{error} is missing" if lacks else str(error), 160, placeholder=" ...")


FEW, SHOWN = 20, 8
"""Known words that a remedy lists; names that a line lists."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy with the closest known word; without a close one all words, or the closest three of many."""
    words = sorted(known)
    if close := difflib.get_close_matches(name, words, n=1, cutoff=0.6):
        return f"did you mean '{close[0]}'?"
    if len(words) <= FEW:
        return f"known: {', '.join(words)}" if words else "none exists here"
    return f"the nearest are {', '.join(map(repr, difflib.get_close_matches(name, words, n=3, cutoff=0.0)))}"


def nearest_path(path: str, otherwise: str = "check the path", of: Callable[[str], bool] = os.path.isdir) -> str:
    """A remedy with the closest folder beside a path that is not there, or another remedy.

    Args:
        of: says of a path whether it may be meant.
    """
    parent, name = os.path.split(path.rstrip("/"))
    folder = parent or os.curdir
    entries = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(name, [entry for entry in entries if of(os.path.join(folder, entry))], n=1)
    return f"did you mean '{os.path.join(folder, close[0])}'?" if close else otherwise


def named(words: Iterable[str]) -> str:
    """Names in one line: the first few, then the number of the others."""
    items = list(words)
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def not_written(names: Iterable[str]) -> str:
    """A note on tensors that are not written."""
    return f"Left out, because the model does not read them: {named(names)}."
