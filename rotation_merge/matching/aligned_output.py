"""A donor aligned outside a merge: opening two checkpoints, writing the aligned one as a normal checkpoint."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import yaml
from mergekit.common import dtype_from_name

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.open_pair import Pair
from rotation_merge.matching.run import Run
from rotation_merge.model.card import metadata, notes, section, with_metadata
from rotation_merge.model.checkpoint import Check, write_checkpoint
from rotation_merge.model.markdown import code, plain
from rotation_merge.model.view import View, stored_dtype
from rotation_merge.model.writing import StorageOptions, untied
from rotation_merge.record import MergeReport, versions
from rotation_merge.run.functions import load
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress


def match_pair(
    pair: Pair, progress: Progress | None = None, match: Match = match_model, ledger: Ledger = NOWHERE
) -> tuple[Alignment, MergeReport]:
    """Match the donor to the anchor and attach the report to the alignment.

    Args:
        ledger: store of intermediate results, to resume from.
    """
    anchor, donor = pair.matched
    run = Run()
    options = pair.checked.options
    with named(str(pair.anchor.reference), str(pair.donor.reference)):
        alignment = match(pair.architecture, anchor, donor, options, progress, ledger=ledger)
    run.aligned(str(pair.donor.reference), alignment)
    report = pair.report(run, yaml.safe_dump(asdict(options), sort_keys=False))
    return replace(alignment, report=report), report


def write_aligned(
    pair: Pair,
    alignment: Alignment,
    out: str,
    storage: StorageOptions,
    progress: Progress | None = None,
    check: Check | None = None,
) -> View:
    """Write the aligned donor as a normal checkpoint: weights, config, tokenizer, card and report.

    Nothing is left behind if writing fails. The report is the alignment's, or empty if nothing was matched.
    """
    view = pair.aligned(alignment, dtype_from_name(storage.dtype))
    report = alignment.report or pair.report(Run())
    report = replace(report, notes=[*report.notes, *view.notes])
    text = card(pair, report, os.path.basename(out))
    write_checkpoint(pair.donor, view.blocks(), report, text, out, storage, progress, check, view.left_out)
    return view


def aligned_model(pair: Pair, alignment: Alignment, untie: bool) -> Any:
    """Load the aligned donor into memory, in float32, as `write_aligned` would write it."""
    view, donor = pair.aligned(alignment), pair.donor
    tensors = view.state_dict()
    tensors |= {name: donor[name] for name in donor.names if name not in tensors and name not in view.left_out}
    state = {
        name: tensor.to("cpu", stored_dtype(tensor, donor.stored_dtypes.get(name))) for name, tensor in tensors.items()
    }
    changed = dict(donor.changed)
    if untie:
        changed = {**changed, **{k: v for k, v in untied(donor.config).items() if v != donor.config.get(k)}}
    return load(str(donor.reference), state=state, changed=changed)


def card(pair: Pair, report: MergeReport, name: str) -> str:
    """A model card for an aligned donor."""
    donor, anchor = str(pair.donor.reference), str(pair.anchor.reference)
    before, after = report.relative_distances(donor)
    body = (
        f"# {name}\n\n"
        f"This is {code(donor)} in the coordinates of {code(anchor)}. Its outputs are those of {code(donor)}, up to "
        f"rounding; rotation_merge {versions().get('rotation-merge', '')} rewrote its weights to line up with the "
        "anchor's.\n\n"
        f"Relative distance to the anchor over the matched tensors: {before:.4g} before, {after:.4g} after. "
        f"{plain(report.verdict(donor)[:1].upper() + report.verdict(donor)[1:])}.\n\n"
        f"Options:\n\n```yaml\n{report.recipe}```\n"
        + "".join(f"\n{note}\n" for note in notes(report))
        + f"\nPer space: `rotation_merge.json`.\n\n{section(report, name, _class(pair))}"
    )
    return with_metadata(metadata(report), body)


def _class(pair: Pair) -> str | None:
    classes = pair.donor.config.get("architectures")
    return str(classes[0]) if classes else None
