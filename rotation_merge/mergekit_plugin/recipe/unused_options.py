"""Options of matching that would do nothing, because alignment files move what they speak of."""

from __future__ import annotations

from collections.abc import Collection

from rotation_merge.mergekit_plugin.recipe.document import Document, Path
from rotation_merge.mergekit_plugin.recipe.names import OPTIONS
from rotation_merge.mergekit_plugin.recipe.places import MergedTogether, at, groups, reference

MATCHING = (*OPTIONS, "preset", "match_on")
"""Parameters that only say how donors are matched."""


def check_idle(document: Document, delegate_names: Collection[str]) -> None:
    """Collect options beside `alignment`, and options for all donors where files move every one of them.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.

    Args:
        delegate_names: parameters of the delegate, which reads those of the same name.
    """
    base = reference(document.value.get("base_model"))
    all_groups = list(groups(document.value))
    moved = {entry: _moved(group, i) for group in all_groups for i, entry in enumerate(group.entries)}
    donors = {e for group in all_groups for e, model in zip(group.entries, group.models, strict=True) if model != base}
    for entry in sorted(donors, key=str):
        if moved[entry]:
            _fault(document, (*entry, "parameters"), delegate_names, "the file under 'alignment' moves this donor")
    for scope in sorted({path for entry in donors for path in _above(entry)}, key=str):
        if all(moved[entry] for entry in donors if entry[: len(scope)] == scope):
            _fault(document, (*scope, "parameters"), delegate_names, "files under 'alignment' move every donor")


def _above(entry: Path) -> list[Path]:
    """The parts of a recipe whose parameters hold for an entry: its slice, its module, the whole."""
    return [entry[:length] for length in range(len(entry) - 1)]


def _moved(group: MergedTogether, number: int) -> bool:
    """Whether a file moves a model, and nothing of it is matched."""
    if group.settings[number].get("alignment") in (None, False, "none"):
        return False
    spans = [at(group.sources[i], ("layer_range",)) for i in range(len(group.sources))]
    return all(span == spans[0] for span in spans)


def _fault(document: Document, path: Path, delegate_names: Collection[str], why: str) -> None:
    for name in at(document.value, path) or {}:
        if name in MATCHING and name not in delegate_names:
            document.fault((*path, str(name)), f"'{name}' does nothing: {why}", "leave out one of the two")
