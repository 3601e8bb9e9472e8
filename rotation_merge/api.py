"""The functions of the Python API: align, average, measure, evaluate, transfer."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rotation_merge.averaging.config import AdapterMergeConfig as AdapterMergeConfig
from rotation_merge.averaging.config import PolishConfig, RefitConfig, numbers_for
from rotation_merge.averaging.lora import merge_adapters as merge_adapters
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.polish import PolishReport, polished
from rotation_merge.carrying.bases import Transfer
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta as Delta
from rotation_merge.carrying.transfer import carried, carry
from rotation_merge.errors import CheckpointError, RecipeError, not_written, short
from rotation_merge.errors import RotationMergeError as RotationMergeError
from rotation_merge.files import FOLDER, WORD, Output, Store, TemporaryFolder, check_output
from rotation_merge.matching.aligned_output import match_pair
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.fit import fit as fit
from rotation_merge.matching.match import Match
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.options import NOTHING, WEIGHTS, AlignConfig, MatchConfig
from rotation_merge.matching.options import FitConfig as FitConfig
from rotation_merge.matching.pair import check_pair, check_shapes, open_pair
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.average import average_views, delegate_of, python_places, recipe_of, renamed_views
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.card import notes, origins, updated_card, with_metadata
from rotation_merge.model.checkpoint import mark_of, write_notes
from rotation_merge.model.fold import unfolded_gain
from rotation_merge.model.heads import under_heads
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import ModelLike, check_names, open_model, parse_reference, paths_of, several
from rotation_merge.model.view import View, as_stored
from rotation_merge.model.vocabulary import shared_rows
from rotation_merge.model.writing import parse_size, staged
from rotation_merge.record import MergeReport
from rotation_merge.run.batches import Batch, check_labels
from rotation_merge.run.config import BarrierConfig, EvaluateConfig, MeasureConfig
from rotation_merge.run.data import Samples, for_each, listed, read_samples
from rotation_merge.run.evaluate import Curve, Scores, keep_figures, mean_figures, path, score
from rotation_merge.run.functions import in_memory, load
from rotation_merge.run.ledger import kept_beside
from rotation_merge.run.measure import measured, model_for
from rotation_merge.run.sample_kinds import SAMPLES, SELF, SOURCES
from rotation_merge.run.statistics import FORMAT, Statistics, has_format
from rotation_merge.search.config import MergeConfig as MergeConfig
from rotation_merge.search.run import merge as merge
from rotation_merge.workers import listener

LOG = logging.getLogger(__name__)


def align(
    anchor: ModelLike,
    donor: ModelLike,
    config: AlignConfig | None = None,
    *,
    match_on: str = WEIGHTS,
    samples: Samples = None,
    untie: bool = False,
    **options: Any,
) -> Alignment:
    """Align a donor to an anchor: find the transforms that bring it nearest and keep its outputs.

    Args:
        anchor, donor: folders, names on the hub, modules, or pairs of a state dict and its config; of one architecture
            and sizes; not modified. A text-only donor may be aligned to the language half of an anchor that
            also sees.
        config: which groups to use; or name its fields as options.
        match_on: `weights`; or `activations` or `both`, of both models on samples.
        samples: batches of forward's inputs, or the name of a source (a file, `self`, `synthetic`, `demo:NAME`).
        untie: give a head that shares the embedding's tensor one of its own.
        **options: fields of the config: attention, heads, ffn, scaling, residual, layers.

    Returns:
        The alignment, with `apply(donor)` for the moved donor and `report` on the alignment.

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, models that do not fit together.

    Example:
        >>> alignment = align(anchor, donor, heads="permutation")  # doctest: +SKIP
        >>> alignment.apply(donor).save_pretrained("aligned")  # doctest: +SKIP
    """
    chosen = AlignConfig.of(config, options)
    MatchConfig.options()["untie"].check("untie", untie)
    first, second = open_model(anchor, "anchor", untie=untie), open_model(donor, "donor", untie=untie)
    match = _matcher(match_on, samples, first, second)
    stored = first.files is not None and second.files is not None
    pair = open_pair(first, second, chosen, untie, watched=not stored)
    alignment = match_pair(pair, match=match)
    if second.unread and alignment.moves_streams(pair.architecture):
        further = not_written(second.unread)
        LOG.warning("%s", further)
        report = alignment.known_report
        return replace(alignment, report=replace(report, notes=[*report.notes, further]))
    return alignment


def average(
    models: Iterable[ModelLike],
    method: str = "linear",
    *,
    weights: Sequence[float] | None = None,
    samples: Samples = None,
    statistics: Sequence[Statistics | str | os.PathLike[str]] | None = None,
    limit: int = SAMPLES,
    seed: int = 0,
    **parameters: Any,
) -> View:
    """Average models in shared coordinates with any delegate that recipes can name.

    Args:
        models: views (`Alignment.apply`, `Alignment.apply_anchor`), or models as `align` takes them; at least one. The
            first is the base where the method merges changes of one; the result has its names, config and dtypes.
        method: `linear`, `slerp`, `ties`, `task_arithmetic`, ... of mergekit; `regmean`, `fisher`, `refit`,
            `wudi`, `tsv`, `iso`, `ot_fusion` of our own.
        weights: one for each model. None: all equal.
        samples: data for `regmean`, `fisher` (measured), `refit` and `ot_fusion` (run): batches of forward's
            inputs for all models, or for each model a list of batches or the name of a source (a file, `self`,
            `synthetic`, `demo:NAME`).
        statistics: of each model, instead of samples: results of `measure`, or its files.
        limit, seed: of sources by name at most so many examples; of everything random.
        **parameters: of the method, such as `t` or `density`; `lambda_` stands for `lambda`. `exclude` and `heads_of`
            as in recipes: with `heads_of="each"` the result's `heads` are the merged body under the heads of all models
            but the first, by the names of their folders.

    Returns:
        A lazy view: tensors are merged one by one, in float32 at least, and rounded once; `refit` solves the whole
        model when the first is asked for.

    Raises:
        RecipeError: the method or a parameter does not exist, or a required input is missing.
        CheckpointError: the models do not compute alike, or their tensors differ in names or shapes.
    """
    for name, option, value in (("limit", "samples", limit), ("seed", "seed", seed)):
        MeasureConfig.options()[option].check(name, value)
    delegate, views = delegate_of(method), _opened(models)
    kind = delegate if isinstance(delegate, OwnMethod) else OwnMethod
    shares = _shares(weights, len(views))
    each_head = parameters.get("heads_of") == "each"
    if kind.whole_models and each_head:
        raise RecipeError("'heads_of: each' with refit needs files", remedy="write a recipe for mergekit-yaml")
    parameters |= {"samples": limit} if kind.whole_models else {}
    opened = renamed_views(views)
    _check_folded(opened)
    _check_sources(method, kind, statistics is not None, samples is not None)
    sources, measured = [] if samples is None else for_each(samples, len(opened)), list[Statistics]()
    if kind.statistics and statistics is not None:
        measured = _opened_statistics(statistics, kind.statistics, views, opened)
    elif kind.statistics:
        config = MeasureConfig.of(None, {"kinds": (kind.statistics,), "samples": limit, "seed": seed})
        measured = [measure(*each, config) for each in zip(opened, sources, strict=True)]
    if kind.on_samples and not kind.whole_models and sources:
        sources = _pool(opened, method, sources, limit, seed)
    with python_places():
        merged = average_views(opened, recipe_of(method, opened, parameters, shares), measured, sources, seed)
    merged = replace(merged, name=views[0].name)
    return replace(merged, heads=under_heads(merged, views[1:])) if each_head else merged


def _check_sources(method: str, kind: Any, statistics: bool, samples: bool) -> None:
    """Refuse statistics and samples that a method does not take, and none where it needs them.

    Args:
        kind: the class of the method.
        statistics, samples: whether they are given.
    """
    takes = {"statistics": kind.statistics, "samples": kind.statistics or kind.on_samples}
    for name, given in (("statistics", statistics), ("samples", samples)):
        if given and not takes[name]:
            raise RecipeError(f"'{name}' have no effect with {method}", remedy="leave them out")
    if kind.statistics and not (statistics or samples):
        remedy = "add 'samples', or 'statistics' that rotation_merge.measure gave"
        raise RecipeError(f"{method} needs samples or statistics of the models", remedy=remedy)


def _opened(models: Iterable[ModelLike]) -> list[View]:
    """Models that may be averaged as they are, which have the same tensors.

    Raises:
        CheckpointError: there are none, or their tensors differ in names.
    """
    views = [as_stored(open_model(model)) for model in several(models)]
    if not views:
        raise RecipeError("no models are given", remedy="give one model or more")
    for view in views[1:]:
        if odd := sorted((set(views[0]) ^ set(view)) - {*views[0].unread, *view.unread}):
            remedy = "average models of one class; where a stream is rotated or a head untied, use apply_anchor(anchor)"
            raise CheckpointError(f"tensor '{odd[0]}' is only in one of the models", where=view.name, remedy=remedy)
    return views


def _shares(weights: Sequence[float] | None, count: int) -> list[dict[str, float]]:
    """The parameters of each model: its weight, if they are given."""
    if weights is None:
        return [{}] * count
    shares = numbers_for(weights, count, "model")
    if abs(sum(shares)) < 1e-12:
        raise RecipeError("the weights' sum is zero", remedy="give weights whose sum is not zero")
    return [{"weight": share} for share in shares]


def _pool(models: Sequence[View], method: str, sources: Sequence[Samples], limit: int, seed: int) -> list[Batch]:
    """The samples that activations of all models are compared on.

    Raises:
        RecipeError: models have samples of their own, or other tokens.
    """
    first, *further = sources
    if any(source is not first for source in further):
        problem = f"delegate {method} compares activations on the same samples, but models have their own 'data'"
        raise RecipeError(problem, remedy="write 'data' once, under the recipe's parameters")
    base = models[0]
    for view in models[1:]:
        if shared_rows([base, view]) is not None:
            problem = f"its tokens are not those of {base.name}, but all models run on the same token ids"
            raise RecipeError(problem, where=view.name, remedy="use another method")
    return read_samples(base, first, limit, seed=seed).batches


def _check_folded(models: Sequence[View]) -> None:
    """Check that the norm gains that one view folds are folded in all models.

    Raises:
        CheckpointError: names a model and a gain that is not.
    """
    for folded, model in itertools.product(models, repeat=2):
        gain = unfolded_gain(model.architecture, model.tensors, folded.folded)
        if gain is not None:
            problem = f"'{gain}' is not folded into its readers, as in the view of {folded.name}"
            remedy = "take alignment.apply_anchor(anchor) of the alignment that rotated the stream"
            raise CheckpointError(problem, where=model.name, remedy=remedy)


def _opened_statistics(statistics: Any, kind: str, views: Sequence[View], models: Sequence[View]) -> list[Statistics]:
    """The statistics of each model that a method averages by, as values or files.

    Args:
        models: the views with distinct names.

    Raises:
        RecipeError: there are too few, or too many.
        StatisticsError: they belong to other weights, or lack an entry that the method needs.
    """
    parts = several(statistics, "statistics", (Statistics,))
    if len(parts) != len(models):
        problem = f"{len(parts)} statistics for {len(models)} models"
        raise RecipeError(problem, remedy="give those of each model, in their order")
    opened = [part if isinstance(part, Statistics) else Statistics.open(part) for part in parts]
    for view, model, part in zip(views, models, opened, strict=True):
        moved = view.identity() or model.fingerprint
        mark = moved if moved == part.metadata.get("fingerprint") else model.fingerprint
        part.check(kind, mark, model.name, "measure it: rotation_merge.measure(model, ...)")
    return opened


def measure(
    model: ModelLike,
    samples: Samples = SELF,
    config: MeasureConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    by_layer: bool | None = None,
    force: bool = False,
) -> Statistics:
    """Measure a model's statistics, for `average` by `regmean` or `fisher`.

    Args:
        model: as `align` takes it, or a view.
        samples: batches of forward's inputs, or the name of a source (a file, `self`, `synthetic`, `demo:NAME`).
        out and all others: as of `rotation-merge measure`, of a stored model; without `out` all stays in memory.

    Returns:
        The statistics, whose `save(path)` writes the file that recipes take.

    Raises:
        RotationMergeError: the model or the samples are of no use, or nothing can be written there.
    """
    opened, config, device = open_model(model), MeasureConfig.of(config), usable_device(device)
    source = os.fspath(samples) if isinstance(samples, str | os.PathLike) else ""
    if out is not None:
        written = Output(os.fspath(out), wrote=lambda file: has_format(file, FORMAT), beside=True)
        check_output(written, _names([str(opened.reference)], [samples]), force)
    module = model_for(opened, config, source, device, by_layer)
    limit = config.samples or (SAMPLES if source in SOURCES else None)
    data = read_samples(opened, samples, limit, config.batch_size, config.length, config.seed, module)
    if config.labels == "data":
        check_labels(data.batches, module, data.task, data.source)
    return measured(as_stored(opened), module, data, config, None if out is None else Path(out), listener(), device)


def evaluate(
    model: ModelLike, samples: Samples, config: EvaluateConfig | None = None, *, device: str = "cpu", keep: bool = False
) -> Any:
    """Loss of a model on samples and, depending on their labels, accuracy or correlations.

    Args:
        model: as `align` takes it, or a view; or a list of models; their classes are put in the first one's order.
        samples: batches of forward's inputs, with `labels` where there are any, or the name of a source; with a list of
            models, the names of several.
        device, keep: as of `rotation-merge evaluate`.

    Returns:
        The figures by name, `error` being the loss's standard error; of a list of models a row for each of them and
        each source, and for the mean over several.

    Raises:
        RotationMergeError: the model or the samples are of no use, or nothing can be scored on them.
    """
    config, device, rows = EvaluateConfig.of(config), usable_device(device), list[dict[str, Any]]()
    single = not isinstance(model, list)
    models, sources = ([model], [samples]) if single else (model, several(samples, "samples", (str, os.PathLike)))
    places: list[Any] = [os.fspath(x) if isinstance(x, str | os.PathLike) else open_model(x) for x in models]
    for place in places:
        stored, first = isinstance(place, str), places[0]
        module = load(place, like=first) if stored else in_memory(with_classes_of(place, open_model(first)))
        module.to(device)
        sets = list[Scores]()
        for source in sources:
            data = read_samples(place, source, config.limit, config.batch_size, config.length, module=module)
            sets.append(score(module, data))
            figures = {"loss": sets[-1].loss, **sets[-1].figures}
            facts = {"model": str(place), "data": str(source), "task": data.task, "examples": data.examples}
            rows.append({**facts, **mean_figures(sets[-1:])})
            if keep:
                keep_figures(str(place), "pixel_values" in data.batches[0], facts, figures)
        of_model = rows[-len(sets) :]
        if len(sets) > 1 and len({row["task"] for row in of_model}) == 1:
            facts = {
                **of_model[0],
                "data": f"mean of {len(sets)}",
                "examples": sum(row["examples"] for row in of_model),
            }
            rows.append({**facts, **mean_figures(sets)})
    return mean_figures(sets) if single else rows


def refit(
    models: Iterable[ModelLike],
    samples: Samples = SELF,
    config: RefitConfig | None = None,
    weights: Sequence[float] | None = None,
    exclude: Sequence[str] = (),
) -> View:
    """Average models by solving the merge's linear maps, layer by layer, from its own inputs; the anchor comes first.

    Args:
        models, weights, samples: as of `average`.
        exclude: parts of names of tensors that stay the first model's.

    Returns:
        A lazy view: all maps are solved when the first tensor is asked for.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    values = {name: value for name, value in vars(RefitConfig.of(config)).items() if value is not None}
    values |= {"exclude": exclude if isinstance(exclude, str) else ",".join(exclude)} if exclude else {}
    return average(models, "refit", weights=weights, samples=samples, limit=values.pop("samples"), **values)


def polish(
    merged: ModelLike,
    teachers: Sequence[ModelLike],
    samples: Samples = SELF,
    config: PolishConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    force: bool = False,
) -> View | Adapter:
    """Distil the merged models into the merge for a few steps, every sample answered by its own teacher.

    Answers wait in a folder for temporary files, or beside `out`, so that one model is in memory at a time.

    Args:
        merged: as `align` takes models, or a view.
        teachers: the models that were merged. Where the merge has `heads` (`heads_of: each`), in its folder or as a
            view, each of those trains the body under its own head.
        samples: for all teachers or a list with those of each, as of `average`.
        out, device, force: as of `rotation-merge polish`, for stored models; without `out` a LoRA is merged.

    Returns:
        The trained model, or the adapter; where held-out samples gain nothing, the merge as it was. `notes` and
        `report` say which. `heads` of a model holds the same body under the head of each teacher, by the teacher's
        name, and is written beside it.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    config, device = PolishConfig.of(config), usable_device(device)
    if out is None:
        opened, *parents = map(open_model, (merged, *several(teachers)))
        with TemporaryFolder() as folder:
            inputs = opened, parents, samples, replace(config, merge_lora=True), Store(f"{folder}/out")
            return polished(*inputs, device=device, progress=listener())
    names, place, sources = paths_of([merged, *teachers]), os.fspath(out), for_each(samples, len(teachers))
    check_output(Output(place, FOLDER), _names(names, sources), force)
    if config.lora and not config.merge_lora and parse_reference(names[0]).lora is not None:
        problem = "is a base with an adapter, so a new adapter cannot have it as its base"
        raise RotationMergeError(problem, where=names[0], remedy="add '--merge-lora', or leave '--lora' out")
    opened, *parents = (open_model(name, unsupported="merge") for name in names)
    with Store(place) as work:
        inputs, state = (opened, parents, sources, config, work), work.path / "state"
        result = polished(*inputs, state=state, device=device, progress=listener())
        if result.report.gained:
            record = _training_record(names, sources, result.report, config)
            with staged(place) as staging:
                result.write(staging)
                write_notes(staging, record, _training_card(record, place, opened))
    return result


def _training_record(
    names: Sequence[str], sources: Sequence[Any], report: PolishReport, config: PolishConfig
) -> MergeReport:
    """The report on a trained model: its start, teachers and samples."""
    run, (merged, *teachers) = Run(), names
    weights = f"a LoRA of rank {config.lora}" if config.lora else "all weights"
    verdict = report.verdict()
    run.note(
        f"This model was **trained**: `{merged}` was distilled for {config.steps} steps ({weights}), every sample "
        f"answered by its own teacher, by rotation_merge. {verdict[:1].upper()}{verdict[1:]}."
    )
    for teacher, source in zip(teachers, sources, strict=True):
        run.used(f"answers of {teacher}", str(source), config.samples)
    parts = origins(dict.fromkeys(map(parse_reference, names)))
    relation = "adapter" if config.lora and not config.merge_lora else "finetune"
    return run.report(merged, "none", "", models=parts, relation=relation, base=merged)


def _training_card(record: MergeReport, out: str, merged: View) -> str:
    """A model card for a trained model."""
    name = os.path.basename(os.path.abspath(out))
    text = with_metadata({"tags": ["distillation"]}, "\n\n".join([f"# {name}", *notes(record)]))
    return updated_card(text, record, name, merged.config)


def barrier(anchor: ModelLike, donor: ModelLike, samples: Samples, config: BarrierConfig | None = None) -> Curve:
    """Loss (and accuracy) of the models on the straight path from an anchor to a donor, in memory.

    Args:
        anchor, donor: in one set of coordinates: `alignment.apply_anchor(anchor)` and `alignment.apply(donor)`, or
            models as they are. Judged in float32, their weights as they would be stored.
        samples: with labels, where the model is no language model; batches or the name of a source.

    Returns:
        The curve; `barrier()` is its largest excess over the straight line between the ends' losses, in nats.

    Raises:
        RotationMergeError: the models do not fit together, or the samples are of no use.
    """
    config = BarrierConfig.of(config)
    first, second = open_model(anchor), open_model(donor)
    check_pair(first, second, NOTHING, excluded=lambda _: True)
    _check_folded([first, second])
    check_shapes(first, second, remedy="bring the models to one vocabulary and one size first")
    ends = in_memory(first), in_memory(with_classes_of(second, first))
    data = read_samples(first, samples, config.limit, config.batch_size, config.length, module=ends[0])
    return path(*ends, data, config.points, "path")


def _names(models: Sequence[Any], sources: Sequence[Any]) -> list[str]:
    """The models and files of samples that are not in memory, by name."""
    files = [source for source in sources if not (isinstance(source, str) and WORD.fullmatch(source))]
    return [os.fspath(name) for name in (*models, *files) if isinstance(name, str | os.PathLike)]


def usable_device(name: str) -> str:
    """The device of a name; `auto`: the first GPU, if there is one.

    Raises:
        RotationMergeError: it is not there, or is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RotationMergeError(f"device '{name}' cannot be used", remedy="use --device cpu, or auto") from error
    return name


def transfer(
    tuned: ModelLike,
    old: ModelLike,
    new: ModelLike,
    config: TransferConfig | None = None,
    *,
    samples: Samples = None,
    out: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5B",
    device: str = "cpu",
    force: bool = False,
    **options: Any,
) -> View | Adapter:
    """Carry the change of a fine-tune or an adapter from an old base to a new one.

    By weights (the default) the old base is aligned to the new one, and the change with it: W' = W_new + scale L
    (W_tuned - W_old) Rᵀ (Update your transformer to the latest release, 2025). Other methods run the models on samples.

    Args:
        tuned: a fine-tune of `old`, as `align` takes models (also `base+adapter`), or a folder of peft with an adapter
            of it; not modified.
        old, new: bases of one architecture; not modified.
        config: how; or name its fields, and those of `AlignConfig`, as options. Without options of matching, between
            bases that share their coordinates, nothing is matched: the change is added as it is.
        samples: batches of forward's inputs, or the name of a source, that a change is solved from and judged by, and
            of `match_on` other than weights; or the number of them, as in the config. None: `data` of the config.
        out: a folder to write to; with this and all others as of `rotation-merge carry`.

    Returns:
        The new base with the carried change, of weights lazily; its norms stay as they are. Of an adapter, or with a
        `rank`: an adapter of the new base. Either is written by its `save_pretrained(folder)`, and has `notes` and
        `report`; where samples judged, `report.lift` has the recovered lift.

    Raises:
        RotationMergeError: unknown options or some without effect, an unsupported architecture, tensors that do not
            fit.
    """
    chosen, size = _checked_config(TransferConfig.of(config, options), old), parse_size(max_shard_size)
    tuned = os.fspath(tuned) if isinstance(tuned, os.PathLike) else tuned
    if out is not None:
        source = chosen.data if samples is None else samples
        check_output(Output(os.fspath(out), FOLDER), _names([tuned, old, new], [source]), force)
    device, first, second = usable_device(device), open_model(new, "new"), open_model(old, "old")
    work = tuned if is_adapter(tuned) else open_model(tuned, "tuned", any_base=True)
    if isinstance(work, View) and None in (first.files, work.files):
        check_names(first, work)
    chosen, batches = _with_samples(chosen, samples)
    mark = partial(_transfer_mark, first, second, work, chosen)
    with kept_beside(None if out is None else os.fspath(out), mark, device) as ledger:
        more: dict[str, Any] = {"device": device, "dtype": dtype, "force": force, "ledger": ledger}
        more |= {"watched": out is not None, "samples": batches, "progress": listener()}
        job = Transfer.of(work, second, first, chosen, **more)
        if out is not None:
            return carry(job, os.fspath(out), size, listener())
        value = carried(job, progress=listener())
    if isinstance(value, Adapter) and first.files is None:
        base = getattr(new, "name_or_path", None) or None
        return replace(value, config={**value.config, "base_model_name_or_path": base})
    return value


def _transfer_mark(new: View, old: View, work: Any, config: TransferConfig) -> str:
    """A key of all inputs and options that matching depends on."""
    sampled = [config.data, str(config.sample_count), str(config.seed)]
    on = [] if config.matched_on == WEIGHTS else [str(config.matched_on), *sampled]
    name = str(work.reference) if isinstance(work, View) else str(work)
    return mark_of((new, old), [*on, name], on=on, options=config.match, lora=config.rank, untie=config.untie)


def _with_samples(config: TransferConfig, samples: Samples | int) -> tuple[TransferConfig, Samples]:
    """The config with the source or the number of samples, and those that are in memory."""
    if samples is None or type(samples) is int:
        return replace(config, samples=config.samples if samples is None else samples), None
    if isinstance(samples, str | os.PathLike):
        return replace(config, data=os.fspath(samples)), None
    return replace(config, data="samples in memory"), listed(samples)


def _checked_config(config: TransferConfig, old: ModelLike) -> TransferConfig:
    """The config, its alignment, where one is given, checked against the old base.

    Raises:
        RecipeError: an option has no effect, or the alignment is none.
        AlignmentError: it was made for another donor.
    """
    config.check_use()
    alignment = config.alignment
    if isinstance(alignment, Alignment) and alignment.basis is not None:
        alignment.check_donor(old)
    elif not isinstance(alignment, Alignment | str | os.PathLike | None):
        problem = f"option 'alignment' is {short(repr(alignment))}"
        raise RecipeError(problem, remedy="it must be an Alignment of old to new, or its file")
    return replace(config, alignment=os.fspath(alignment)) if isinstance(alignment, os.PathLike) else config


def _matcher(how: str, samples: Samples, anchor: View, donor: View) -> Match:
    """The function that matches the donor to the anchor.

    Raises:
        RecipeError: the method does not exist, or a required input is missing.
    """
    MatchConfig.options()["match_on"].check("match_on", how)
    if how == WEIGHTS and samples is not None:
        raise RecipeError("matching on weights uses no samples", remedy="add match_on='both', or leave them out")
    if how != WEIGHTS and samples is None:
        problem = f"match_on='{how}' runs the models on samples"
        raise RecipeError(problem, remedy="give 'samples': batches of what their forward takes, or a source")
    return matcher(how, anchor, donor, listed(samples))
