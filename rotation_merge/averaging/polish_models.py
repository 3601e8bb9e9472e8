"""Polish of whole models: each teacher answers its samples and is let go, then the merge learns from the answers."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotation_merge.architecture.sentence import KEY
from rotation_merge.averaging.low_rank import with_lora
from rotation_merge.averaging.polish import Polish, PolishConfig, PolishReport, SharedBody
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.files import PART
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.objective import Answered, read_answers, write_answers
from rotation_merge.model.heads import head_names, heads_of_teachers
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View, as_stored
from rotation_merge.model.vocabulary import same_tokens
from rotation_merge.model.writing import HEADS, small_files, write_files
from rotation_merge.run.data import Samples, for_each, read_samples, unpadded
from rotation_merge.run.functions import copy_parameters, in_memory, module_of, stored_dtype
from rotation_merge.workers import Progress

TOGETHER = 16
"""Examples in one batch of every teacher, of all teachers together."""


@dataclass
class PolishedModel:
    """A merge after polishing.

    Attributes:
        merged: as it was.
        under_heads: the same body under heads of teachers, as it was.
        student: what was trained: the merge, perhaps with a LoRA beside its weights.
        modules: the trained models, by the names of the views that they were.
    """

    merged: View
    under_heads: list[View]
    report: PolishReport
    student: Any
    modules: dict[str, Any]

    def merge_lora(self) -> None:
        """Merge a LoRA into the trained weights."""
        if hasattr(self.student, "merge_and_unload"):
            self.student = self.modules[self.merged.name] = self.student.merge_and_unload()

    def view(self) -> View:
        """The trained model; where nothing was gained, the merge as it was. `notes` says which."""
        given = self.merged, *self.under_heads
        if self.report.gained:
            self.merge_lora()
        result, *headed = (self._trained(view) if self.report.gained else as_stored(view) for view in given)
        heads = {os.path.basename(view.name): view for view in headed}
        return replace(result, heads=heads, notes=(self.report.verdict(),), report=None)

    def _trained(self, view: View) -> View:
        """A trained model in the dtype of the model that it was, with the small files of its folder."""
        stored = view.dtypes.values() if view.module is None else [p.dtype for p in view.module.parameters()]
        dtypes = [dtype for dtype in stored if dtype.is_floating_point]
        module = self.modules[view.name].to(view.dtype or max(dtypes, key=lambda dtype: dtype.itemsize)).eval()
        beside = view.beside if view.files is None else small_files(view.files.folder)
        return as_stored(replace(open_model(module, view.name), beside=beside))

    def write(self, folder: str) -> None:
        """Write the trained model with its heads, or its LoRA as an adapter, into a folder.

        The merge and its heads are stored models.
        """
        if hasattr(self.student, "peft_config"):
            config, base = self.student.peft_config["default"], self.merged.name
            config.base_model_name_or_path = os.path.abspath(base) if os.path.exists(base) else base
            config.target_modules = sorted(config.target_modules)
            config.target_parameters = sorted(config.target_parameters or ()) or None
            self.student.save_pretrained(folder)
            return
        self._save(self.merged, folder)
        for view in self.under_heads:
            self._save(view, os.path.join(folder, HEADS, os.path.basename(view.name)))

    def _save(self, view: View, out: str) -> None:
        """Write a trained model in the dtype of the model that it was, with its small files."""
        self.modules[view.name].to(stored_dtype(str(view.reference))).save_pretrained(out)
        files = small_files(view.folder)
        write_files(out, {name: files[name] for name in files if not os.path.exists(os.path.join(out, name))})


def polished(
    merged: View,
    teachers: Sequence[View],
    samples: Samples,
    config: PolishConfig,
    work: Path,
    *,
    state: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> PolishedModel:
    """Distil teachers into a merge for a few steps, every sample answered by its own teacher.

    Args:
        merged: where it has heads (`heads_of: each`), each of their teachers trains the body under its own.
        samples: for all teachers, or a list with those of each (`run.data.for_each`).
        work: a folder for the teachers' answers; those that are there already are used.
        state: folder for the state of unfinished training, which continues from there.

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
    if merged.config.get(KEY):
        problem = "is a sentence-transformers folder, whose modules cannot be trained"
        remedy = "leave it out of polish; merge with 'delegate: regmean' for a better average"
        raise RotationMergeError(problem, where=merged.name, remedy=remedy)
    for teacher in teachers if merged.files is not None else ():
        if teacher.files is not None and not same_tokens(merged, teacher):
            problem = f"its tokens are not those of {merged.reference}"
            remedy = "give teachers with the merge's tokenizer"
            raise RotationMergeError(problem, where=str(teacher.reference), remedy=remedy)
    with seeded(config.seed):
        answered = _answers(students, teachers, for_each(samples, len(teachers)), config, work, device)
        modules = {view.name: _in_memory(view).to(device).requires_grad_(True) for view in (merged, *students)}
        model = student = modules[merged.name]
        if config.lora:
            student = with_lora(model, config.lora, config.seed)
        if any(heads):
            student = SharedBody([modules[view.name] for view in students], model, head_names(merged.architecture))
        watch = progress or (lambda *_: None)
        report = Polish(student, answered, config, config.lora > 0, state=state, watch=watch).run()
    own_heads = [head for head in heads if head is not None]
    return PolishedModel(merged, own_heads, report, student, modules)


def _answers(
    students: Sequence[View],
    teachers: Sequence[View],
    sources: Sequence[Samples],
    config: PolishConfig,
    work: Path,
    device: str,
) -> list[Answered]:
    """The answers of every teacher, in its student's order of classes; existing ones are used."""
    answered, size = [], max(1, min(TOGETHER // len(teachers), config.samples // 4))
    for number, (student, teacher, source) in enumerate(zip(students, teachers, sources, strict=True)):
        seed, name = config.seed + number, source if isinstance(source, str | os.PathLike) else "in memory"
        mark = f"{teacher.name} {name} {config.samples} {config.length} {seed}"
        path = work / f"answers-{number}-{zlib.crc32(mark.encode()):08x}{PART}"
        if not path.exists():
            module = _in_memory(teacher, student).to(device)
            data = read_samples(teacher, source, config.samples, size, config.length, seed, module)
            write_answers(module, unpadded(data.batches, data.source), path, teacher.name)
            del module
        answered.append(read_answers(path))
    return answered


def _in_memory(view: View, like: View | None = None) -> Any:
    """A model in memory, in float32 and evaluation mode, its parameters its own.

    Args:
        like: in whose order its classes are to stand, where both name the same ones.
    """
    ordered = view if like is None else with_classes_of(view, like)
    if view.is_stored and view.files is not None and not view.untie:
        return in_memory(ordered)
    module = module_of(ordered).float()
    copy_parameters(module)
    return module
