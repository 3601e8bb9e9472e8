"""Data that the demo's checkpoints are evaluated on: digits for the ViTs, bytes of text for the Llamas."""

from pathlib import Path

import torch
from torch import Tensor

from rotation_merge.run.sample_kinds import DEMO

TEXTS = Path(__file__).parent / "texts"
CHECKPOINTS = Path(__file__).parent / "checkpoints"
NAMES = tuple(name for name in DEMO.values() if name != "digits")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 8x8 digits, split 70/30 and stratified by class (random_state 0); no download.

    Returns:
        train_pixels, train_labels, test_pixels, test_labels: pixels float32, shape (1257, 1, 8, 8) and (540, 1, 8, 8),
        in [-0.5, 0.5]; labels int64, shape (1257,) and (540,).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    pixels, labels = torch.as_tensor(bunch.images).float()[:, None] / 16 - 0.5, torch.as_tensor(bunch.target).long()
    train, test = train_test_split(range(len(labels)), test_size=0.3, stratify=bunch.target, random_state=0)
    return pixels[train], labels[train], pixels[test], labels[test]


def text(name: str) -> Tensor:
    """Bytes of one held-out text, in the order of the file.

    Args:
        name: one of ``NAMES``.

    Returns:
        Token ids (token id = byte), int64, shape (length,).
    """
    return torch.frombuffer(bytearray((TEXTS / f"{name}.txt").read_bytes()), dtype=torch.uint8).long()
