"""One merge from recipe to directory: check, run mergekit's own `run_merge`, add the report, put it in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import click
import yaml
from mergekit import card, merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.checkpoints.aligned import Storage, empty_report, write_aligned
from rotation_merge.checkpoints.hub import downloaded
from rotation_merge.checkpoints.origin import origins
from rotation_merge.checkpoints.output import check_place, staged
from rotation_merge.checkpoints.pair import open_pair, read_alignment
from rotation_merge.checkpoints.sentence import module_of, write_modules
from rotation_merge.checkpoints.stamps import mark_of, unchanged
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.ledger import kept_beside
from rotation_merge.matching.options import NOTHING
from rotation_merge.planning.keeping import keep_alignments
from rotation_merge.planning.session import Session, SessionConfiguration
from rotation_merge.planning.tasks import check_output
from rotation_merge.planning.whole import devices_of
from rotation_merge.recipe.donor import entries
from rotation_merge.recipe.reading import Recipe
from rotation_merge.recipe.settings import tokenizer_source
from rotation_merge.report.card import add_section
from rotation_merge.report.closing import closing
from rotation_merge.report.record import MergeReport
from rotation_merge.scratch import Scratch
from rotation_merge.seam.replaced import replaced
from rotation_merge.spread.threads import keep_freed_memory

log = logging.getLogger(__name__)


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
    session = Session.of(Recipe.read(config), options)
    recipe, done = session.recipe, session.run
    check_place(out_path, [model.model.path for model in config.referenced_models()])
    fetch_tokenizer(config, options)
    try:
        base = session.models[recipe.base]
        apart = Apart(base.modules)
        kept = kept_beside(out_path, lambda: _mark(session, options), devices_of(options)[0])
        with kept as done.ledger, staged(out_path) as staging, _as_it_is_here(apart):
            with unchanged(_read(config)):
                stock(
                    SessionConfiguration.of(session), staging, _quiet_about_tokenizers(config, options), config_source
                )
            if base.modules:
                write_modules(base.folder, staging, apart.tensors)
            if recipe.value("prove"):
                prove_files(session, staging)
            marks = fingerprints(session)
            keep_alignments(session, staging)
            report = MergeReport.of(
                done,
                recipe.base,
                recipe.delegate.spec.name,
                config_source or config.to_yaml(),
                marks,
                origins(map(ModelReference.model_validate, marks), options.transformers_cache),
            )
            report.write(os.path.join(staging, "rotation_merge.json"))
            if recipe.value("heads_of") == "each":
                from rotation_merge.checkpoints.heads import write_heads

                donors = [m for m in config.referenced_models() if m != recipe.base]
                found = {m: (session.models[m], done.transforms_of(str(m))) for m in donors}
                write_heads(staging, session.models[recipe.base], found, done.folded, report, done.heads)
            if recipe.report:
                from rotation_merge.report.html import write_page

                write_page(staging)
            if options.write_model_card:
                add_section(os.path.join(staging, "README.md"), report)
        _say(closing(report, out_path), options)
    finally:
        done.end()


def _read(config: MergeConfiguration) -> list[ModelReference]:
    """The models that a merge reads: those it merges, and what they are fine-tunes of."""
    origins = [given.get("finetuned_from") for _, given in entries(config)]
    named = [ModelReference.model_validate(name) for name in origins if name not in (None, "none")]
    return [*config.referenced_models(), *named]


def _mark(session: Session, options: MergeOptions) -> str:
    """What a merge is of: the files of its models, and those that the recipe names; the recipe; what it is run with."""
    config, donors = session.recipe.config, session.donors
    origins = [donor.origin for donor in donors.found.values() if donor.origin is not None] if donors else []
    models = [session.models[one] for one in dict.fromkeys([*config.referenced_models(), *origins])]
    recipe = config.to_yaml()
    words = (str(event.value) for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent))
    return mark_of(models, words, recipe=recipe, seed=options.random_seed, lora_dtype=options.lora_merge_dtype)


def fetch_tokenizer(config: MergeConfiguration, options: MergeOptions) -> None:
    """Have the files of a tokenizer from the hub here: once, where transformers would try for a minute, file by file.

    Raises:
        CheckpointError: they cannot be had.
    """
    source = tokenizer_source(config.model_dump(exclude_none=True))[1]
    if source is not None and not os.path.isdir(source):
        downloaded(source, None, options.transformers_cache, TOKENIZER_PATTERNS)


TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def _say(lines: list[str], options: MergeOptions) -> None:
    """In a command on stderr, from Python as log; with --quiet not at all."""
    for line in [] if options.quiet else lines:
        if click.get_current_context(silent=True) is not None:
            click.echo(line, err=True)
        else:
            log.info(line)


def prove_files(session: Session, place: str) -> None:
    """Every donor that an alignment file moved computes the same after it.

    Args:
        place: a folder with room for one of them.

    Raises:
        AlignmentError: one does not.
    """
    from rotation_merge.samples.proof import prove

    recipe, done = session.recipe, session.run
    for given in done.given.values():
        donor, file = given.matched, given.file
        pair = open_pair(
            str(recipe.base),
            donor,
            NOTHING,
            recipe.untie,
            unsupported=recipe.unsupported,
            excluded=recipe.excluded,
        )
        alignment = read_alignment(pair, file)
        with Scratch(place) as folder:
            moved = os.path.join(folder, "moved")
            write_aligned(pair, alignment, empty_report(pair), moved, Storage(untie=recipe.untie))
            spaces = pair.anchor.architecture.spaces()
            shifted = any(spaces[name].head for name in alignment.transforms if name in spaces)
            proof = prove(donor, moved, shifted)
        if proof.failed:
            what = f"changes what {donor} computes ({proof.words})"
            raise AlignmentError(what, where=file, remedy="write it anew with 'rotation-merge align'")
        done.note(f"`{donor}`, moved by {file}: {proof.words}.")


def fingerprints(session: Session) -> dict[str, str]:
    """Of every model that was read, the base first; taken from the tensors as the merge loaded them."""
    recipe, marks = session.recipe, session.run.marks
    origins = [ModelReference.model_validate(name) for name in marks]
    found = {}
    for reference in dict.fromkeys([recipe.base, *recipe.config.referenced_models(), *origins]):
        mark = marks.get(str(reference))
        if mark is not None:
            model = session.models[reference]
            whole = [name for name in model.architecture.named() if name in model]
            part = sum(name in mark for name in whole)
            words = "" if part == len(whole) else f" (of the {part} of {len(whole)} tensors that were read)"
            found[str(reference)] = mark.hexdigest(model.config) + words
    return found


@dataclass(frozen=True)
class Apart:
    """Tensors of sentence-transformers' modules, which lie in files of their own."""

    modules: list[dict[str, Any]]
    tensors: dict[str, Tensor] = field(default_factory=dict)


_apart: ContextVar[Apart | None] = ContextVar("rotation_merge_apart", default=None)


@contextmanager
def _as_it_is_here(apart: Apart) -> Iterator[None]:
    """Let nothing be written that holds NaN, and gather what is to be written apart; write the card without asking the
    hub whether it knows a directory that is here, which without a network would end the merge at its last step; and
    take the base model's small files from where they are, not from a cache of models merged with their adapters."""
    token = _apart.set(apart)
    small = (card, "is_hf", _on_hub), (merge, "_get_donor_model", _base_folder)
    try:
        with replaced(*small, (TensorWriter, "save_tensor", _save)):
            yield
    finally:
        _apart.reset(token)


def _save(real: Callable[..., None], writer: TensorWriter, name: str, tensor: Tensor, **options: Any) -> None:
    check_output(tensor, name)
    apart = _apart.get()
    if apart is None or module_of(name, apart.modules) is None:
        real(writer, name=name, tensor=tensor, **options)
    else:
        apart.tensors[name] = tensor.detach().cpu().clone()


def _on_hub(real: Callable[[str], bool], path: str) -> bool:
    return not os.path.exists(path) and real(path)


def _base_folder(
    real: Callable[..., Any], config: MergeConfiguration, options: MergeOptions
) -> tuple[ModelReference, str]:
    base = config.base_model or config.referenced_models()[0]
    return base, base.local_path(cache_dir=options.transformers_cache, ignore_lora=True)


TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
"""How names of files that make up a tokenizer begin."""


def _quiet_about_tokenizers(config: MergeConfiguration, options: MergeOptions) -> MergeOptions:
    """Do not let mergekit copy a tokenizer that is not there (it would log a traceback, for images too)."""
    path = config.base_model.model.path if config.base_model else ""
    if not os.path.isdir(path) or any(name.startswith(TOKENIZER_FILES) for name in os.listdir(path)):
        return options
    return options.model_copy(update={"copy_tokenizer": False})
