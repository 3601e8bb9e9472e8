"""`rotation-merge align`: how far apart two models are, and the donor rewritten in the anchor's coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from pydantic.dataclasses import dataclass

from rotation_merge.cli.options import (
    THREADS,
    backend_option,
    config_of,
    config_options,
    device_option,
    devices,
    given,
    matching_options,
    sentence,
    storage_options,
)
from rotation_merge.cli.paths import MODEL, NEW_ALIGNMENT, NEW_MODEL, SAMPLE_SOURCE, writes
from rotation_merge.cli.show import Answer, Progress, say, shown, table
from rotation_merge.config import Count, Length, option
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import WEIGHTS, AlignConfig, FitConfig, MatchConfig
from rotation_merge.model.writing import parse_size
from rotation_merge.run.sample_kinds import ReadingConfig

if TYPE_CHECKING:
    from rotation_merge.matching.alignment import Alignment
    from rotation_merge.matching.pair import Pair
    from rotation_merge.run.proof import Proof

USES_SAMPLES = "add --match-on both, or activations, or --learn"
SAMPLED = ("match_on", "data", "samples", "seed")
"""Options that say what chooses the maps."""


@dataclass(frozen=True)
class LearningSamplesConfig(ReadingConfig):
    """Options of reading the samples to learn from."""

    limit: Length | None = option(None, "largest number of samples to learn from")
    batch_size: Count = option(64, "examples in a batch of samples to learn from")
    length: Length = option(128, "tokens in a window of text to learn from")


@click.command(
    epilog="""Examples: rotation-merge align org/anchor org/donor --residual rotation;
    rotation-merge align org/anchor org/donor ./aligned --heads permutation;
    rotation-merge align org/anchor org/donor --learn --data samples.txt --alignment learned.safetensors"""
)
@click.argument("anchor", type=MODEL)
@click.argument("donor", type=MODEL)
@click.argument("out", type=NEW_MODEL, required=False)
@matching_options
@config_options(MatchConfig, *SAMPLED, types={"data": SAMPLE_SOURCE})
@click.option("--learn", is_flag=True, help="Then lower the loss of the models between both on --data, a few hundred.")
@config_options(FitConfig)
@config_options(LearningSamplesConfig)
@click.option(
    *("--alignment", "alignment_file"),
    type=NEW_ALIGNMENT,
    metavar="FILE",
    help="Also write the transforms, for recipes' 'alignment:'.",
)
@click.option("--half", is_flag=True, help="Store the maps of --alignment in half precision.")
@storage_options("the donor's")
@device_option(" to compute on; learning on a GPU is in mixed precision")
@backend_option
@click.option("--verify/--no-verify", default=True, help="Compare OUT's outputs with the donor's.")
@click.option(
    "--by", type=click.Choice(["space", "layer"]), default="space", show_default=True, help="Rows of the table."
)
@shown
@writes
@click.pass_context
def command(
    context: click.Context,
    anchor: str,
    donor: str,
    out: str | None,
    alignment_file: str | None,
    learn: bool,
    device: str,
    backend: str,
    **values: Any,
) -> Answer:
    """Write DONOR in ANCHOR's coordinates to OUT; without OUT and --alignment, say how far apart the two are.

    OUT is an ordinary checkpoint with the donor's outputs, with tokenizer, config, card and report; any tool can
    average it with the anchor. OUT is complete or absent; large models are written in shards. The outputs of OUT on
    random inputs are compared with the donor's; if they differ by more than rounding, OUT is kept as OUT.rejected.
    After an interruption, matching and learning continue.

    Without OUT: distances relative to the anchor's norm, and angles in degrees between tensors as vectors, before and
    after alignment; 90 means unrelated.

    --learn starts from the matching and lowers the loss of the interpolated models by gradient descent. For several
    donors at once, see rotation_merge.fit in Python.
    """
    from rotation_merge.matching.pair import open_pair

    _check_use(context, learn, values["match_on"], backend)
    learning = config_of(FitConfig, dict(values)) if learn else None
    options, reading = config_of(AlignConfig, values), config_of(LearningSamplesConfig, values)
    match, place = config_of(MatchConfig, values), out or alignment_file
    device, worker_device = devices(device, backend)
    storage = values["dtype"], parse_size(values["shard_size"])
    pair, progress = open_pair(anchor, donor, options, match.untie, device, watched=place is not None), Progress()
    if learning is not None:
        learning = replace(learning, match_on=match.match_on, seed=match.seed, half=device.startswith("cuda"))
        working = _learned(pair, learning, match.data, reading, device, out or str(alignment_file))
    else:
        working = _matched(pair, match, (device, worker_device, backend), place, progress)
    proof: Proof | None = None
    left_out: tuple[str, ...] = ()
    with working as alignment:  # what is unfinished stays until all is written
        if out is not None:
            proof, left_out = _written(pair, alignment, out, storage, progress, values["verify"])
        if alignment_file is not None:
            alignment.write(alignment_file, values["half"])
        answer = _compared(pair, alignment, values["by"]) if place is None else None
    progress.close()
    return answer or _report(pair, alignment, {"out": out, "alignment": alignment_file}, proof, left_out)


def _report(
    pair: Pair, alignment: Alignment, files: dict[str, str | None], proof: Proof | None, left_out: tuple[str, ...]
) -> Answer:
    """What alignment did, and which files were written."""
    report, name, learned = alignment.known_report, str(pair.donor.reference), alignment.metadata.get("learned")
    out, file = files.values()
    before, after = report.relative_distances(name)
    facts: dict[str, Any] = {**files, "before": before, "after": after, "proof": proof and asdict(proof)}
    facts |= report.to_dict()["summary"] | ({} if learned is None else {"learned": learned})

    def show() -> None:
        _show_notes(pair, *alignment.notes, *left_out)
        for verdict in (report.verdict(name), *([] if learned is None else [learned["verdict"]])):
            say(sentence(verdict))
        if out is not None:
            words = proof.words if proof is not None else f"'rotation-merge verify {name} {out}' checks its outputs"
            say(f"Written to {out}; {words}.", "green")
        if file is not None:
            say(f"Transforms written to {file}.", "green")

    return Answer(facts, show)


def _show_notes(pair: Pair, *notes: str) -> None:
    for warning in pair.warnings:
        say(f"Warning: {warning}", "yellow")
    for line in (*pair.notes, *notes):
        say(line)


def _check_use(context: click.Context, learn: bool, match_on: str, backend: str) -> None:
    """Refuse options that would do nothing."""
    out, file, by_weights = context.params["out"], context.params["alignment_file"], match_on == WEIGHTS
    place, learning = out or file, FitConfig.options() | LearningSamplesConfig.options()
    if learn and (place is None or not given(context, "data")):
        raise RotationMergeError("--learn needs --data, and OUT or --alignment", remedy="name them")
    fitting = [name for name, described in learning.items() if described.command]
    nothing, leave_out = "{} has no effect here", "leave it out"
    for holds, names, problem, remedy in (
        (not learn, fitting, "{} needs --learn", "add it, or leave the option out"),
        (learn, ["samples"], "{} is for matching on activations", "give --limit for learning"),
        (out is None, ["dtype", "shard_size", "verify"], nothing, leave_out),
        (file is None, ["half"], nothing, leave_out),
        (place is not None, ["by"], nothing, leave_out),
        (not learn and by_weights, ["data", "samples"], "matching on weights uses no samples", USES_SAMPLES),
    ):
        if holds and (flags := given(context, *names)):
            raise RotationMergeError(problem.format(flags[0]), remedy=remedy)
    if backend != THREADS and (learn or not by_weights):
        problem = f"--backend {backend} works for matching on weights only"
        raise RotationMergeError(problem, remedy="leave out --match-on and --learn, or --backend")


@contextmanager
def _matched(
    pair: Pair, match: MatchConfig, how: tuple[str, str, str], place: str | None, progress: Progress
) -> Iterator[Alignment]:
    """The alignment by matching; unfinished work goes with the block.

    Args:
        how: device of this process and of workers, and the backend.
        place: the output that unfinished work is kept beside.
    """
    from rotation_merge.matching.aligned_output import match_pair
    from rotation_merge.matching.match import match_model
    from rotation_merge.matching.match_on import matcher
    from rotation_merge.model.run_keys import mark_of, unchanged
    from rotation_merge.run.ledger import kept_beside
    from rotation_merge.workers import on_backend

    device, worker_device, backend = how
    models, names = (pair.anchor, pair.donor), (str(pair.anchor.reference), str(pair.donor.reference))
    on = [] if match.match_on == WEIGHTS else [str(getattr(match, name)) for name in SAMPLED]
    mark = mark_of(models, on, on=on, options=asdict(pair.options), untie=match.untie)
    workers = on_backend(backend, worker_device)
    with kept_beside(place, lambda: mark, device) as ledger, unchanged(models), workers as over:
        find = matcher(match.match_on, *names, match.data, match.samples, match.seed, device)
        find = partial(match_model, over=over) if match.match_on == WEIGHTS else find
        yield match_pair(pair, progress, find, ledger)


@contextmanager
def _learned(
    pair: Pair, config: FitConfig, data: str, reading: ReadingConfig, device: str, place: str
) -> Iterator[Alignment]:
    """The alignment by learning; an interrupted fit continues, its state goes with the block."""
    import tqdm

    from rotation_merge.files import Store
    from rotation_merge.matching.fit import fit
    from rotation_merge.run.checks import check_labels
    from rotation_merge.run.data import described, read_samples
    from rotation_merge.run.functions import load, stored_dtype, to_stored_dtype

    anchor, donor = str(pair.anchor.reference), str(pair.donor.reference)
    module = to_stored_dtype(load(anchor), stored_dtype(anchor)).to(device)
    data_set = read_samples(anchor, data, seed=config.seed, module=module, **asdict(reading))
    if config.objective != "distill":
        check_labels(data_set.batches, module, data_set.task, data)
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm.tqdm(desc="Learning", total=config.steps, disable=None))
        work = stack.enter_context(Store(place))
        work.begin("learn")
        config = replace(config, state=work.file("state"))

        def watch(done: int, _: int, figures: dict[str, float]) -> None:
            bar.update(done - bar.n)
            bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()})

        inputs = data_set.batches, pair.options, config, watch, data
        result = fit(anchor, donor, *inputs, pair.untie, module, [device])
        (alignment,) = result.alignments
        facts = {**described(data_set), "seed": config.seed}
        yield replace(alignment, metadata={**alignment.metadata, **facts})


def _written(
    pair: Pair, alignment: Alignment, out: str, storage: tuple[str | None, int], progress: Progress, verify: bool
) -> tuple[Proof | None, tuple[str, ...]]:
    """Write the aligned donor; gives the proof that its outputs are the donor's, and what was not written.

    Args:
        storage: dtype, and the size of a file of weights.
    """
    from rotation_merge.matching.aligned_output import write_aligned
    from rotation_merge.run.proof import prove

    proofs: list[Proof] = []

    def check(staging: str) -> tuple[bool, str]:
        proofs.append(prove(str(pair.donor.reference), staging, pair.options.shift_head))
        return not proofs[0].failed, proofs[0].words

    view = write_aligned(pair, alignment, out, *storage, progress, check if verify else None)
    return proofs[0] if proofs else None, view.notes


def _compared(pair: Pair, alignment: Alignment, by: str) -> Answer:
    """Distances and angles, space by space, before and after alignment."""
    from rotation_merge.report.compare import APART, coordinates_verdict, gaps

    measured = list(gaps(pair.architecture, *pair.matched, alignment))
    summary = coordinates_verdict(measured)
    names = {"anchor": str(pair.anchor.reference), "donor": str(pair.donor.reference)}
    facts = {**names, "summary": summary, "warnings": pair.warnings, "gaps": [asdict(gap) for gap in measured]}

    def show() -> None:
        rows = [
            (
                *(gap.block, gap.space, f"{gap.distance_before:.4g}", f"{gap.distance_after:.4g}"),
                *(f"{gap.angle_before:.3g}", f"{gap.angle_after:.3g}"),
                ", ".join(f"{part} {value:.2g}" for part, value in gap.from_identity.items()),
            )
            for gap in measured
            if by == "space" or gap.kind in ("block", "model")
        ]
        say(sentence(summary))
        if pair.options.residual == "none" and measured[-1].angle_before >= APART:
            say("The residual stream was not aligned: '--residual largest' aligns it, too.")
        headers = ("block", "space", "distance", "aligned", "angle", "aligned", "map: distance from the identity")
        table("", headers, rows, numbers=(2, 3, 4, 5))
        _show_notes(pair)

    return Answer(facts, show)
