"""`rotation-merge polish`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.averaging.polish import TOGETHER, PolishConfig
from rotation_merge.cli.options import config_of, config_options, device_option, usable_device
from rotation_merge.cli.paths import MODEL, NEW_MODEL, SAMPLE_SOURCE, writes
from rotation_merge.cli.show import Progress, json_option, print_json, say, shown
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import DATA, FOLDER, STATE, Input, Output, Store, check_output
from rotation_merge.run.data import KINDS, read_batches, unpadded

if TYPE_CHECKING:
    from rotation_merge.averaging.polish import PolishReport
    from rotation_merge.matching.teachers import AnsweredSamples
    from rotation_merge.record import MergeReport


class MultiValueCommand(click.Command):
    """Options may be followed by several values: `--teachers A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for p in self.params if isinstance(p, click.Option) and p.multiple for name in p.opts}
        result: list[str] = []
        last = ""
        for arg in args:
            if not arg.startswith("-") and last and result[-1] != last:
                result.append(last)
            elif arg.startswith("-"):
                last = arg if arg in several else ""
            result.append(arg)
        return super().parse_args(ctx, result)


@click.command(
    cls=MultiValueCommand,
    epilog="""Examples: rotation-merge polish ./merged ./polished --teachers org/a org/b;
    rotation-merge polish ./merged ./adapter --teachers org/a --data a.txt --lora 16""",
)
@click.argument("merged", type=MODEL)
@click.argument("out", type=NEW_MODEL)
@click.option("--teachers", "-t", type=MODEL, required=True, multiple=True, metavar="MODEL...", help="The parents.")
@click.option(
    "--data",
    type=SAMPLE_SOURCE,
    multiple=True,
    metavar="SOURCE...",
    help=f"Samples: one for each teacher in their order, or one for all. {KINDS}; self (if not given): each teacher's "
    "own text; synthetic: images made of noise.",
)
@config_options(PolishConfig)
@device_option("")
@json_option
@shown
@writes
def command(
    merged: str,
    out: str,
    teachers: tuple[str, ...],
    data: tuple[str, ...],
    device: str,
    as_json: bool,
    **values: Any,
) -> int:
    """Distil the teachers into MERGED for a few steps and write OUT.

    The targets of each sample are the outputs of its teacher. Teachers answer first, one at a time; their answers are
    kept in OUT.unfinished, from which an interrupted run continues. A held-out part of the samples chooses learning
    rate and step. If nothing improves, nothing is written, and the exit code is 1.

    If MERGED was merged with `heads_of: each`, each teacher in MERGED/heads trains the body under its own head.
    """
    if len(data) not in (0, 1, len(teachers)):
        raise click.UsageError(f"give --data once, or for each of the {len(teachers)} teachers")
    sources = list(data) * (len(teachers) // len(data)) if data else ["self"] * len(teachers)
    config = config_of(PolishConfig, values)
    report = polished(merged, out, teachers, sources, config, usable_device(device))
    if as_json:
        print_json({"out": out if report.gained else None, **report.to_dict()})
    else:
        text = report.verdict()
        say(f"{text[:1].upper()}{text[1:]}.")
        say(f"Written to {out}." if report.gained else "Nothing was written.", "green" if report.gained else None)
    return 0 if report.gained else 1


def polished(
    merged: str, out: str, teachers: tuple[str, ...], sources: list[str], ways: PolishConfig, device: str = "cpu"
) -> PolishReport:
    """Polish a merge into `out`; where nothing was gained, nothing is written.

    Raises:
        RotationMergeError: models, data or the place are of no use.
    """
    from rotation_merge.averaging.low_rank import with_lora
    from rotation_merge.averaging.polish import PolishOptions, SharedBody, check_trainable, polish
    from rotation_merge.model.heads import head_names, heads_in, heads_of_teachers
    from rotation_merge.model.open import open_model, parse_reference
    from rotation_merge.model.sentence import read_modules
    from rotation_merge.run.functions import load, local_path

    read = [*(Input(name, "model") for name in (merged, *teachers)), *(Input(source, DATA) for source in sources)]
    check_output(Output(out, "OUT", FOLDER), read, force=True)
    if ways.lora and not ways.merge_lora and parse_reference(merged).lora is not None:
        problem = "is a base with an adapter, so a new adapter cannot have it as its base"
        raise RotationMergeError(problem, where=merged, remedy="add '--merge-lora', or leave '--lora' out")
    heads = heads_of_teachers(heads_in(merged), [parse_reference(teacher) for teacher in teachers], merged)
    check_trainable(merged, read_modules(local_path(merged)), ways.lora if any(heads) else 0)
    progress = Progress()
    with Store(out) as work:
        work.begin("polish")
        training = f"{merged} {ways.steps} {ways.lora} {ways.learning_rate} {ways.seed}"
        state = work.file(f"{zlib.crc32(training.encode()):08x}-{STATE}")
        students = [head or merged for head in heads]
        answered = _teacher_answers(
            work.path, merged, students, teachers, sources, ways.samples, ways.length, ways.seed, device
        )
        models = {path: load(path).to(device).requires_grad_(True) for path in dict.fromkeys((merged, *students))}
        model = models[merged]
        student = with_lora(model, ways.lora, ways.seed) if ways.lora else model
        if any(heads):
            student = SharedBody(
                [models[path] for path in students], model, head_names(open_model(merged).architecture)
            )
        rates = () if ways.learning_rate is None else (ways.learning_rate,)
        new = ways.lora > 0
        options = PolishOptions(ways.steps, ways.lora, new, rates, seed=ways.seed, state=state)
        report = polish(student, answered, options, progress)
        progress.close()
        if report.gained:
            adapter = ways.lora > 0 and not ways.merge_lora
            record = _record(merged, teachers, sources, report, ways, adapter)
            _write(model if any(heads) else student, merged, out, adapter, record, {p: models[p] for p in heads if p})
    return report


def _teacher_answers(
    work: Path,
    merged: str,
    students: list[str],
    teachers: tuple[str, ...],
    sources: list[str],
    samples: int,
    length: int,
    seed: int,
    device: str,
) -> list[AnsweredSamples]:
    """The answers of every teacher; existing ones are reused.

    Args:
        students: what learns from each teacher: its classes stand in this order.
    """
    from rotation_merge.matching.teachers import AnsweredSamples, write_answers
    from rotation_merge.model.open import open_model
    from rotation_merge.model.vocabulary import check_same_tokens
    from rotation_merge.run.functions import load

    check_same_tokens(*(open_model(name, unsupported="merge") for name in (merged, *teachers)))
    result = []
    for number, (student, teacher, source) in enumerate(zip(students, teachers, sources, strict=True)):
        path, mark = work / f"answers-{number}.safetensors", f"{teacher} {source} {samples} {length} {seed}"
        if not path.exists() or AnsweredSamples(path).mark != mark:
            model = load(teacher, like=student).to(device)
            size = max(1, min(TOGETHER // len(teachers), samples // 4))
            data_set = read_batches(source, teacher, model, samples, size, length, seed + number)
            batches = [{k: v.to(device) for k, v in b.items()} for b in unpadded(data_set.batches, source)]
            write_answers(model, batches, path, mark, teacher)
            del model
        result.append(AnsweredSamples(path))
    return result


def _write(student: Any, merged: str, out: str, adapter: bool, record: MergeReport, heads: Mapping[str, Any]) -> None:
    """Write the trained model in the merge's dtype, or the adapter, atomically.

    Args:
        heads: by folder in the merge, the trained body under each teacher's head.
    """
    from rotation_merge.model.staging import HEADS, staged
    from rotation_merge.record import REPORT_FILE
    from rotation_merge.run.functions import local_path

    with staged(out) as staging:
        if adapter:
            base = os.path.abspath(merged) if os.path.exists(merged) else merged
            config = student.peft_config["default"]
            config.base_model_name_or_path, config.target_modules = base, sorted(config.target_modules)
            config.target_parameters = sorted(config.target_parameters or ()) or None
            student.save_pretrained(staging)
        else:
            model = student.merge_and_unload() if hasattr(student, "merge_and_unload") else student
            _save(model, merged, str(staging))
            for folder, headed in heads.items():
                _save(headed, folder, os.path.join(staging, HEADS, os.path.basename(folder)))
        record.write(os.path.join(staging, REPORT_FILE))
        with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
            file.write(_card(record, out, local_path(merged)))


def _save(model: Any, like: str, out: str) -> None:
    """Write a model in the dtype of another, with the other's small files."""
    from rotation_merge.model.staging import write_files
    from rotation_merge.model.writing import small_files
    from rotation_merge.run.functions import local_path, stored_dtype

    model.to(stored_dtype(like)).save_pretrained(out)
    files = small_files(local_path(like))
    write_files(out, {name: files[name] for name in files if not os.path.exists(os.path.join(out, name))})


def _record(
    merged: str, teachers: tuple[str, ...], sources: list[str], report: PolishReport, ways: PolishConfig, adapter: bool
) -> MergeReport:
    """The report on a trained model: its start, teachers and samples."""
    from rotation_merge.matching.run import Run
    from rotation_merge.model.open import parse_reference
    from rotation_merge.model.origin import origins

    run, weights = Run(), f"a LoRA of rank {ways.lora}" if ways.lora else "all weights"
    run.note(
        f"This model was **trained**: `{merged}` was distilled for {ways.steps} steps ({weights}), every sample "
        f"answered by its own teacher, by rotation_merge. {report.verdict()[:1].upper()}{report.verdict()[1:]}."
    )
    for teacher, source in zip(teachers, sources, strict=True):
        run.used(f"answers of {teacher}", source, ways.samples)
    parts = origins(dict.fromkeys(parse_reference(name) for name in (merged, *teachers)))
    relation = "adapter" if adapter else "finetune"
    return run.report(merged, "none", "", models=parts, relation=relation, base=merged)


def _card(record: MergeReport, out: str, merged: str) -> str:
    from rotation_merge.model.card import class_of, metadata, notes, section, with_metadata

    name = os.path.basename(os.path.abspath(out))
    body = f"# {name}\n\n" + "".join(f"{note}\n\n" for note in notes(record)) + section(record, name, class_of(merged))
    return with_metadata(metadata(record, {"tags": ["distillation"]}), body)
