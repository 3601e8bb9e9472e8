"""Polish of whole models: each teacher answers its samples and is let go, then the merge learns from the answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from rotation_merge.architecture.sentence import KEY
from rotation_merge.averaging.polish import (
    Polish,
    PolishConfig,
    initialise_along_gradient,
    share_body,
    split_at_random,
    with_lora,
)
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.files import Store, TemporaryFolder
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.objective import Answered, write_answers
from rotation_merge.model.adapters import WEIGHTS, Adapter
from rotation_merge.model.contents import ADAPTER_CONFIG, read_json
from rotation_merge.model.forms import restructured
from rotation_merge.model.heads import head_names, heads_of_teachers
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View, as_stored
from rotation_merge.model.vocabulary import same_tokens
from rotation_merge.run.batches import unpadded
from rotation_merge.run.data import Samples, for_each, read_samples
from rotation_merge.run.functions import architecture_of, in_memory
from rotation_merge.workers import Progress

TOGETHER = 16
"""Examples in one batch of every teacher, of all teachers together."""


def polished(
    merged: View,
    teachers: Sequence[View],
    samples: Samples,
    config: PolishConfig,
    work: Store,
    *,
    state: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Any:
    """Distil teachers into a merge for a few steps, every sample answered by its own teacher.

    Args:
        merged: where it has heads (`heads_of: each`), each of their teachers trains the body under its own.
        samples: for all teachers, or a list with those of each (`run.data.for_each`).
        work: keeps the teachers' answers; those that are there already are used.
        state: folder for the state of unfinished training, which continues from there.

    Returns:
        The trained model, its heads with it, or the LoRA that was trained beside it; where nothing was gained, the
        merge as it was. `notes` says which, and `report` is a `PolishReport`.

    Raises:
        RotationMergeError: models or samples are of no use.
    """
    if not teachers:
        raise RecipeError("no teachers are given", remedy="give the models that were merged")
    heads = heads_of_teachers(merged, teachers)
    students = [head or merged for head in heads]
    if config.lora and any(heads):
        problem = "has a separate head for each teacher, but one LoRA cannot hold them"
        raise RotationMergeError(problem, where=merged.name, remedy="train all weights, without 'lora'")
    _check_models(merged, teachers)
    with seeded(config.seed):
        answered = _answers(students, teachers, for_each(samples, len(teachers)), config, work, device)
        views = {view.name: view for view in (merged, *students)}
        modules = {name: in_memory(view, trained=True).to(device).requires_grad_(True) for name, view in views.items()}
        if config.lora:
            modules[merged.name] = with_lora(modules[merged.name], config.lora, config.seed)
        learning = [modules[view.name] for view in students]
        if any(heads):
            share_body(learning, modules[merged.name], head_names(merged.architecture))
        draw, watch = torch.Generator().manual_seed(config.seed), progress or (lambda *_: None)
        parts = [split_at_random(answers, draw) for answers in answered]
        polish = Polish(learning, parts, config, state=state, watch=watch)
        if config.lora:
            initialise_along_gradient(modules[merged.name], polish.first_gradients)
        report = polish.run()
    if config.lora and report.gained:
        student = modules[merged.name]
        if not config.merge_lora:
            return replace(_adapter(student, merged.name), notes=(report.verdict(),), report=cast(Any, report))
        modules[merged.name] = student.merge_and_unload()
    result, *headed = (
        _with_weights(view, modules[view.name]) if report.gained else as_stored(view)
        for view in (merged, *filter(None, heads))
    )
    named = {os.path.basename(view.name): view for view in headed}
    return replace(result, heads=named, notes=(report.verdict(),), report=cast(Any, report))


def _check_models(merged: View, teachers: Sequence[View]) -> None:
    """Refuse modules that cannot be trained, and teachers with other tokens."""
    if merged.config.get(KEY):
        problem = "is a sentence-transformers folder, whose modules cannot be trained"
        remedy = "leave it out of polish; merge with 'delegate: regmean' for a better average"
        raise RotationMergeError(problem, where=merged.name, remedy=remedy)
    for teacher in teachers if merged.files is not None else ():
        if teacher.files is not None and not same_tokens(merged, teacher):
            problem = f"its tokens are not those of {merged.reference}"
            remedy = "give teachers with the merge's tokenizer"
            raise RotationMergeError(problem, where=str(teacher.reference), remedy=remedy)


def _with_weights(view: View, module: Any) -> View:
    """A model with the weights of a trained module, each in the dtype that it is stored in, by the model's names."""
    weights = as_tensors(module.state_dict())
    if view.architecture.family != "unknown":
        weights = restructured(weights, architecture_of(module), view.architecture)
    weights = weights.only(view).map(lambda name, x: x.to("cpu", view.dtype or view.stored_dtypes[name]))
    trained = replace(view, tensors=view.tensors.replaced(weights), at=None)
    return as_stored(trained.blockwise(lambda *_: None, view.dtype))


def _adapter(student: Any, base: str) -> Adapter:
    """A trained LoRA, as peft writes it."""
    config = student.peft_config["default"]
    config.base_model_name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    config.target_modules = sorted(config.target_modules)
    config.target_parameters = sorted(config.target_parameters or ()) or None
    with TemporaryFolder() as folder:
        student.save_pretrained(folder)
        tensors = load_file(os.path.join(folder, WEIGHTS[0]))
        return Adapter(read_json(os.path.join(folder, ADAPTER_CONFIG)), tensors)


def _answers(
    students: Sequence[View],
    teachers: Sequence[View],
    sources: Sequence[Samples],
    config: PolishConfig,
    work: Store,
    device: str,
) -> list[Answered]:
    """The answers of every teacher, in its student's order of classes; existing ones are used."""
    answered, size = [], max(1, min(TOGETHER // len(teachers), config.samples // 4))
    for number, (student, teacher, source) in enumerate(zip(students, teachers, sources, strict=True)):
        seed, name = config.seed + number, source if isinstance(source, str | os.PathLike) else "in memory"
        part = f"answers {number} {teacher.name} {name} {config.samples} {config.length} {seed}"
        if (answers := work.get(part, mapped=True)) is None:
            module = in_memory(with_classes_of(teacher, student)).to(device)
            data = read_samples(teacher, source, config.samples, size, config.length, seed, module)
            answers = write_answers(module, unpadded(data.batches, data.source), work, part, teacher.name)
            del module
        answered.append(answers)
    return answered
