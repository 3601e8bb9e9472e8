"""`save_alignment`: writes a merge's transforms as `rotation-merge align --alignment` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict

from mergekit.common import ModelReference

from rotation_merge.architecture import resolve
from rotation_merge.errors import RecipeError
from rotation_merge.matching.aligned_output import alignment_metadata
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.alignment_file import needed_folds
from rotation_merge.matching.basis import Basis, Identity, hidden_biases
from rotation_merge.matching.report_rows import figures
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.mergekit_plugin.recipe import ALIGNMENT, KEPT_BY, numbered, title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.forms import translated

LOG = logging.getLogger(__name__)


def check_keepable(session: Session, blocks: Iterable[OutputBlock]) -> None:
    """Refuse `save_alignment` for alignments that no file can store.

    Raises:
        RecipeError: a donor's layer is moved to the coordinates of another layer of the anchor.
    """
    if session.run.kept_transforms is None:
        return
    for out in blocks:
        for model, block in out.sources.items():
            if block.index != out.anchor.index:
                raise RecipeError(
                    f"layer {block.index} of {model} meets layer {out.anchor.index} of {session.recipe.base}, but "
                    "an alignment file cannot hold layers of different numbers",
                    where="parameters.save_alignment",
                    remedy="leave it out",
                )


def keep_alignments(session: Session, folder: str) -> list[str]:
    """Write the files of `save_alignment`: one for each moved donor, the second called NAME-2.

    Args:
        folder: the merged model's.

    Returns:
        The files.

    Raises:
        RecipeError: a file of the merged model has that name.
    """
    transforms, donors = session.run.kept_transforms, session.donors
    if transforms is None or donors is None:
        return []
    base = session.models[session.recipe.base]
    architecture = resolve(base.config, base.names, str(base.reference), keep_unknown=True, untie=session.recipe.untie)
    setting = session.recipe.value("save_alignment")
    path = os.path.join(folder, ALIGNMENT if setting is True else str(setting))
    if os.path.exists(path):
        problem = f"'{setting}' is a file of the merged model"
        raise RecipeError(problem, where="parameters.save_alignment", remedy="name another file")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files: list[str] = []
    for model, donor in donors.found.items():
        name = title(model, donor.origin)
        if name not in transforms:
            continue
        files.append(numbered(path, len(files) + 1)[-1])
        matched = donor.origin or model
        folded = needed_folds(transforms[name], architecture, donors.folded)
        alignment_file = session.run.alignment_files.get(name)
        options = asdict(donor.checked.options) if donor.checked is not None else {}
        rows = [row for row in session.run.rows() if row.donor == name]
        measured = {"figures": figures(rows, session.run.whole.get(name))}
        metadata = (
            alignment_file.metadata
            if alignment_file
            else {**alignment_metadata(base.reference, matched, options), **measured}
        )
        rows_of_classes = donor.checked.rows if donor.checked is not None else {}
        source = session.models[matched]
        basis = Basis(
            base.config,
            base.shapes,
            session.recipe.untie,
            _identity(session, base.reference),
            _identity(session, matched),
            hidden_biases(architecture, base.as_filed.tensors, folded),
            rows_of_classes,
            donor_biases=hidden_biases(
                architecture, translated(source.as_filed.tensors, source.architecture, architecture), folded
            ),
        )
        Alignment(transforms[name], folded, basis=basis).save(files[-1], {**metadata, KEPT_BY: "save_alignment"})
        LOG.info("transforms of %s kept in %s", name, files[-1])
    return files


def _identity(session: Session, reference: ModelReference) -> Identity:
    """Identity of a model. Tensors that the merge did not read are read now."""
    model = session.models[reference]
    mark = session.run.marks.setdefault(str(reference), Fingerprint())
    mark.complete(model.architecture.named(), model.as_filed.tensors)
    return Identity(str(reference), mark.hexdigest(model.as_filed.config), dict(mark))
