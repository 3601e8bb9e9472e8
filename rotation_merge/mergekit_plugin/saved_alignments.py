"""`save_alignment`: writes a merge's transforms as `rotation-merge align --alignment` does."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

import yaml

from rotation_merge.errors import RecipeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.report_rows import file_metadata
from rotation_merge.mergekit_plugin.recipe import ALIGNMENT, KEPT_BY, numbered, title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.card import origins

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
    pairs = {title(model, donor.origin): donor.pair for model, donor in donors.by_model.items()}
    pairs = {name: pair for name, pair in pairs.items() if name in run.kept_transforms}
    for number, (name, pair) in enumerate(pairs.items(), 1):
        path, maps, spaces = numbered(first, number)[-1], run.kept_transforms[name], pair.architecture.spaces()
        folded = tuple(s for s in donors.folded if s in maps and (maps[s].turns_stream or spaces[s].kind == "latent"))
        models = [pair.anchor.reference, pair.donor.reference]
        recipe = yaml.safe_dump(asdict(pair.options), sort_keys=False)
        report, known = run.report(models[0], "none", recipe, models=origins(models)), run.alignment_files.get(name)
        metadata = known.metadata if known else file_metadata(report, str(models[1]), name)
        alignment = Alignment(maps, folded, basis=pair.basis(folded), metadata=metadata)
        alignment.save(path, {KEPT_BY: "save_alignment"})
        LOG.info("transforms of %s kept in %s", name, path)
