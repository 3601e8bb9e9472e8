"""The text that the small Llamas are trained on: files that come with Python or GCC, every tenth held out."""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

TORCH = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
SKIPPED = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__pycache__"}


def files(domain: str) -> list[bytes]:
    """All documents of one domain: python, english, c, cpp, torch or c10.

    python: the standard library without installed packages, tests, `encodings` (tables) and `pydoc_data` (English);
    english: the help texts of `pydoc_data.topics`, each paragraph once (topics repeat each other), twenty a document;
    c: CPython's own headers; cpp: the headers of GCC's C++ library in /usr/include/c++, those of the newest version;
    torch, c10: the sources of torch.nn, and the headers of torch's C++ library c10.
    """
    if domain == "english":
        from pydoc_data.topics import topics

        repeated = (part.strip("\n") for name in sorted(topics) for part in topics[name].split("\n\n"))
        paragraphs = list(dict.fromkeys(part for part in repeated if part))
        blocks = [paragraphs[start : start + 20] for start in range(0, len(paragraphs), 20)]
        return ["".join(part + "\n\n" for part in block).encode() for block in blocks]
    root, pattern = {
        "python": (Path(sysconfig.get_path("stdlib")), "*.py"),
        "c": (Path(sysconfig.get_path("include")), "*.h"),
        "torch": (TORCH / "nn", "*.py"),
        "c10": (TORCH / "include" / "c10", "*.h"),
        "cpp": (max(Path("/usr/include/c++").glob("*"), key=lambda p: int(p.name), default=Path("absent")), "*"),
    }[domain]
    names = sorted(path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
    return [(root / name).read_bytes() for name in names if not SKIPPED & set(name.parts)]


def documents(domain: str) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out documents of one domain: every tenth is held out."""
    everything = files(domain)
    return [document for index, document in enumerate(everything) if index % 10 != 9], everything[9::10]


def training_tokens(domain: str) -> Tensor:
    """All training documents of a domain, a token a byte."""
    return torch.frombuffer(bytearray(b"".join(documents(domain)[0])), dtype=torch.uint8)


def training_text(domain: str, characters: int) -> bytes:
    """The beginnings of training documents of a domain, in a seeded order."""
    train, _ = documents(domain)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    share = max(2000, characters // 100)
    return b"".join(train[i][:share] for i in order)[:characters]


def in_windows(text: bytes, length: int = 128) -> Tensor:
    """Bytes in consecutive windows, (windows, length)."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return ids[: len(ids) // length * length].view(-1, length)


def excerpt(held_out: list[bytes], size: int = 48_000, pieces: int = 12) -> bytes:
    """About `size` bytes: whole lines from the middle of documents evenly spread over `held_out`."""
    chosen = [one for one in held_out if len(one) > 1000]
    chosen = [chosen[index * len(chosen) // pieces] for index in range(pieces)] if len(chosen) > pieces else chosen
    share = 0
    while sum(min(len(one), share) for one in chosen) < size and share < max(map(len, chosen)):
        share += 16
    return b"".join(_middle(one, share) for one in chosen)[:size]


def unseen(held_out: list[bytes], train: list[bytes], length: int = 96) -> list[bytes]:
    """Held-out documents that repeat no stretch of `length` bytes, in steps of `length`, of the training documents."""
    seen = b"\0".join(train)
    return [
        one for one in held_out if not any(one[i : i + length] in seen for i in range(0, len(one) - length, length))
    ]


def _middle(document: bytes, share: int) -> bytes:
    if len(document) <= share:
        return document
    start = document.rfind(b"\n", 0, (len(document) - share) // 2 + 1) + 1
    end = document.rfind(b"\n", start, start + share) + 1
    return document[start:end]
