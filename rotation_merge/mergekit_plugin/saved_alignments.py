"""`save_alignment`: writes a merge's transforms as `rotation-merge align --alignment` does."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

import yaml

from rotation_merge.architecture import resolve
from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.basis import Basis, Identity, hidden_biases
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.serialisation import file_metadata
from rotation_merge.mergekit_plugin.output import MergeOutput
from rotation_merge.mergekit_plugin.recipe import ALIGNMENT, KEPT_BY, numbered, title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.forms import translated
from rotation_merge.model.origin import origins

LOG = logging.getLogger(__name__)


def check_keepable(session: Session, output: MergeOutput) -> None:
    """Refuse `save_alignment` for alignments that no file can store.

    Raises:
        RecipeError: a donor's layer is moved to the coordinates of another layer of the anchor.
    """
    if session.run.kept_transforms is None:
        return
    for out in output.blocks:
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
    spaces = architecture.spaces()
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
        maps = transforms[name]
        folded = tuple(s for s in donors.folded if s in maps and (maps[s].turns_stream or spaces[s].kind == "latent"))
        source, checked, known = session.models[matched], donor.checked, session.run.alignment_files.get(name)
        recipe = yaml.safe_dump(asdict(NOTHING if checked is None else checked.options), sort_keys=False)
        report = session.run.report(base.reference, "none", recipe, models=origins([base.reference, matched]))
        metadata = known.metadata if known else file_metadata(report, str(matched), name)
        tensors = translated(source.as_filed.tensors, source.architecture, architecture)
        basis = Basis(
            base.config,
            base.shapes,
            session.recipe.untie,
            Identity.of(base),
            Identity.of(source),
            hidden_biases(architecture, base.as_filed.tensors, folded),
            hidden_biases(architecture, tensors, folded),
            {} if checked is None else checked.rows,
        )
        alignment = Alignment(maps, folded, basis=basis, metadata=metadata)
        alignment.save(files[-1], {KEPT_BY: "save_alignment"})
        LOG.info("transforms of %s kept in %s", name, files[-1])
    return files
