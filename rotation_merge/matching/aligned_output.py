"""A donor aligned outside a merge: the aligned checkpoint, and alignment files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml
from mergekit.common import ModelReference, dtype_from_name

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.alignment_file import AlignmentFile, check_fingerprints, load_file, write_file
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import Pair, check_pair, residual_of
from rotation_merge.matching.report_rows import figures, recorded
from rotation_merge.matching.run import Run
from rotation_merge.model.card import metadata, notes, section, with_metadata
from rotation_merge.model.checkpoint import Check, write_checkpoint
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.hub import local_file
from rotation_merge.model.markdown import code, plain
from rotation_merge.model.origin import origins
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
    options = pair.options
    with named(str(pair.anchor.reference), str(pair.donor.reference)):
        alignment = match(pair.architecture, anchor, donor, options, progress, ledger=ledger)
    run.aligned(str(pair.donor.reference), alignment)
    report = pair_report(pair, run, yaml.safe_dump(asdict(options), sort_keys=False))
    return replace(alignment, report=report), report


def pair_report(pair: Pair, run: Run, recipe: str = "", base: str | None = None) -> MergeReport:
    """The report on the donor's alignment; the output counts as a fine-tune of the donor, or of `base`."""
    names = str(pair.anchor.reference), str(pair.donor.reference)
    marks = dict(zip(names, pair.fingerprints(), strict=True)) if pair.watched else {}
    for note in (*pair.warnings, *pair.notes, *pair.token_notes()):
        run.note(note)
    models = origins(model.reference for model in (pair.anchor, pair.donor) if model.files)
    return run.report(pair.anchor.reference, "none", recipe, marks, models, "finetune", base or names[1])


def aligned_view(pair: Pair, alignment: Alignment, dtype: torch.dtype | None = None) -> View:
    """The donor in the anchor's coordinates, as from `Alignment.apply`, without another check.

    Args:
        dtype: of its tensors; None: as the donor's.
    """
    anchor, donor = pair.sources
    biases = folded_tensors(pair.architecture, anchor, alignment.folded)
    view = replace(pair.donor, tensors=donor, architecture=pair.architecture, untie=pair.untie)
    return alignment.view_of(view, biases, dtype, unread=pair.donor.ignored)


def read_alignment(pair: Pair, path: str, untie: bool = False) -> Alignment:
    """Read the alignment of a pair from a file; see `read_file`."""
    return Alignment.of(read_file(pair, path, untie))


def read_file(pair: Pair, path: str, untie: bool, donor: View | None = None) -> AlignmentFile:
    """Read an alignment file of a pair.

    Args:
        donor: in the form in which its spaces meet the anchor's; None: as it is.

    Raises:
        AlignmentError: it cannot be read, or was made for other weights.
    """
    file = load_file(local_file(path), pair.architecture)
    anchor_mark, donor_mark = pair.fingerprints()
    check_fingerprints(file, path, anchor_mark, donor_mark, (str(pair.anchor.reference), str(pair.donor.reference)))
    options = NOTHING.with_residual(residual_of(file.transforms, file.folded))
    check_pair(pair.described, donor or pair.donor.as_filed, options, untie=untie)
    return file


def write_alignment(
    pair: Pair,
    alignment: Alignment,
    path: str,
    options: AlignConfig,
    half: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write all transforms to one file, with both fingerprints, options and figures.

    Args:
        facts: what else is to be kept at its head.
    """
    name = str(pair.donor.reference)
    with_records = alignment if alignment.records else recorded(pair.architecture, *pair.sources, alignment)
    run = Run()
    run.aligned(name, with_records)
    metadata = alignment_metadata(pair.anchor.reference, pair.donor.reference, asdict(options))
    metadata |= {"figures": figures(run.rows(), run.whole.get(name)), **(facts or {})}
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    content = AlignmentFile(alignment.transforms, alignment.folded, pair.basis(alignment.folded), metadata)
    write_file(path, content, torch.float16 if half else torch.float64)


def alignment_metadata(anchor: ModelReference, donor: ModelReference, options: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an alignment file: both models, the options, the versions."""
    return {
        "anchor": str(anchor),
        "donor": str(donor),
        "models": origins([anchor, donor]),
        "options": dict(options),
        "versions": versions(),
    }


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
    view = aligned_view(pair, alignment, dtype_from_name(storage.dtype))
    report = alignment.report or pair_report(pair, Run())
    report = replace(report, notes=[*report.notes, *view.notes])
    text = card(pair, report, os.path.basename(out))
    write_checkpoint(view, report, text, out, storage, progress, check)
    return view


def aligned_model(pair: Pair, alignment: Alignment, untie: bool) -> Any:
    """Load the aligned donor into memory, in float32, as `write_aligned` would write it."""
    view, donor = aligned_view(pair, alignment), pair.donor
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
