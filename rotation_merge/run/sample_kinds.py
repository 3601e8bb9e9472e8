"""Kinds of samples in words, the names of columns, and the options of reading them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic.dataclasses import dataclass

from rotation_merge.config import Config, Count, Length, option
from rotation_merge.errors import DataError
from rotation_merge.files import WORD
from rotation_merge.model.hub import check_file

KINDS = (
    "text (.txt, .md, .py ...), a table (.csv, .tsv, .parquet) with a header, .jsonl or .json, .npz, .safetensors, "
    "a folder of images, a directory written by datasets' save_to_disk, or demo:NAME"
)

SOURCES = SELF, SYNTHETIC = "self", "synthetic"
"""Samples that need no file: text that a language model writes, and images made of noise."""

DEMO = {f"demo:{name}": name for name in ("digits", "python", "english", "c")}
"""Samples that come with the package."""

SAMPLES = 64
"""Samples that are made where no number is given."""

TEXTS = (
    ("text", "text_pair"), ("text",), ("sentence1", "sentence2"), ("text1", "text2"), ("text_a", "text_b"),
    ("a", "b"), ("premise", "hypothesis"), ("query", "passage"), ("question", "answer"), ("question1", "question2"),
    ("sentence",), ("content",), ("review",), ("question",), ("document",), ("tweet",), ("comment",),
)  # fmt: skip
"""Names of a column of texts, or of two; the first that are all there count."""

IMAGES = ("image", "img")
LABELS = ("labels", "label", "score", "class")


def columns(names: Iterable[str]) -> dict[str, str]:
    """The columns that are `text` and `text_pair`, or `image`, and `label`, by their names."""
    known = {name.strip().lower(): name for name in names}
    texts = next((texts for texts in TEXTS if known.keys() >= set(texts)), ())
    image, label = (next((name for name in kind if name in known), "") for kind in (IMAGES, LABELS))
    roles = {**dict(zip(("text", "text_pair"), texts, strict=False)), "image": "" if texts else image, "label": label}
    return {role: known[name] for role, name in roles.items() if name}


def check_source(source: str) -> None:
    """Refuse a source of samples that is neither a known word, nor here, nor on the hub.

    Raises:
        DataError: names it, and the expected content.
    """
    if source.startswith("demo:") and source not in DEMO:
        problem = f"the demo has no data '{source.removeprefix('demo:')}'"
        raise DataError(problem, remedy=f"known: {', '.join(DEMO)}")
    if not WORD.fullmatch(source):
        check_file(source, f"give {KINDS}", DataError)


@dataclass(frozen=True)
class ReadingConfig(Config):
    """Options of reading samples."""

    limit: Count | None = option(None, "largest number of examples of each data set")
    batch_size: Count = option(32, "examples in a batch")
    length: Length = option(128, "tokens in a window of text")
