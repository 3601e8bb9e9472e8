"""One merge from recipe to directory: compile, run mergekit's own `run_merge`, add the report, put it in place."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any
from unittest import mock

import click
import torch
import yaml
from mergekit import card, merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.errors import AlignmentError, RecipeError, RotationMergeError, named, printable, short
from rotation_merge.files import FILE, FOLDER, TemporaryFolder, check_output, locked, write_text
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.run import file_metadata
from rotation_merge.mergekit_plugin import SWITCH, switched_off
from rotation_merge.mergekit_plugin.compile import compiled, output_views
from rotation_merge.mergekit_plugin.recipe import (
    ALIGNMENT,
    Recipe,
    numbered,
    recipe_inputs,
    recipe_outputs,
    tuned_from,
)
from rotation_merge.mergekit_plugin.rules import tokenizer_source
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.card import origins, updated_card
from rotation_merge.model.contents import VOCABULARIES
from rotation_merge.model.folder import close_files, folder_of
from rotation_merge.model.heads import with_moved_head, write_heads
from rotation_merge.model.markdown import plain
from rotation_merge.model.run_keys import mark_of, unchanged
from rotation_merge.model.sentence import write_modules
from rotation_merge.model.writing import staged
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report.integrity import Contents, Defect, check_folder
from rotation_merge.report.integrity.mending import copy_companions
from rotation_merge.report.integrity.tokens import Vocabulary
from rotation_merge.report.plots import save_distances
from rotation_merge.run.ledger import kept_beside
from rotation_merge.workers import keep_freed_memory

LOG = logging.getLogger(__name__)


def run(
    stock: Callable[..., None],
    config: MergeConfiguration,
    out_path: str,
    options: MergeOptions,
    config_source: str | None,
) -> None:
    """Run a rotation_merge recipe.

    Args:
        stock: mergekit's `run_merge`.

    Raises:
        RotationMergeError: bad input; nothing has been written.
    """
    keep_freed_memory()
    session = Session(Recipe.read(config), options)
    outputs, inputs = recipe_outputs(config, out_path), recipe_inputs(config)
    for output in outputs:
        check_output(output, inputs, output.kind == FOLDER, cache=options.transformers_cache)
    with locked(*(output.path for output in outputs if output.kind in (FILE, FOLDER))):
        try:
            _run(stock, session, out_path, config_source or config.to_yaml())
        finally:
            session.run.end()


def moved_states(recipe: Recipe) -> Iterator[dict[str, Tensor]]:
    """The tensors of each model of a recipe as they are merged, in float32, in memory; the base first.

    Raises:
        RotationMergeError: as the merge does.
    """
    session = Session(recipe, MergeOptions(quiet=True), watched=False)
    try:
        views = output_views(session)
        views.prepare()
        for model in views.stored:
            yield views.served(model).to(torch.float32).state_dict()
    finally:
        session.run.end()


def merge_recipe(text: str, out: str, tokenizer: bool = False, device: str = "cpu") -> None:
    """Merge by mergekit's own `run_merge`, quietly, as mergekit-yaml would.

    Args:
        text: the recipe, YAML.
        out: directory to write.
        tokenizer: copy the base's, as mergekit-yaml does.
        device: to compute on.

    Raises:
        RotationMergeError: the plugin is switched off, or as of `run`.
    """
    if switched_off():
        raise RotationMergeError(f"the plugin is switched off ({SWITCH}=0)", remedy="unset it")
    options = MergeOptions(quiet=True, copy_tokenizer=tokenizer, device=device)
    try:
        merge.run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), out, options, config_source=text)
    finally:
        close_files()


def _run(stock: Callable[..., None], session: Session, out_path: str, source: str) -> None:
    """`run`, once nothing speaks against writing."""
    record, options, base = session.run, session.options, session.base
    ledger = kept_beside(out_path, lambda: _mark(session), session.devices[0])
    with ledger as record.ledger, staged(out_path) as staging:
        with unchanged(session.models[model] for model in _read(session.recipe.config)):
            compiled_recipe, views = compiled(session)
            views.prepare()
            stock(compiled_recipe, staging, _stock_options(session))
        if base.modules:
            write_modules(base.folder, staging, session.apart)
        if session.recipe.value("prove"):
            prove_files(views, staging)
        report, defects = _completed(views, staging, source)
    checked = [f"  check: {defect.line}" for defect in defects] or ["  check: the folder is complete"]
    say([] if options.quiet else [*closing(report, out_path), *checked])


def _stock_options(session: Session) -> MergeOptions:
    """mergekit's options without a card, and without copying a tokenizer that is not there, which it would log."""
    path = folder_of(session.recipe.base.model, session.options.transformers_cache)
    tokenizer = path is None or any(name.startswith(VOCABULARIES) for name in os.listdir(path))
    copy = session.options.copy_tokenizer and tokenizer
    return session.options.model_copy(update={"write_model_card": False, "copy_tokenizer": copy})


def _completed(views: RecipeViews, staging: str, source: str) -> tuple[MergeReport, list[Defect]]:
    """Add to a written merge what mergekit does not write: saved alignments, the report, heads, the card."""
    session, recipe, record, options = views.session, views.recipe, views.session.run, views.session.options
    marks, delegate, ours = fingerprints(session), recipe.delegate.spec.name, recipe.own_method is not None
    keep_alignments(views, staging)
    notes, defects = complete(recipe.config, staging, options)
    for note in notes:
        record.note(note)
    models = origins(map(ModelReference.model_validate, marks), options.transformers_cache)
    report = record.report(recipe.base, delegate, source, fingerprints=marks, models=models, own_method=ours)
    report.write(os.path.join(staging, REPORT_FILE))
    if recipe.value("heads_of") == "each":
        donors = {str(m): session.models[m] for m in recipe.config.referenced_models() if m != recipe.base}
        moved = [
            with_moved_head(donor, record.folded, record.transforms_of(name), record.heads.get(name, {}))
            for name, donor in donors.items()
        ]
        write_heads(staging, moved, report, options.out_shard_size)
    if options.write_model_card:
        _write_card(recipe.config, staging, source, report)
    return report, defects


def keep_alignments(views: RecipeViews, folder: str) -> None:
    """Write the files of `save_alignment` into the merge's folder, as `align --save` does: one for each moved donor."""
    run, setting = views.session.run, views.recipe.value("save_alignment")
    if not setting:
        return
    first = os.path.join(folder, ALIGNMENT if setting is True else str(setting))
    if os.path.exists(first):
        problem = f"'{setting}' is a file of the merged model"
        raise RecipeError(problem, where="parameters.save_alignment", remedy="name another file")
    os.makedirs(os.path.dirname(first), exist_ok=True)
    moved = {donor: maps for model, donor in views.donors.items() if (maps := views.transforms_of(model))}
    for path, (donor, maps) in zip(numbered(first, len(moved)), moved.items(), strict=False):
        pair, name, known = donor.pair, donor.name, donor.from_file
        spaces, models = pair.architecture.spaces(), [pair.anchor.reference, pair.donor.reference]
        folded = tuple(s for s in run.folded if s in maps and (maps[s].turns_stream or spaces[s].kind == "latent"))
        options = yaml.safe_dump(asdict(pair.options), sort_keys=False)
        report = run.report(models[0], "none", options, models=origins(models))
        metadata = known.metadata if known is not None else file_metadata(report, str(models[1]))
        figures = [row for row in report.rows if row.donor == name], report.whole.get(name, {})
        alignment = Alignment(maps, folded, *figures, basis=pair.basis(), metadata=metadata)
        alignment.save(path)


ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""Names of models on the hub."""

_CARD = Lock()


def _write_card(config: MergeConfiguration, folder: str, source: str, report: MergeReport) -> None:
    """Write mergekit's card of the recipe as the user wrote it, with a section of ours, and the recipe itself.

    The hub is asked for no local directory, names are escaped for Markdown, and the recipe stands between more
    backticks than it holds itself.
    """
    is_hf, link, fence = card.is_hf, card.maybe_link_hf, "```"
    while fence in source:
        fence += "`"
    instead: dict[str, Any] = {
        "is_hf": lambda path: not os.path.exists(path) and is_hf(path),
        "maybe_link_hf": lambda path: link(path) if ON_HUB.fullmatch(path) else plain(path),
    }
    with _CARD, mock.patch.multiple(card, **instead):
        text = card.generate_card(config=config, config_yaml=source, name=os.path.basename(folder))
    text = text.replace(f"```yaml\n{source}\n```", f"{fence}yaml\n{source}\n{fence}", 1)
    name, config = os.path.basename(folder), Contents(folder).config
    text = updated_card(text, report, name, config, picture=_picture(report, folder))
    write_text(os.path.join(folder, "README.md"), text)
    write_text(os.path.join(folder, "mergekit_config.yml"), source)


def _picture(report: MergeReport, folder: str) -> str | None:
    """The file name of the distances' picture; None where there is none, or it cannot be drawn: no merge is lost."""
    try:
        return save_distances(report, folder)
    except Exception as error:  # of matplotlib, of every kind
        LOG.warning("the card has no picture (%s)", short(error))
        return None


def _read(config: MergeConfiguration) -> list[ModelReference]:
    """The models that a merge reads, each once: those it merges, and their bases."""
    return list(dict.fromkeys([*config.referenced_models(), *tuned_from(config).values()]))


def _mark(session: Session) -> str:
    """A stable key of a merge: the files of its models and of the recipe, the recipe, and its options."""
    config, options = session.recipe.config, session.options
    recipe, models = config.to_yaml(), [session.models[reference] for reference in _read(config)]
    words = (str(event.value) for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent))
    return mark_of(models, words, recipe=recipe, seed=options.random_seed, lora_dtype=options.lora_merge_dtype)


def prove_files(views: RecipeViews, place: str) -> None:
    """Refuse an alignment file that changed what its donor computes; `place` has room for one model."""
    from rotation_merge.run.proof import prove

    run = views.session.run
    for donor in views.donors.values():
        if (alignment := donor.from_file) is None:
            continue
        view, file = views.session.models[donor.matched].as_filed, donor.value("alignment")
        spaces = view.architecture.spaces()
        with TemporaryFolder(place) as folder:
            moved = os.path.join(folder, "moved")
            alignment.apply(view).save_pretrained(moved)
            proof = prove(view.name, moved, any(spaces[name].head for name in alignment.transforms if name in spaces))
        if proof.failed:
            problem, remedy = f"changes the outputs of {view.name} ({proof.words})", "write it again with"
            raise AlignmentError(problem, where=file, remedy=f"{remedy} 'rotation-merge align'")
        run.note(f"`{view.name}`, moved by {file}: {proof.words}.")


def fingerprints(session: Session) -> dict[str, str]:
    """Fingerprints of all models that were read, the base first, from the tensors as they were loaded."""
    recipe, prints = session.recipe, dict[str, str]()
    for reference in dict.fromkeys([recipe.base, *recipe.config.referenced_models(), *session.models]):
        model = session.models[reference]
        whole = [name for name in model.architecture.named() if name in model]
        if part := sum(name in model.mark for name in whole):
            words = "" if part == len(whole) else f" (of the {part} of {len(whole)} tensors that were read)"
            prints[str(reference)] = model.mark.hexdigest(model.as_filed.config) + words
    return prints


OF_TOKENIZER = ("no tokenizer", "no tokenizer config", "no chat template")
"""Defects of a folder that is to hold no tokenizer."""


def complete(config: MergeConfiguration, folder: str, options: MergeOptions) -> tuple[list[str], list[Defect]]:
    """Copy the base's small files that mergekit does not copy, and check the written folder.

    Returns:
        Notes for the report, and the remaining defects of the folder. An error of the check itself becomes such a line,
        so that no merge is lost.
    """
    parents, copied = parent_folders(config, options), list[str]()
    without = () if options.copy_tokenizer or tokenizer_source(config) else OF_TOKENIZER
    try:
        copied = copy_companions(folder, list(parents.values()), without)
        defects = [defect for defect in check_folder(folder, list(parents.values())) if defect.kind not in without]
    except Exception as error:  # of readers and of transformers, of every kind
        problem, remedy = f"could not be checked ({short(error)})", "run 'rotation-merge doctor'"
        defects = [Defect("not checked", problem, os.path.basename(folder), remedy, fatal=False)]
    notes = vocabulary_notes(parents, folder) if config.tokenizer or config.tokenizer_source else []
    notes += [f"Copied from a parent: {', '.join(copied)}."] if copied else []
    return [*notes, *(f"Check of the output: {defect.line}." for defect in defects)], defects


def parent_folders(config: MergeConfiguration, options: MergeOptions) -> dict[str, str]:
    """Folders of the merged models by name, the base first."""
    models = dict.fromkeys([*filter(None, [config.base_model]), *sorted(config.referenced_models(), key=str)])
    places = {str(model): folder_of(model.model, options.transformers_cache) for model in models}
    return {name: place for name, place in places.items() if place is not None}


def say_defects(config: MergeConfiguration, folder: str, options: MergeOptions) -> None:
    """Look at the output of another method of mergekit's; nothing is changed."""
    defects = check_folder(folder, list(parent_folders(config, options).values()))
    lines = [f"rotation_merge: {folder}: {defect.line}" for defect in defects]
    say(lines or [f"rotation_merge: {folder} is complete"])


def vocabulary_notes(parents: Mapping[str, str], folder: str) -> list[str]:
    """A note on which model's rows the tokens of combined vocabularies have.

    Empty if a tokenizer cannot be read without its library.

    mergekit's `PermutedEmbeddings` decides: a token of one model has that model's row; for a token of several, those
    that lack it count with the base's row, or with the mean of the rows where the base lacks it, too.
    """
    known = {name: Vocabulary.of(Contents(place)) for name, place in parents.items()}
    result = Vocabulary.of(Contents(folder))
    if len(known) < 2 or not all(vocabulary.whole for vocabulary in (result, *known.values())):
        return []
    holders = {token: [name for name in known if token in known[name].ids] for token in result.ids}
    shared = sum(len(names) == len(known) for names in holders.values())
    parts = [f"Vocabulary of {len(result.ids)} tokens: the rows of {shared} tokens that all models have are averaged"]
    for name in known:
        if tokens := [f"'{token}'" for token, names in holders.items() if names == [name]]:
            parts.append(f"{len(tokens)} tokens that only `{name}` has keep its rows ({named(tokens)})")
    if partial := sum(1 < len(names) < len(known) for names in holders.values()):
        parts.append(f"for {partial} tokens that some models lack, those models contribute the base's row, or the mean")
    return [f"{'; '.join(parts)}."]


def say(lines: Iterable[str]) -> None:
    """Print lines on stderr in a command, log them from Python."""
    for line in lines:
        if click.get_current_context(silent=True) is not None:
            click.echo(printable(line), err=True)
        else:
            LOG.info(line)


DONORS, NOTES = 5, 3
"""At most so many of either are shown; the report has them all."""


def closing(report: MergeReport, out: str) -> list[str]:
    """Lines on the alignment and its distances, further notes, and the path of the report."""
    donors = report.donors()
    lines = [f"rotation_merge: aligned to {report.anchor}, averaged by {report.delegate}, {report.seconds:.0f} s"]
    lines += [f"  {donor}: {report.verdict(donor)}" for donor in donors[:DONORS]]
    if not donors:
        lines.append(f"  {report.unmoved()}")
    if len(donors) > DONORS:
        lines.append(f"  and {len(donors) - DONORS} more donors")
    lines += [f"  {note}" for note in report.notes[:NOTES]]
    lines.append(f"  report: {out}/rotation_merge.json; 'rotation-merge inspect {out} --report' shows it")
    return lines
