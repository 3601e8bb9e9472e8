"""Kinds of samples in words."""

KINDS = (
    "text (.txt, .md, .py ...), a table (.csv, .tsv) with a header, .jsonl or .json, .npz, .safetensors, a folder of "
    "images, a directory written by datasets' save_to_disk, or demo:NAME"
)

SOURCES = ("self", "synthetic")
"""Samples that need no file: text that a language model writes, and images made of noise."""

STATISTICS = ("gram", "fisher", "moments", "kfac")
"""Kinds of statistics that `measure` writes."""

SAMPLES = 64
"""Samples that are made where no number is given."""
