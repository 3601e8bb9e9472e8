"""One merge from recipe to directory: compile, run mergekit's own `run_merge`, add the report, put it in place."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import click
import yaml
from mergekit import merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from transformers.utils import logging as hf_logging

from rotation_merge.errors import AlignmentError, RecipeError, RotationMergeError, printable, short
from rotation_merge.files import FILE, FOLDER, TemporaryFolder, check_output, locked, write_text
from rotation_merge.matching.aligned_output import file_metadata
from rotation_merge.matching.alignment import Alignment
from rotation_merge.mergekit_plugin import SWITCH, switched_off
from rotation_merge.mergekit_plugin.compile import compiled
from rotation_merge.mergekit_plugin.recipe import (
    ALIGNMENT,
    KEPT_BY,
    Recipe,
    numbered,
    recipe_inputs,
    recipe_outputs,
    tuned_from,
)
from rotation_merge.mergekit_plugin.rules import tokenizer_source
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.stock_heads import check_heads
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.card import origins, updated_card
from rotation_merge.model.checkpoint import mark_of, unchanged
from rotation_merge.model.contents import VOCABULARIES
from rotation_merge.model.folder import close_files, folder_of
from rotation_merge.model.heads import write_heads
from rotation_merge.model.markdown import plain
from rotation_merge.model.nearness import equality, equality_words
from rotation_merge.model.open import open_model
from rotation_merge.model.sentence import write_modules
from rotation_merge.model.view import View
from rotation_merge.model.writing import staged
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report.integrity import Contents, Defect, check_folder, check_parents
from rotation_merge.report.integrity.mending import COPIED, complete_files
from rotation_merge.report.integrity.values import check_values
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
        if not LOG.isEnabledFor(logging.INFO):  # its advice is for programmers
            session.run.endings.append(partial(hf_logging.set_verbosity, hf_logging.get_verbosity()))
            hf_logging.set_verbosity_error()
        try:
            report, defects = _written(stock, session, out_path, config_source or config.to_yaml())
        finally:
            session.run.end()
    if not options.quiet:
        lines = [f"rotation_merge: averaged by {report.delegate}, {report.seconds:.0f} s", *str(report).splitlines()]
        lines += [f"check: {defect.line}" for defect in defects] or ["check: the folder is complete"]
        say([*lines, f"report: {out_path}/{REPORT_FILE}; 'rotation-merge inspect {out_path} --report' shows it"])


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


def _written(
    stock: Callable[..., None], session: Session, out_path: str, source: str
) -> tuple[MergeReport, list[Defect]]:
    """Merge into a staging folder, and add what mergekit does not write; gives the report and remaining defects."""
    record, options, base, recipe = session.run, session.options, session.base, session.recipe
    models = list(dict.fromkeys([*recipe.config.referenced_models(), *tuned_from(recipe.config).values()]))
    ledger = kept_beside(out_path, lambda: _mark(session, models), session.devices[0])
    with ledger as record.ledger, staged(out_path) as staging:
        with unchanged(session.models[model] for model in models):
            compiled_recipe, views = compiled(session)
            views.prepare()
            stock(compiled_recipe, staging, _stock_options(session))
        if base.modules:
            write_modules(base.folder, staging, session.apart)
        if recipe.value("prove"):
            prove_files(views, staging)
        keep_alignments(views, staging)
        defects = complete(session, staging)
        report = _report(session, source)
        report.write(os.path.join(staging, REPORT_FILE))
        if recipe.value("heads_of") == "each":
            _write_heads(views, staging, report)
        if options.write_model_card:
            _write_card(staging, source, report)
    return report, defects


def _mark(session: Session, models: Iterable[ModelReference]) -> str:
    """A stable key of a merge: the files of its models and of the recipe, the recipe, and its options."""
    recipe, options = session.recipe.config.to_yaml(), session.options
    words = (str(event.value) for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent))
    facts = {"recipe": recipe, "seed": options.random_seed, "lora_dtype": options.lora_merge_dtype}
    return mark_of([session.models[model] for model in models], words, **facts)


def _stock_options(session: Session) -> MergeOptions:
    """mergekit's options without a card, and without copying a tokenizer that is not there, which it would log."""
    tokenizer = any(name.startswith(VOCABULARIES) for name in os.listdir(session.base.folder))
    copy = session.options.copy_tokenizer and tokenizer
    return session.options.model_copy(update={"write_model_card": False, "copy_tokenizer": copy})


def _report(session: Session, source: str) -> MergeReport:
    """The report, with the fingerprints of all models that were read, from the tensors as they were loaded."""
    recipe, prints = session.recipe, dict[str, str]()
    for reference, model in session.models.items():
        whole = [name for name in model.architecture.named() if name in model]
        if part := sum(name in model.mark for name in whole):
            words = "" if part == len(whole) else f" (of the {part} of {len(whole)} tensors that were read)"
            prints[str(reference)] = model.mark.hexdigest(model.as_filed.config) + words
    for line in equal_donors(session):
        session.run.note(line)
    models = origins(map(ModelReference.model_validate, prints), session.options.transformers_cache)
    facts = {"fingerprints": prints, "models": models, "own_method": recipe.own_method is not None}
    return session.run.report(recipe.base, recipe.delegate.spec.name, source, **facts)


def equal_donors(session: Session) -> list[str]:
    """Lines on donors whose tensors are all those of their base, by the checksums of what the merge read."""
    config, lines = session.recipe.config, list[str]()
    references = [*filter(None, (config.base_model,)), *tuned_from(config).values()]
    bases = [session.models[reference] for reference in references]
    for reference in sorted(set(config.referenced_models()) - {config.base_model}, key=str):
        donor = session.models[reference]
        equal = next((base for base in bases if base.mark == donor.mark and len(donor.mark) == len(donor)), None)
        lines += [] if equal is None else [f"`{reference}` {equality_words(equal, donor)}."]
    return lines


def _write_heads(views: RecipeViews, folder: str, report: MergeReport) -> None:
    """Write the merged body under every donor's head."""
    solved, moved = views.session.run.heads, list(map(views.moved, views.donors))
    donors = [replace(view, tensors=view.tensors.replaced(solved.get(view.name, {}))) for view in moved]
    write_heads(folder, donors, report, views.session.options.out_shard_size)


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
        spaces = pair.architecture.spaces()
        folded = tuple(s for s in run.folded if s in maps and (maps[s].turns_stream or spaces[s].kind == "latent"))
        rows, summary = [row for row in run.rows() if row.donor == name], run.whole.get(name, {})
        metadata = {**(file_metadata(pair) if known is None else known.metadata), **KEPT_BY}
        Alignment(maps, folded, rows, summary, basis=pair.basis(), metadata=metadata).save(path)


CARD = """# {name}

This is a merge of pre-trained models created using [mergekit](https://github.com/arcee-ai/mergekit).

### Configuration

{fence}yaml
{source}
{fence}
"""


def _write_card(folder: str, source: str, report: MergeReport) -> None:
    """Write a card with the recipe as the user wrote it and a section on the merge, and the recipe itself."""
    name, fence = os.path.basename(folder), max(["``", *re.findall("`+", source)], key=len) + "`"
    text = CARD.format(name=plain(name), fence=fence, source=source)
    picture = None
    try:
        picture = save_distances(report, folder)
    except Exception as error:  # of matplotlib, of every kind: no merge is lost
        LOG.warning("the card has no picture (%s)", short(error))
    text = updated_card(text, report, name, Contents(folder).config, picture=picture)
    write_text(os.path.join(folder, "README.md"), text)
    write_text(os.path.join(folder, "mergekit_config.yml"), source)


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


# --- the final check -------------------------------------------------------------------------------------------------

OF_TOKENIZER = ("no tokenizer", "no tokenizer config", "no chat template")
"""Defects of a folder that is to hold no tokenizer."""


def complete(session: Session, folder: str) -> list[Defect]:
    """Complete small files that mergekit leaves behind or rewrites, check the folder, and note what is found.

    Returns:
        The remaining defects. An error of the check itself becomes one, so that no merge is lost.
    """
    recipe, options, work = session.recipe, session.options, dict[str, str]()
    parents, tokenizer = _parents(recipe.config, options)
    without = () if options.copy_tokenizer or recipe.new_tokens else OF_TOKENIZER
    try:
        work = complete_files(folder, parents, tokenizer, without)
        defects = [defect for defect in check_folder(folder, parents) if defect.kind not in without]
    except Exception as error:  # of readers and of transformers, of every kind
        problem, remedy = f"could not be checked ({short(error)})", "run 'rotation-merge doctor'"
        defects = [Defect("not checked", problem, os.path.basename(folder), remedy, fatal=False)]
    if copied := [file for file, kind in work.items() if kind == COPIED]:
        session.run.note(f"Copied from a parent: {', '.join(copied)}.")
    if corrected := [f"{file} ({kind})" for file, kind in work.items() if kind != COPIED]:
        session.run.note(f"Corrected: {', '.join(corrected)}.")
    for defect in defects:
        session.run.note(f"Check of the output: {defect.line}.")
    return defects


def say_defects(config: MergeConfiguration, folder: str, options: MergeOptions) -> None:
    """Look at the output of another method of mergekit's, and at its parents; nothing is changed."""
    parents, _ = _parents(config, options)
    models = [*filter(None, [config.base_model]), *sorted(config.referenced_models(), key=str)]
    folders = {str(m): folder_of(m.model, options.transformers_cache) for m in models if m.lora is None}
    stored = {name: place for name, place in folders.items() if place is not None}
    defects = [*check_parents(stored), *check_folder(folder, parents), *check_values(Contents(folder))]
    remarks = [*(defect.line for defect in defects), *dict.fromkeys(_remarks(config, options))]
    lines = [f"rotation_merge: {folder}: {remark}" for remark in remarks]
    say(lines or [f"rotation_merge: {folder} is complete"])


def _remarks(config: MergeConfiguration, options: MergeOptions) -> Iterator[str]:
    """What peft, by which other methods merge adapters, does otherwise; heads that are lost; what equals the base."""
    facts: dict[str, Any] = {"options": options, "unsupported": "merge", "any_base": True}
    models, views = sorted(config.referenced_models(), key=str), dict[ModelReference, View]()
    for model in models:
        with suppress(RotationMergeError):  # such as of a class that is not supported
            view = views[model] = open_model(model, **facts)
            adapter, base = (None, None) if view.files is None else (view.files.adapter, view.files.base)
            reasons = [] if adapter is None else adapter.beyond_peft
            if base is not None and view.head_differs and not base.head_differs:
                reasons.append("changes a head that is tied to the embedding")
            for reason in reasons:
                yield f"{model.lora} {reason}: peft merges it otherwise; rotation_merge with 'delegate' does not"
            if config.base_model not in (None, model) and (
                remark := equality(open_model(config.base_model, **facts), view)
            ):
                yield f"{model} {remark}"
    try:
        if len(views) == len(models):
            check_heads(config, options, views)
    except RotationMergeError as error:
        yield str(error)


def _parents(config: MergeConfiguration, options: MergeOptions) -> tuple[list[str], str]:
    """Folders of a recipe's models, the base's first, and the one that the tokenizer comes from."""
    source = tokenizer_source(config)
    models = [*filter(None, [config.base_model]), *sorted(config.referenced_models(), key=str), *filter(None, [source])]
    folders = {model: folder_of(model.model, options.transformers_cache) for model in models}
    known = list(dict.fromkeys(filter(None, folders.values())))
    return known, folders.get(source or models[0]) or known[0]


def say(lines: Iterable[str]) -> None:
    """Print lines on stderr in a command, log them from Python."""
    for line in lines:
        if click.get_current_context(silent=True) is not None:
            click.echo(printable(line), err=True)
        else:
            LOG.info(line)
