"""`save_alignment`: writes a merge's transforms as `rotation-merge align --alignment` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict

from rotation_merge.errors import RecipeError
from rotation_merge.matching.aligned_output import alignment_metadata
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.alignment_file import needed_folds
from rotation_merge.matching.basis import Basis, Identity, hidden_biases
from rotation_merge.matching.pair import Pair
from rotation_merge.matching.report_rows import figures
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.recipe import ALIGNMENT, KEPT_BY, numbered, title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.forms import translated
from rotation_merge.model.view import View

LOG = logging.getLogger(__name__)


def keep_alignments(session: Session, folder: str) -> None:
    """Write the files of `save_alignment`: one for each moved donor, the second called NAME-2.

    Args:
        folder: the merged model's.

    Raises:
        RecipeError: a file of the merged model has that name.
    """
    run, donors, setting = session.run, session.donors, session.recipe.value("save_alignment")
    if run.kept_transforms is None or donors is None:
        return
    first = os.path.join(folder, ALIGNMENT if setting is True else str(setting))
    if os.path.exists(first):
        problem = f"'{setting}' is a file of the merged model"
        raise RecipeError(problem, where="parameters.save_alignment", remedy="name another file")
    os.makedirs(os.path.dirname(first), exist_ok=True)
    moved = {title(model, donor.origin): donor.checked for model, donor in donors.found.items()}
    pairs = {name: pair for name, pair in moved.items() if name in run.kept_transforms and pair is not None}
    for number, (name, pair) in enumerate(pairs.items(), 1):
        path, transforms = numbered(first, number)[-1], run.kept_transforms[name]
        folded = needed_folds(transforms, pair.architecture, donors.folded)
        if name in run.alignment_files:
            metadata = {**run.alignment_files[name].metadata}
        else:
            metadata = alignment_metadata(pair.anchor.reference, pair.donor.reference, asdict(pair.options))
            rows = [row for row in run.rows() if row.donor == name]
            metadata["figures"] = figures(rows, run.whole.get(name))
        alignment = Alignment(transforms, folded, basis=_basis(run, pair, folded))
        alignment.save(path, {**metadata, KEPT_BY: "save_alignment"})
        LOG.info("transforms of %s kept in %s", name, path)


def _basis(run: Run, pair: Pair, folded: Sequence[str]) -> Basis:
    """What the file holds of the two models."""
    anchor, donor, architecture = pair.anchor, pair.donor, pair.architecture
    tensors = translated(donor.tensors, donor.architecture, architecture)
    return Basis(
        anchor.config,
        anchor.shapes,
        pair.untie,
        _identity(run, anchor),
        _identity(run, donor),
        hidden_biases(architecture, anchor.as_filed.tensors, folded),
        pair.rows,
        donor_biases=hidden_biases(architecture, tensors, folded),
    )


def _identity(run: Run, model: View) -> Identity:
    """Identity of a model. Tensors that the merge did not read are read now."""
    mark = run.marks.setdefault(str(model.reference), Fingerprint())
    mark.complete(model.architecture.named(), model.as_filed.tensors)
    return Identity(str(model.reference), mark.hexdigest(model.as_filed.config), dict(mark))
