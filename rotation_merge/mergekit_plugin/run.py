"""One merge from recipe to directory: compile, run mergekit's own `run_merge`, add the report, put it in place."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
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
from rotation_merge.mergekit_plugin.compile import compiled
from rotation_merge.mergekit_plugin.loader import StandIn
from rotation_merge.mergekit_plugin.output_check import complete, say
from rotation_merge.mergekit_plugin.recipe import Recipe, recipe_inputs, recipe_outputs, title, tuned_from
from rotation_merge.mergekit_plugin.rules import tokenizer_source
from rotation_merge.mergekit_plugin.saved_alignments import keep_alignments
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.card import add_section, origins
from rotation_merge.model.folder import fetched, folder_of
from rotation_merge.model.headers import VOCABULARIES
from rotation_merge.model.heads import with_moved_head, write_heads
from rotation_merge.model.markdown import plain
from rotation_merge.model.run_keys import mark_of, unchanged
from rotation_merge.model.sentence import in_module, write_modules
from rotation_merge.model.writing import staged
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report.integrity import Defect
from rotation_merge.run.ledger import kept_beside
from rotation_merge.workers import keep_freed_memory, listener


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
    outputs, inputs = recipe_outputs(config, out_path), recipe_inputs(config)
    for output in outputs:
        check_output(output, inputs, output.kind == FOLDER, cache=options.transformers_cache)
    with locked(*(output.path for output in outputs if output.kind in (FILE, FOLDER))):
        try:
            _run(stock, session, out_path, config_source or config.to_yaml())
        finally:
            session.run.end()


def _run(stock: Callable[..., None], session: Session, out_path: str, config_source: str) -> None:
    """`run`, once nothing speaks against writing."""
    recipe, record, options = session.recipe, session.run, session.options
    fetch_tokenizer(recipe.config, options)
    base, apart = session.models[recipe.base], dict[str, Tensor]()
    ledger = kept_beside(out_path, lambda: _mark(session), session.devices[0])
    with ledger as record.ledger, staged(out_path) as staging, _as_it_is_here(session, apart):
        with unchanged(session.models[model] for model in _read(recipe.config)):
            compiled_recipe, prepare = compiled(session)
            prepare()
            stock(compiled_recipe, staging, _quiet_about_tokenizers(recipe.config, options), config_source)
        if base.modules:
            write_modules(base.folder, staging, apart)
        if recipe.value("prove"):
            prove_files(session, staging)
        report, defects = _completed(session, staging, config_source)
    checked = [f"  check: {defect.line}" for defect in defects] or ["  check: the folder is complete"]
    say([] if options.quiet else [*closing(report, out_path), *checked])


def _completed(session: Session, staging: str, config_source: str) -> tuple[MergeReport, list[Defect]]:
    """Add to a written merge what mergekit does not write: saved alignments, the report, heads, the card's section."""
    recipe, record, config, options = session.recipe, session.run, session.recipe.config, session.options
    marks, delegate, ours = fingerprints(session), recipe.delegate.spec.name, recipe.own_method is not None
    keep_alignments(session, staging)
    notes, defects = complete(config, staging, options)
    for note in notes:
        record.note(note)
    models = origins(map(ModelReference.model_validate, marks), options.transformers_cache)
    report = record.report(recipe.base, delegate, config_source, marks, models, own_method=ours)
    report.write(os.path.join(staging, REPORT_FILE))
    if recipe.value("heads_of") == "each":
        donors = {str(model): session.models[model] for model in config.referenced_models() if model != recipe.base}
        moved = [
            with_moved_head(donor, record.folded, record.transforms_of(name), record.heads.get(name, {}))
            for name, donor in donors.items()
        ]
        write_heads(staging, moved, report, options.out_shard_size)
    if options.write_model_card:
        add_section(os.path.join(staging, "README.md"), report)
    return report, defects


def _read(config: MergeConfiguration) -> list[ModelReference]:
    """The models that a merge reads, each once: those it merges, and their bases."""
    return list(dict.fromkeys([*config.referenced_models(), *tuned_from(config).values()]))


def _mark(session: Session) -> str:
    """A stable key of a merge: the files of its models and of the recipe, the recipe, and its options."""
    config, options = session.recipe.config, session.options
    recipe, models = config.to_yaml(), [session.models[reference] for reference in _read(config)]
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

    assert session.donors is not None
    for model, donor in session.donors.by_model.items():
        applied = session.run.alignment_files.get(title(model, donor.origin))
        if applied is None or donor.whole is None:
            continue
        view, alignment = session.models[donor.origin or model].as_filed, donor.whole()
        spaces = view.architecture.spaces()
        with TemporaryFolder(place) as folder:
            moved = os.path.join(folder, "moved")
            alignment.apply(view).save_pretrained(moved)
            proof = prove(view.name, moved, any(spaces[name].head for name in alignment.transforms if name in spaces))
        if proof.failed:
            problem, remedy = f"changes the outputs of {view.name} ({proof.words})", "write it again with"
            raise AlignmentError(problem, where=applied.file, remedy=f"{remedy} 'rotation-merge align'")
        session.run.note(f"`{view.name}`, moved by {applied.file}: {proof.words}.")


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


@contextmanager
def _as_it_is_here(session: Session, apart: dict[str, Tensor]) -> Iterator[None]:
    """Replace some of mergekit's functions within the block.

    Config, card and small files are made from the recipe as the user wrote it, and its anchor, not from what it was
    compiled to, nor from a cache of merged adapters. NaN is refused; the card asks the hub for no local directory and
    escapes names for Markdown; and the results of every device are awaited.

    Args:
        apart: takes the tensors of sentence-transformers' modules, which have files of their own.
    """
    recipe, base, tell, count = session.recipe, session.models[session.recipe.base], listener(), itertools.count(1)
    stand_in = StandIn.of(recipe.base, cache=session.options.transformers_cache)
    config = recipe.config.model_copy(update={"base_model": stand_in})

    def out_config(real: Callable[..., Any], _: Any, architecture: Any, **more: Any) -> Any:
        written = real(config, architecture, **more)
        if recipe.untie:
            written.tie_word_embeddings = False
        return written

    def model_card(real: Callable[..., str], config_yaml: str, **more: Any) -> str:
        return _fenced(real(config_yaml=config_yaml, **{**more, "config": recipe.config}), config_yaml)

    def base_folder(real: Callable[..., Any], _: Any, options: MergeOptions) -> tuple[ModelReference, str]:
        folder = fetched(stand_in.model, options.transformers_cache)
        return ModelReference(model=ModelPath(path=folder)), folder

    def save_tensor(real: Callable[..., None], writer: TensorWriter, name: str, tensor: Tensor, **options: Any) -> None:
        check_merged(tensor, name)
        if in_module(name, base.modules):
            apart[name] = tensor.detach().cpu().clone()
        else:
            real(writer, name=name, tensor=tensor, **options)
        written = next(count)
        tell("writing tensors", written, max(written, len(base)))

    def architecture(real: Callable[..., Any], config: Any, options: MergeOptions) -> Any:
        return getattr(config, "_architecture", None) or real(config, options)

    of_merge: Replacements = {
        "_model_out_config": out_config,
        "generate_card": model_card,
        "_get_donor_model": base_folder,
        "MultiGPUExecutor": _with_all_results,
        "get_architecture_info": architecture,
    }
    of_card: Replacements = {
        "is_hf": lambda real, path: not os.path.exists(path) and real(path),
        "maybe_link_hf": lambda real, path: real(path) if ON_HUB.fullmatch(path) else plain(path),
    }
    with replaced((merge, of_merge), (card, of_card), (TensorWriter, {"save_tensor": save_tensor})):
        yield


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


def _fenced(text: str, recipe: str) -> str:
    """A card of mergekit's, the recipe between more backticks than it holds itself."""
    fence = "```"
    while fence in recipe:
        fence += "`"
    return text.replace(f"```yaml\n{recipe}\n```", f"{fence}yaml\n{recipe}\n{fence}", 1)


ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""Names of models on the hub."""


def _quiet_about_tokenizers(config: MergeConfiguration, options: MergeOptions) -> MergeOptions:
    """Do not let mergekit copy a tokenizer that is not there (it would log a traceback, for images too)."""
    base = config.base_model
    path = None if base is None else folder_of(base.model, options.transformers_cache)
    if path is None or any(name.startswith(VOCABULARIES) for name in os.listdir(path)):
        return options
    return options.model_copy(update={"copy_tokenizer": False})


Owner = ModuleType | type
Replacements = Mapping[str, Callable[..., Any]]
"""By name of a function what stands for it, which takes the real function, then its arguments."""

_replacements: ContextVar[Mapping[Owner, Replacements]] = ContextVar("replacements", default=MappingProxyType({}))


@contextmanager
def replaced(*owners: tuple[Owner, Replacements]) -> Iterator[None]:
    """Within the block and its thread, other functions in the place of some of mergekit's modules and classes."""
    for owner, replacements in owners:
        for name in replacements:
            _make_replaceable(owner, name)
    token = _replacements.set(dict(owners))
    try:
        yield
    finally:
        _replacements.reset(token)


def _make_replaceable(owner: Owner, name: str) -> None:
    """Put a function before one of mergekit's, which calls it, or what stands for it in this thread."""
    real = getattr(owner, name)
    if getattr(real, "_rotation_merge", None) == (owner, name):
        return

    @functools.wraps(real)
    def switch(*args: Any, **kwargs: Any) -> Any:
        replacement = _replacements.get().get(owner, {}).get(name)
        return real(*args, **kwargs) if replacement is None else replacement(real, *args, **kwargs)

    switch._rotation_merge = owner, name  # type: ignore[attr-defined]
    setattr(owner, name, switch)


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
