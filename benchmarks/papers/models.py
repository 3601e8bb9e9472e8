"""Checkpoints as weights with their architecture, and what alignments make of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from rotation_merge import AlignConfig
from rotation_merge.architecture import Architecture, resolve
from rotation_merge.matching.alignment import Alignment, aligned_source
from rotation_merge.matching.match import match_model

State = dict[str, Tensor]


@dataclass
class Model:
    """A trained checkpoint."""

    name: str
    state: State
    architecture: Architecture

    def folded(self, alignment: Alignment) -> State:
        return self.moved(Alignment({}, alignment.folded))

    def moved(self, alignment: Alignment, anchor: State | None = None) -> State:
        """As `align` writes it: with the anchor's biases where softmax cannot see them; without anchor its own."""
        moved = aligned_source(self.architecture, self.state, alignment, anchor)
        return {name: moved[name] for name in self.state}


def open_model(folder: Path) -> Model:
    state = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
    config = AutoConfig.from_pretrained(folder)
    values = {**json.loads((folder / "config.json").read_text()), **config.to_dict()}
    return Model(folder.name, state, resolve(values, list(state), folder.name))


def distance(a: State, b: State) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a)) ** 0.5


def align(anchor: Model, donor: Model, options: AlignConfig | None) -> Alignment:
    if options is None:
        return Alignment({})
    return match_model(anchor.architecture, anchor.state, donor.state, options)
