"""Checks that an adapter was trained on the model it is applied to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from mergekit.common import ModelPath

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.contents import ADAPTER_CONFIG, read_json
from rotation_merge.model.folder import place_of
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.nearness import Nearness, nearness
from rotation_merge.model.view import View
from rotation_merge.record import REPORT_FILE

Open = Callable[[str], View]
"""Opens a stored model by its name."""

SAME = 0.9999
"""Least cosine of two copies of one model, in whatever types they are stored."""

OWN_BASE = "put it on its own base; if this is a copy of it, correct 'base_model_name_or_path' in adapter_config.json"


def check_base(adapter: Adapter, bases: Iterable[View], label: str, open_model: Open, remedy: str = OWN_BASE) -> None:
    """Refuse an adapter that was trained on none of some bases.

    The criterion is the report beside it (if it was carried), else the weights of the base in its config, else that
    base's name.

    Args:
        label: the adapter's name in errors.
        open_model: opens the base that the adapter's config names, where it is at hand.

    Raises:
        CheckpointError: names its base and the others.
    """
    name, bases = adapter.base, list(bases)
    if not name:
        return
    beside = os.path.join(adapter.path, REPORT_FILE)
    marks = read_json(beside).get("fingerprints") if os.path.isfile(beside) else None
    mark = marks.get(name) if isinstance(marks, dict) else None
    base_names = " or ".join(base.name for base in bases)
    if mark is not None and mark not in (base.fingerprint for base in bases):
        problem = f"was carried to {name}, whose weights were not those of {base_names}"
        raise CheckpointError(problem, where=label, remedy=remedy)
    if mark is None and not any(_is_called(base, str(name), open_model) for base in bases):
        raise CheckpointError(f"is an adapter of {name}, not of {base_names}", where=label, remedy=remedy)


def on_base(name: str, base: str | None = None) -> str:
    """An adapter's folder without a base as `BASE+ADAPTER`; any other name unchanged.

    Args:
        base: it stands on this one; None: on the one that its config names, a folder or GGUF, a model in the hub's
            cache, or a folder or GGUF of that name beside the adapter.

    Raises:
        CheckpointError: that base is not here.
    """
    config = os.path.join(name, ADAPTER_CONFIG)
    if not os.path.isfile(config) or os.path.isfile(os.path.join(name, "config.json")):
        return name
    if base is not None:
        return f"{base}+{name}"
    stated = str(read_json(config).get("base_model_name_or_path") or "")
    beside = os.path.join(os.path.dirname(os.path.abspath(name)), os.path.basename(stated))
    for place in (stated, beside) if stated else ():
        if os.path.isfile(os.path.join(place, "config.json")) or (os.path.exists(place) and is_gguf(place)):
            return f"{os.path.abspath(place)}+{name}"
    if not os.path.exists(stated) and place_of(ModelPath(path=stated)) is not None:
        return f"{stated}+{name}"
    problem = f"is an adapter of {stated or 'a base that it does not name'}, which is not on this machine"
    remedy = "name its folder as 'base', or merge adapters without a base ('rotation-merge lora')"
    raise CheckpointError(problem, where=name, remedy=remedy)


def _is_called(base: View, name: str, open_model: Open) -> bool:
    """Whether a base is the model of this name: the same folder, the same weights, or a folder of the same name."""
    path = str(base.reference.model.path)
    if os.path.realpath(name) == os.path.realpath(path) or name == path:
        return True
    near = Nearness()
    with suppress(RotationMergeError):  # such as a folder without weights
        place = place_of(ModelPath(path=name))
        near = near if place is None else nearness(base.architecture, base.tensors, open_model(place).tensors)
    return near.least >= SAME if near.cosines else os.path.basename(name) == os.path.basename(path)
