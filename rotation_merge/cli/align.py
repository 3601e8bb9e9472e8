"""`rotation-merge align`: how far apart two models are, and the donor rewritten in the anchor's coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from rotation_merge.cli.command import (
    Backend,
    Device,
    Model,
    ShardSize,
    Storage,
    cli_command,
    given,
    refuse_given,
    usable_device,
)
from rotation_merge.cli.paths import NEW_ALIGNMENT, NEW_MODEL
from rotation_merge.cli.show import Answer, Progress, Table, sentence
from rotation_merge.config import Count, Length, option
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store
from rotation_merge.matching.aligned_output import match_pair, write_aligned
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.fit import fit
from rotation_merge.matching.match import match_model
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.options import WEIGHTS, AlignConfig, FitConfig, MatchConfig
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.model.run_keys import mark_of, unchanged
from rotation_merge.model.writing import parse_size
from rotation_merge.report.compare import APART, coordinates_verdict, gaps
from rotation_merge.run.checks import check_labels
from rotation_merge.run.data import described, read_samples
from rotation_merge.run.functions import load, stored_dtype, to_stored_dtype
from rotation_merge.run.ledger import kept_beside
from rotation_merge.run.proof import Proof, prove
from rotation_merge.run.sample_kinds import ReadingConfig
from rotation_merge.workers import on_backend

SAMPLED = ("match_on", "data", "samples", "seed")
"""Options that say what chooses the maps."""


@dataclass(frozen=True)
class LearningSamplesConfig(ReadingConfig):
    """Options of reading the samples to learn from."""

    limit: Length | None = option(None, "largest number of samples to learn from")
    batch_size: Count = option(64, "examples in a batch of samples to learn from")
    length: Length = option(128, "tokens in a window of text to learn from")


@cli_command(
    "rotation-merge align org/anchor org/donor --residual rotation",
    "rotation-merge align org/anchor org/donor ./aligned --heads permutation",
    "rotation-merge align org/anchor org/donor --learn --data samples.txt --alignment learned.safetensors",
)
def command(
    anchor: Model,
    donor: Model,
    out: Annotated[str | None, NEW_MODEL] = None,
    /,
    *,
    options: AlignConfig,
    match: MatchConfig,
    learn: Annotated[bool, "then lower the loss of the models between both on --data, a few hundred"] = False,
    learning: FitConfig,
    reading: LearningSamplesConfig,
    alignment: Annotated[str | None, NEW_ALIGNMENT, "also write the transforms, for recipes' 'alignment:'"] = None,
    half: Annotated[bool, "store the maps of --alignment in half precision"] = False,
    shard_size: ShardSize = "5B",
    dtype: Storage = None,
    device: Device = "cpu",
    backend: Backend = "threads",
    verify: Annotated[bool, "--verify/--no-verify", "compare OUT's outputs with the donor's"] = True,
    by: Annotated[Literal["space", "layer"], "rows of the table"] = "space",
    progress: Progress,
) -> Answer:
    """Write DONOR in ANCHOR's coordinates to OUT; without OUT and --alignment, say how far apart the two are.

    OUT is an ordinary checkpoint with the donor's outputs, with tokenizer, config, card and report; any tool can
    average it with the anchor. OUT is complete or absent; large models are written in shards. The outputs of OUT on
    random inputs are compared with the donor's; if they differ by more than rounding, OUT is kept as OUT.rejected.
    After an interruption, matching and learning continue.

    Without OUT: distances relative to the anchor's norm, and angles in degrees between tensors as vectors, before and
    after alignment; 90 means unrelated.

    --learn starts from the matching and lowers the loss of the interpolated models by gradient descent, on a GPU in
    mixed precision. For several donors at once, see rotation_merge.fit in Python.
    """
    _check_use(learn, out, alignment, match.match_on, backend)
    place, size, (device, worker_device) = out or alignment, parse_size(shard_size), _devices(device, backend)
    pair = open_pair(anchor, donor, options, match.untie, device, watched=place is not None)
    if learn:
        learning = replace(learning, match_on=match.match_on, seed=match.seed, half=device.startswith("cuda"))
        working = _learned(pair, learning, match.data, reading, device, str(place), progress)
    else:
        working = _matched(pair, match, (device, worker_device, backend), place, progress)
    proofs, notes = list[Proof](), (*(f"Warning: {warning}" for warning in pair.warnings), *pair.notes)

    def check(staging: str) -> tuple[bool, str]:
        proofs.append(prove(str(pair.donor.reference), staging, options.shift_head))
        return not proofs[0].failed, proofs[0].words

    with working as result:  # what is unfinished stays until all is written
        if place is None:
            return _compared(pair, result, by, notes)
        if out is not None:
            view = write_aligned(pair, result, out, dtype, size, progress, check if verify else None)
            notes = (*notes, *view.notes)
        if alignment is not None:
            result.write(alignment, half)
    report, name, learned = result.known_report, str(pair.donor.reference), result.metadata.get("learned")
    before, after = report.relative_distances(name)
    facts: dict[str, Any] = {"out": out, "alignment": alignment, "before": before, "after": after}
    facts |= {"proof": asdict(proofs[0]) if proofs else None, **report.to_dict()["summary"]}
    lines = [*notes, *result.notes, sentence(report.verdict(name))]
    if learned is not None:
        facts, lines = {**facts, "learned": learned}, [*lines, sentence(learned["verdict"])]
    if out is not None:
        lines.append(f"Written to {out}; {proofs[0].words if proofs else 'its outputs were not compared'}.")
    return Answer(facts, [*lines, f"Transforms written to {alignment}." if alignment else ""])


def _check_use(learn: bool, out: str | None, alignment: str | None, match_on: str, backend: str) -> None:
    """Refuse options that would do nothing."""
    by_weights, fitted = match_on == WEIGHTS, FitConfig.options() | LearningSamplesConfig.options()
    if learn and (not (out or alignment) or not given("data")):
        raise RotationMergeError("--learn needs --data, and OUT or --alignment", remedy="name them")
    nothing, leave_out = "{} has no effect here", "leave it out"
    refuse_given(
        (not learn, [name for name, field in fitted.items() if field.command], "{} needs --learn", "add it"),
        (learn, ["samples"], "{} is for matching on activations", "give --limit for learning"),
        (out is None, ["dtype", "shard_size", "verify"], nothing, leave_out),
        (alignment is None, ["half"], nothing, leave_out),
        (bool(out or alignment), ["by"], nothing, leave_out),
        (not learn and by_weights, ["data", "samples"], "matching on weights uses no samples", "add --match-on both"),
    )
    if backend != "threads" and (learn or not by_weights):
        problem = f"--backend {backend} works for matching on weights only"
        raise RotationMergeError(problem, remedy="leave out --match-on and --learn, or --backend")


def _devices(name: str, backend: str) -> tuple[str, str]:
    """Devices for this process and for the workers of a backend, from --device.

    Raises:
        RotationMergeError: it is not there, or is none.
    """
    if backend == "threads":
        return usable_device(name), "cpu"
    if name not in ("cpu", "cuda"):
        problem = f"--backend {backend} does not take --device {name}: each worker chooses its own"
        raise RotationMergeError(problem, remedy="use --device cuda")
    return "cpu", name


@contextmanager
def _matched(
    pair: Pair, match: MatchConfig, where: tuple[str, str, str], place: str | None, progress: Progress
) -> Iterator[Alignment]:
    """The alignment by matching; unfinished work goes with the block.

    Args:
        where: device of this process and of workers, and the backend.
        place: the output that unfinished work is kept beside.
    """
    device, worker_device, backend = where
    models, names = (pair.anchor, pair.donor), (str(pair.anchor.reference), str(pair.donor.reference))
    on = [] if match.match_on == WEIGHTS else [str(getattr(match, name)) for name in SAMPLED]
    mark = partial(mark_of, models, on, on=on, options=asdict(pair.options), untie=match.untie)
    workers = on_backend(backend, worker_device)
    with kept_beside(place, mark, device) as ledger, unchanged(models), workers as over:
        find = matcher(match.match_on, *names, match.data, match.samples, match.seed, device)
        find = partial(match_model, over=over) if match.match_on == WEIGHTS else find
        yield match_pair(pair, progress, find, ledger)


@contextmanager
def _learned(
    pair: Pair, config: FitConfig, data: str, reading: ReadingConfig, device: str, place: str, progress: Progress
) -> Iterator[Alignment]:
    """The alignment by learning; an interrupted fit continues, its state goes with the block."""
    anchor, donor = str(pair.anchor.reference), str(pair.donor.reference)
    module = to_stored_dtype(load(anchor), stored_dtype(anchor)).to(device)
    samples = read_samples(anchor, data, seed=config.seed, module=module, **asdict(reading))
    if config.objective != "distill":
        check_labels(samples.batches, module, samples.task, data)

    with Store(place) as work:
        work.begin("learn")
        config = replace(config, state=work.file("state"))
        watch = lambda done, steps, _: progress("learning", done, steps)  # noqa: E731
        inputs: tuple[Any, ...] = samples.batches, pair.options, config, watch, data, pair.untie, module, [device]
        (result,) = fit(anchor, donor, *inputs).alignments
        yield replace(result, metadata={**result.metadata, **described(samples), "seed": config.seed})


def _compared(pair: Pair, alignment: Alignment, by: str, notes: tuple[str, ...]) -> Answer:
    """Distances and angles, space by space, before and after alignment."""
    measured = list(gaps(pair.architecture, *pair.matched, alignment))
    summary, names = coordinates_verdict(measured), (str(pair.anchor.reference), str(pair.donor.reference))
    facts = dict(zip(("anchor", "donor"), names, strict=True))
    fields = ("block", "space", "distance_before", "distance_after", "angle_before", "angle_after", "from_identity")
    shown = [gap for gap in measured if by == "space" or gap.kind in ("block", "model")]
    headers = ("block", "space", "distance", "aligned", "angle", "aligned", "map: distance from the identity")
    apart = pair.options.residual == "none" and measured[-1].angle_before >= APART
    lines = (
        sentence(summary),
        "The residual stream was not aligned: '--residual largest' aligns it, too." if apart else "",
        Table(headers, [[getattr(gap, field) for field in fields] for gap in shown]),
        *notes,
    )
    gaps_found = [asdict(gap) for gap in measured]
    return Answer({**facts, "summary": summary, "warnings": pair.warnings, "gaps": gaps_found}, lines)
