"""A donor aligned outside a merge: matched with a report, read from a file, and written as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import yaml
from mergekit.common import dtype_from_name

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model, recorded
from rotation_merge.matching.pair import Pair
from rotation_merge.matching.run import Run
from rotation_merge.model.card import notes, origins, updated_card
from rotation_merge.model.checkpoint import write_checkpoint
from rotation_merge.model.markdown import code, plain
from rotation_merge.model.view import View
from rotation_merge.model.writing import SHARD_SIZE
from rotation_merge.record import MergeReport, versions
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress


def match_pair(
    pair: Pair, progress: Progress | None = None, match: Match = match_model, ledger: Ledger = NOWHERE
) -> Alignment:
    """Match the donor to the anchor; the alignment has a report, and a basis.

    Args:
        ledger: store of intermediate results, to resume from.
    """
    with named(str(pair.anchor.reference), str(pair.donor.reference)):
        alignment = match(pair.architecture, *pair.matched, pair.options, progress, ledger=ledger)
    return reported(pair, alignment)


def reported(pair: Pair, alignment: Alignment) -> Alignment:
    """The alignment of a pair with its report, and what applying and writing it need of both models."""
    run, name = Run(), str(pair.donor.reference)
    if alignment.transforms and not alignment.rows:
        alignment = recorded(pair.architecture, *pair.sources, alignment)
    run.aligned(name, alignment)
    report = pair_report(pair, run, yaml.safe_dump(asdict(pair.options), sort_keys=False))
    return replace(alignment, report=report, metadata=file_metadata(pair), basis=pair.basis())


def file_metadata(pair: Pair) -> dict[str, Any]:
    """What a file of a pair's alignment keeps beside the transforms."""
    return {
        "anchor": str(pair.anchor.reference),
        "donor": str(pair.donor.reference),
        "models": origins(model.reference for model in (pair.anchor, pair.donor) if model.files),
        "options": asdict(pair.options),
        "versions": versions(),
    }


def pair_report(pair: Pair, run: Run, recipe: str = "", base: str | None = None) -> MergeReport:
    """The report on the donor's alignment; the output counts as a fine-tune of the donor, or of `base`."""
    models = pair.anchor, pair.donor
    marks = {str(model.reference): model.fingerprint for model in models} if pair.watched else {}
    for note in (*pair.warnings, *pair.notes):
        run.note(note)
    parts, base = origins(model.reference for model in models if model.files), base or str(pair.donor.reference)
    facts = {"fingerprints": marks, "models": parts, "relation": "finetune", "base": base}
    return run.report(pair.anchor.reference, "none", recipe, **facts)


def write_aligned(
    pair: Pair,
    alignment: Alignment,
    out: str,
    dtype: str | None = None,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
    check: Callable[[str], Any] | None = None,
) -> tuple[View, Any]:
    """Write the aligned donor as a normal checkpoint: weights, config, tokenizer, card and report.

    Nothing is left behind if writing fails. Returns what was written, and what the check found.
    """
    view = alignment.apply(pair.placed(pair.donor.as_filed), dtype_from_name(dtype), strict=False)
    report = replace(alignment.known_report, notes=[*alignment.known_report.notes, *view.notes])
    text = card(pair, report, os.path.basename(out))
    return view, write_checkpoint(view, report, text, out, shard_size, progress, check)


def card(pair: Pair, report: MergeReport, name: str) -> str:
    """A model card for an aligned donor."""
    donor, anchor = str(pair.donor.reference), str(pair.anchor.reference)
    before, after = report.relative_distances(donor)
    text = (
        f"# {name}\n\n"
        f"This is {code(donor)} in the coordinates of {code(anchor)}. Its outputs are those of {code(donor)}, up to "
        f"rounding; rotation_merge {versions().get('rotation-merge', '')} rewrote its weights to line up with the "
        "anchor's.\n\n"
        f"Relative distance to the anchor over the matched tensors: {before:.4g} before, {after:.4g} after. "
        f"{plain(report.verdict(donor)[:1].upper() + report.verdict(donor)[1:])}.\n\n"
        f"Options:\n\n```yaml\n{report.recipe}```\n"
        + "".join(f"\n{note}\n" for note in notes(report))
        + "\nPer space: `rotation_merge.json`.\n"
    )
    return updated_card(text, report, name, pair.donor.config)
