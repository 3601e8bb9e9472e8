"""Escapes names and words for Markdown, so that none becomes a cell, code, tag or link."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rotation_merge.errors import printable


def plain(text: object) -> str:
    """A text outside of code, in one line; in tables, too."""
    escaped = re.sub(r"[\\`*\[\]|]", r"\\\g<0>", _line(text).replace("&", "&amp;"))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def code(text: object) -> str:
    """A text as code, in one line; in tables, too."""
    line = _line(text)
    return f"<code>{encoded(text)}</code>" if not line or re.search(r"[`|]", line) else f"`{line}`"


def encoded(text: object) -> str:
    """A text as HTML that no Markdown around it can change."""
    return re.sub(r"[^\w ./-]", lambda match: f"&#{ord(match[0])};", _line(text))


def _line(text: object) -> str:
    return " ".join(printable(str(text)).split())


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; cells are Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]


def prose(text: str, names: Iterable[str]) -> str:
    """Our own text, with names unescaped or in backticks.

    Args:
        names: all that may stand there and that are not ours, such as those of models.
    """
    known = "|".join(re.escape(name) for name in sorted({*names} - {""}, key=len, reverse=True))
    parts = re.split(rf"(`(?:{known})`|{known})", text) if known else [text]
    return "".join(_name(part) if number % 2 else _words(part) for number, part in enumerate(parts))


def _name(text: str) -> str:
    return code(text[1:-1]) if len(text) > 2 and text[0] == text[-1] == "`" else plain(text)


def _words(text: str) -> str:
    """Our own Markdown, without tags and links outside of code."""
    parts = re.split(r"(`[^`]*`)", printable(text))
    parts[::2] = (part.replace("<", "&lt;").replace("](", "]\\(") for part in parts[::2])
    return "".join(parts)
