"""One merge from recipe to directory: compile, run mergekit's own `run_merge`, add the report, put it in place."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import yaml
from mergekit import card, merge
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.averaging.average import check_merged
from rotation_merge.errors import AlignmentError
from rotation_merge.files import FILE, FOLDER, TemporaryFolder, check_output, locked
from rotation_merge.matching.aligned_output import read_alignment, write_aligned
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import open_pair
from rotation_merge.mergekit_plugin.compile import compiled
from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.loader import StandIn
from rotation_merge.mergekit_plugin.output_check import complete, say, vocabulary_note
from rotation_merge.mergekit_plugin.recipe import Recipe, entries, recipe_inputs, recipe_outputs
from rotation_merge.mergekit_plugin.rules import tokenizer_source
from rotation_merge.mergekit_plugin.saved_alignments import keep_alignments
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.wholes import devices_of
from rotation_merge.model.card import add_section
from rotation_merge.model.folder import fetched, folder_of
from rotation_merge.model.heads import with_moved_head, write_heads
from rotation_merge.model.markdown import plain
from rotation_merge.model.origin import origins
from rotation_merge.model.run_keys import mark_of, unchanged
from rotation_merge.model.sentence import in_module, write_modules
from rotation_merge.model.staging import staged
from rotation_merge.model.writing import StorageOptions
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report.integrity import Defect
from rotation_merge.run.ledger import kept_beside
from rotation_merge.workers import keep_freed_memory, listener

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
    outputs = recipe_outputs(config, out_path)
    inputs = recipe_inputs(config)
    for output in outputs:
        check_output(output, inputs, output.kind == FOLDER, cache=options.transformers_cache)
    with locked(*(output.path for output in outputs if output.kind in (FILE, FOLDER))):
        _run(stock, session, out_path, options, config_source)


def _run(
    stock: Callable[..., None], session: Session, out_path: str, options: MergeOptions, config_source: str | None
) -> None:
    """`run`, once nothing speaks against writing."""
    recipe, done = session.recipe, session.run
    config = recipe.config
    fetch_tokenizer(config, options)
    try:
        base = session.models[recipe.base]
        tell, tensors = listener(), len(base.names)
        apart = SentenceModuleTensors(
            base.modules, written=lambda count: tell("writing tensors", count, max(count, tensors))
        )
        ledger = kept_beside(out_path, lambda: _mark(session, options), devices_of(options)[0])
        with ledger as done.ledger, staged(out_path) as staging, _as_it_is_here(apart, recipe, options):
            with unchanged(session.models[model] for model in _read(config)):
                result = compiled(session)
                result.prepare()
                stock(result.stock, staging, _quiet_about_tokenizers(config, options), config_source)
            if base.modules:
                write_modules(base.folder, staging, apart.tensors)
            if recipe.value("prove"):
                prove_files(session, staging)
            report, defects = _completed(session, staging, options, config_source)
        checked = [f"  check: {defect.line}" for defect in defects] or ["  check: the folder is complete"]
        say([] if options.quiet else [*closing(report, out_path), *checked])
    finally:
        done.end()


def _completed(
    session: Session, staging: str, options: MergeOptions, config_source: str | None
) -> tuple[MergeReport, list[Defect]]:
    """Add to a written merge what mergekit does not write: saved alignments, the report, heads, the card's section."""
    recipe, done = session.recipe, session.run
    config = recipe.config
    marks = fingerprints(session)
    keep_alignments(session, staging)
    copied, defects = complete(config, staging, options)
    if vocabulary := vocabulary_note(config, staging, options):
        done.note(vocabulary)
    if copied:
        done.note(f"Copied from a parent: {', '.join(copied)}.")
    for defect in defects:
        done.note(f"Check of the output: {defect.line}.")
    report = done.report(
        recipe.base,
        recipe.delegate.spec.name,
        config_source or config.to_yaml(),
        marks,
        origins(map(ModelReference.model_validate, marks), options.transformers_cache),
        own_method=recipe.delegate.spec.name in OWN,
    )
    report.write(os.path.join(staging, REPORT_FILE))
    if recipe.value("heads_of") == "each":
        donors = {str(m): session.models[m] for m in config.referenced_models() if m != recipe.base}
        moved_donors = [
            with_moved_head(donor, done.folded, done.transforms_of(name), done.heads.get(name, {}))
            for name, donor in donors.items()
        ]
        write_heads(staging, moved_donors, report, options.out_shard_size)
    if options.write_model_card:
        add_section(os.path.join(staging, "README.md"), report)
    return report, defects


def _read(config: MergeConfiguration) -> list[ModelReference]:
    """The models that a merge reads: those it merges, and their bases."""
    origins = [settings.get("finetuned_from") for _, settings in entries(config)]
    named = [ModelReference.model_validate(name) for name in origins if name not in (None, "none")]
    return [*config.referenced_models(), *named]


def _mark(session: Session, options: MergeOptions) -> str:
    """A stable key of a merge: the files of its models and of the recipe, the recipe, and its options."""
    config, donors = session.recipe.config, session.donors
    origins = [donor.origin for donor in donors.found.values() if donor.origin is not None] if donors else []
    models = [session.models[reference] for reference in dict.fromkeys([*config.referenced_models(), *origins])]
    recipe = config.to_yaml()
    words = (str(event.value) for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent))
    return mark_of(models, words, recipe=recipe, seed=options.random_seed, lora_dtype=options.lora_merge_dtype)


def fetch_tokenizer(config: MergeConfiguration, options: MergeOptions) -> None:
    """Have the files of a tokenizer from the hub here: once, where transformers would try for a minute, file by file.

    Raises:
        CheckpointError: they cannot be had.
    """
    source = tokenizer_source(config)
    if source is not None:
        fetched(ModelPath(path=source), options.transformers_cache)


def prove_files(session: Session, place: str) -> None:
    """Every donor that an alignment file moved computes the same after it.

    Args:
        place: a folder with room for one of them.

    Raises:
        AlignmentError: one does not.
    """
    from rotation_merge.run.proof import prove

    recipe, done = session.recipe, session.run
    for alignment_file in done.alignment_files.values():
        donor, file = alignment_file.matched, alignment_file.file
        pair = open_pair(
            str(recipe.base),
            donor,
            NOTHING,
            recipe.untie,
            unsupported=recipe.unsupported,
            excluded=recipe.excluded,
            any_base=True,
        )
        alignment = read_alignment(pair, file)
        with TemporaryFolder(place) as folder:
            moved = os.path.join(folder, "moved")
            write_aligned(pair, alignment, moved, StorageOptions(untie=recipe.untie))
            spaces = pair.anchor.architecture.spaces()
            shifted = any(spaces[name].head for name in alignment.transforms if name in spaces)
            proof = prove(donor, moved, shifted)
        if proof.failed:
            problem = f"changes the outputs of {donor} ({proof.words})"
            raise AlignmentError(problem, where=file, remedy="write it again with 'rotation-merge align'")
        done.note(f"`{donor}`, moved by {file}: {proof.words}.")


def fingerprints(session: Session) -> dict[str, str]:
    """Fingerprints of all models that were read, the base first, from the tensors as they were loaded."""
    recipe, marks = session.recipe, session.run.marks
    origins = [ModelReference.model_validate(name) for name in marks]
    prints = {}
    for reference in dict.fromkeys([recipe.base, *recipe.config.referenced_models(), *origins]):
        mark = marks.get(str(reference))
        if mark is not None:
            model = session.models[reference]
            whole = [name for name in model.architecture.named() if name in model]
            part = sum(name in mark for name in whole)
            words = "" if part == len(whole) else f" (of the {part} of {len(whole)} tensors that were read)"
            prints[str(reference)] = mark.hexdigest(model.config) + words
    return prints


@dataclass(frozen=True)
class SentenceModuleTensors:
    """Tensors of sentence-transformers' modules, which have files of their own.

    Attributes:
        written: called with the number of written tensors.
    """

    modules: list[dict[str, Any]]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    written: Callable[[int], None] = lambda _: None
    _count: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def tick(self) -> None:
        self.written(next(self._count))


_apart: ContextVar[SentenceModuleTensors | None] = ContextVar("rotation_merge_apart", default=None)


@contextmanager
def _as_it_is_here(apart: SentenceModuleTensors, recipe: Recipe, options: MergeOptions) -> Iterator[None]:
    """Patch mergekit's writing within the block.

    Config, card, chat template and small files are made from the recipe as the user wrote it, and its anchor, not from
    what it was compiled to, nor from a cache of merged adapters. NaN is refused and the tensors of `apart` are
    collected; the card asks the hub for no local directory and escapes names for Markdown; and the results of every
    device are awaited.
    """
    token = _apart.set(apart)
    base = StandIn.of(recipe.base, cache=options.transformers_cache)
    config = recipe.config.model_copy(update={"base_model": base})

    def out_config(real: Callable[..., Any], _: Any, architecture: Any, **more: Any) -> Any:
        written = real(config, architecture, **more)
        if recipe.untie:
            written.tie_word_embeddings = False
        return written

    def template(real: Callable[..., None], tokenizer: Any, _: Any, **more: Any) -> None:
        real(tokenizer, config, **more)

    def model_card(real: Callable[..., str], config_yaml: str, **more: Any) -> str:
        return _fenced(real, config_yaml=config_yaml, **{**more, "config": recipe.config})

    def base_folder(real: Callable[..., Any], _: Any, options: MergeOptions) -> tuple[ModelReference, str]:
        folder = fetched(base.model, options.transformers_cache)
        return ModelReference(model=ModelPath(path=folder)), folder

    cards = (card, "is_hf", _on_hub), (card, "maybe_link_hf", _linked), (merge, "generate_card", model_card)

    def architecture(real: Callable[..., Any], config: Any, options: MergeOptions) -> Any:
        return getattr(config, "_architecture", None) or real(config, options)

    ours = (merge, "_model_out_config", out_config), (merge, "_set_chat_template", template)
    writing = (merge, "_get_donor_model", base_folder), (TensorWriter, "save_tensor", _save)
    rest = (merge, "MultiGPUExecutor", _with_all_results), (merge, "get_architecture_info", architecture)
    try:
        with replaced(*cards, *ours, *writing, *rest):
            yield
    finally:
        _apart.reset(token)


def _save(real: Callable[..., None], writer: TensorWriter, name: str, tensor: Tensor, **options: Any) -> None:
    check_merged(tensor, name)
    apart = _apart.get()
    if apart is not None and in_module(name, apart.modules):
        apart.tensors[name] = tensor.detach().cpu().clone()
    else:
        real(writer, name=name, tensor=tensor, **options)
    if apart is not None:
        apart.tick()


class DrainedQueueEvent(threading.Event):
    """Set only once a queue is empty, too.

    Args:
        results: queue of pending results.
    """

    def __init__(self, results: queue.Queue[Any]) -> None:
        super().__init__()
        self._results = results

    def is_set(self) -> bool:
        return super().is_set() and self._results.empty()


def _with_all_results(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """mergekit's executor for several GPUs, corrected to collect all results.

    The original stops when the devices are done, even with results left in its queue.
    """
    executor = real(*args, **options)
    executor.done_event = DrainedQueueEvent(executor.task_completion_queue)
    return executor


def _on_hub(real: Callable[[str], bool], path: str) -> bool:
    return not os.path.exists(path) and real(path)


def _linked(real: Callable[[str], str], path: str) -> str:
    return real(path) if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else plain(path)


def _fenced(real: Callable[..., str], config_yaml: str, **more: Any) -> str:
    """mergekit's card, the recipe between more backticks than it holds itself."""
    text, fence = real(config_yaml=config_yaml, **more), "```"
    while fence in config_yaml:
        fence += "`"
    return text.replace(f"```yaml\n{config_yaml}\n```", f"{fence}yaml\n{config_yaml}\n{fence}", 1)


TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
"""Prefixes of names of tokenizer files."""


def _quiet_about_tokenizers(config: MergeConfiguration, options: MergeOptions) -> MergeOptions:
    """Do not let mergekit copy a tokenizer that is not there (it would log a traceback, for images too)."""
    base = config.base_model
    path = None if base is None else folder_of(base.model, options.transformers_cache)
    if path is None or any(name.startswith(TOKENIZER_FILES) for name in os.listdir(path)):
        return options
    return options.model_copy(update={"copy_tokenizer": False})


Replacement = Callable[..., Any]
"""Takes the real function, then its arguments."""

_ours: ContextVar[bool] = ContextVar("rotation_merge_ours", default=False)
_lock = threading.Lock()
_running = 0
_real: list[tuple[ModuleType | type, str, Any]] = []


@contextmanager
def replaced(*functions: tuple[ModuleType | type, str, Replacement]) -> Iterator[None]:
    """Within the block and its thread, other functions in the place of some of mergekit's.

    Other threads see the original functions; after the last such block the originals are restored.
    """
    global _running
    with _lock:
        if _running == 0:
            _real.extend((module, name, getattr(module, name)) for module, name, _ in functions)
            for (module, name, real), (_, _, replacement) in zip(_real, functions, strict=True):
                setattr(module, name, _switch(real, replacement))
        _running += 1
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
        with _lock:
            _running -= 1
            while _running == 0 and _real:
                module, name, real = _real.pop()
                setattr(module, name, real)


def _switch(real: Callable[..., Any], replacement: Replacement) -> Callable[..., Any]:
    @functools.wraps(real)
    def switch(*args: Any, **kwargs: Any) -> Any:
        return replacement(real, *args, **kwargs) if _ours.get() else real(*args, **kwargs)

    return switch


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
