"""Configs that count more layers or experts than there are tensors: refused before anything is laid out."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import ALL
from tiny_models import make as model_of

from rotation_merge import RotationMergeError, average

ENDLESS = 400_000_000


def by_name(config: Any, entry: str = "") -> Iterator[str]:
    """The entries of a config that count layers or experts, by their paths."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from by_name(value, f"{entry}{name}.")
        elif type(value) is int and value > 0 and re.fullmatch(r"(n|.*_layers?|.*_experts|depth)", name):
            yield entry + name


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("family", sorted({case.family for case in ALL}))
def test_no_architecture_is_laid_out_beyond_its_tensors(family: str) -> None:
    """In Python, too: layers and experts are counted before they are made."""
    model = model_of(next(case for case in ALL if case.family == family))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    refused = []
    for entry in by_name(config):
        spoilt = copy.deepcopy(config)
        part = spoilt
        for step in entry.split(".")[:-1]:
            part = part[step]
        part[entry.rpartition(".")[2]] = ENDLESS
        try:
            average([(model.state_dict(), spoilt)])
        except RotationMergeError as error:
            refused.append(str(error))
    assert any(str(ENDLESS) in line for line in refused) or family == "nemotron_h"  # which lists its layers
