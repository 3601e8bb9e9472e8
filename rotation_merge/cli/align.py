"""`rotation-merge align`: how far apart two models are, and the donor rewritten in the anchor's coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rotation_merge as rm
from rotation_merge.cli.command import Device, Model, ShardSize, Storage, cli_command, flags_used, refuse_idle
from rotation_merge.cli.paths import NEW_ALIGNMENT, NEW_MODEL
from rotation_merge.cli.show import Answer, Table, sentence
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store
from rotation_merge.matching.options import WEIGHTS, AlignConfig, FitConfig, MatchConfig
from rotation_merge.record import RELATED, SpaceRow
from rotation_merge.run.sample_kinds import ReadingConfig

if TYPE_CHECKING:
    from rotation_merge.matching.pair import Pair
    from rotation_merge.run.proof import Proof

THREADS = "threads"
Backend = Annotated[
    Literal["threads", "ray", "dask"],
    "who computes the blocks: threads of this process, or workers of the Ray or Dask cluster that RAY_ADDRESS or "
    "DASK_SCHEDULER_ADDRESS names (otherwise one on this machine). All must see the models under the same path; needs "
    "rotation-merge[ray] or [dask]",
]


LEARNING_SAMPLES = ReadingConfig(batch_size=64)


@cli_command(
    "rotation-merge align org/anchor org/donor --residual rotation",
    "rotation-merge align org/anchor org/donor ./aligned --heads permutation",
    "rotation-merge align org/anchor org/donor --learn --data samples.txt --alignment learned.safetensors",
)
def command(
    anchor: Model,
    donor: Model,
    out: Annotated[str | None, NEW_MODEL] = None,
    *,
    options: AlignConfig,
    match: MatchConfig,
    learn: Annotated[bool, "then lower the loss of the models between both on --data, a few hundred"] = False,
    learning: FitConfig,
    reading: ReadingConfig = LEARNING_SAMPLES,
    alignment: Annotated[str | None, NEW_ALIGNMENT, "also write the transforms, for recipes' 'alignment:'"] = None,
    half: Annotated[bool, "store the maps of --alignment in half precision"] = False,
    shard_size: ShardSize = "5B",
    dtype: Storage = None,
    device: Device = "cpu",
    backend: Backend = "threads",
    verify: Annotated[bool, "--verify/--no-verify", "compare OUT's outputs with the donor's"] = True,
) -> Answer:
    """Write DONOR in ANCHOR's coordinates to OUT; without OUT and --alignment, say how far apart the two are.

    OUT is an ordinary checkpoint with the donor's outputs, with tokenizer, config, card and report; any tool can
    average it with the anchor. OUT is complete or absent; large models are written in shards. The outputs of OUT on
    random inputs are compared with the donor's; if they differ by more than rounding, OUT is kept as OUT.rejected.
    After an interruption, matching and learning continue.

    Without OUT: distances of each space relative to the anchor's norm, before and after alignment; about 1.4 means
    unrelated.

    --learn starts from the matching and lowers the loss of the interpolated models by gradient descent, on a GPU in
    mixed precision. For several donors at once, see rotation_merge.fit in Python.
    """
    from rotation_merge.matching.aligned_output import write_aligned
    from rotation_merge.matching.pair import open_pair
    from rotation_merge.model.writing import parse_size
    from rotation_merge.run.proof import prove
    from rotation_merge.workers import listener

    _check_use(learn, out, alignment, match.match_on)
    place, size, devices = out or alignment, parse_size(shard_size), _devices(device, backend, match, learn)
    pair, proof = open_pair(anchor, donor, options, match.untie, devices[0], watched=place is not None), None
    notes = [*(f"Warning: {warning}" for warning in pair.warnings), *pair.notes]
    working = _matched(pair, match, devices, backend, place)
    if learn:
        learning = replace(learning, match_on=match.match_on, seed=match.seed, half=devices[0].startswith("cuda"))
        working = _learned(pair, learning, match.data, reading, devices[0], str(place))

    with working as result:  # what is unfinished stays until all is written
        notes += result.notes
        if out is not None:
            check = partial(prove, str(pair.donor.reference), probabilities=options.shift_head) if verify else None
            view, proof = write_aligned(pair, result, out, dtype, size, listener(), check)
            notes += [*view.notes, f"Written to {out}."]
        if alignment is not None:
            result.write(alignment, half)
            notes.append(f"Transforms written to {alignment}.")
    return _answer(pair, result, {"out": out, "alignment": alignment}, proof, notes)


def _answer(
    pair: Pair, alignment: rm.Alignment, files: dict[str, str | None], proof: Proof | None, notes: Sequence[str]
) -> Answer:
    """What alignment did, space by space where nothing was written, and the files that were."""
    report, name, learned = alignment.known_report, str(pair.donor.reference), alignment.metadata.get("learned")
    before, after = report.relative_distances(name)
    spaces = [_row(row) for row in report.rows]
    facts: dict[str, Any] = {**files, "before": before, "after": after, "spaces": spaces, "warnings": pair.warnings}
    lines: list[str | Table] = [sentence(report.verdict(name))]
    if not any(files.values()):
        apart = pair.options.residual == "none" and before >= RELATED
        lines += ["The residual stream was not aligned: '--residual largest' aligns it, too."] * apart
        lines.append(Table(spaces))
    verdicts = [proof and proof.words, learned and learned["verdict"]]
    facts |= {"proof": proof and asdict(proof), **({} if learned is None else {"learned": learned})}
    lines += [*(sentence(words) for words in verdicts if words), *notes]
    return Answer({**facts, **report.to_dict()["summary"]}, lines)


def _row(row: SpaceRow) -> dict[str, Any]:
    """A space, with distances relative to the anchor's norm."""
    norm = row.anchor_norm or 1.0
    distances = {"before": row.distance_before / norm, "after": row.distance_after / norm}
    place = {"block": row.block, "space": row.space.rpartition(".")[2], "group": row.group}
    return {**place, **distances, "from_identity": row.from_identity}


def _check_use(learn: bool, out: str | None, alignment: str | None, match_on: str) -> None:
    """Refuse options that would do nothing."""
    if learn and (not (out or alignment) or not flags_used("data")):
        raise RotationMergeError("--learn needs --data, and OUT or --alignment", remedy="name them")
    fitted = FitConfig.options() | ReadingConfig.options()
    refuse_idle(
        (not learn, [name for name, field in fitted.items() if field.command], "{} needs --learn", "add it"),
        (learn, ["samples"], "{} is for matching on activations", "give --limit for learning"),
        (out is None, ["dtype", "shard_size", "verify"], "{} needs OUT", "name it, or leave the option out"),
        (alignment is None, ["half"], "{} needs --alignment", "add it"),
        (
            not learn and match_on == WEIGHTS,
            ["data", "samples"],
            "matching on weights uses no samples",
            "add --match-on",
        ),
    )


def _devices(name: str, backend: str, match: MatchConfig, learn: bool) -> tuple[str, str]:
    """Devices for this process and for the workers of a backend, from --device.

    Raises:
        RotationMergeError: it is not there, or is none; the backend cannot do what is asked for.
    """
    from rotation_merge.api import usable_device

    if backend == THREADS:
        return usable_device(name), "cpu"
    if learn or match.match_on != WEIGHTS:
        problem = f"--backend {backend} works for matching on weights only"
        raise RotationMergeError(problem, remedy="leave out --match-on and --learn, or --backend")
    if name not in ("cpu", "cuda"):
        problem = f"--backend {backend} does not take --device {name}: each worker chooses its own"
        raise RotationMergeError(problem, remedy="use --device cuda")
    return "cpu", name


@contextmanager
def _matched(
    pair: Pair, match: MatchConfig, devices: tuple[str, str], backend: str, place: str | None
) -> Iterator[rm.Alignment]:
    """The alignment by matching; unfinished work goes with the block.

    Args:
        devices: of this process and of workers.
        place: the output that unfinished work is kept beside.
    """
    from rotation_merge.matching.aligned_output import match_pair
    from rotation_merge.matching.match import match_model
    from rotation_merge.matching.match_on import matcher
    from rotation_merge.model.checkpoint import mark_of, unchanged
    from rotation_merge.run.ledger import kept_beside
    from rotation_merge.workers import listener, on_backend

    models, (device, worker_device) = (pair.anchor, pair.donor), devices
    anchor, donor = (str(model.reference) for model in models)
    by_weights, sampled = match.match_on == WEIGHTS, (match.data, match.samples, match.seed)
    on = [] if by_weights else [match.match_on, *map(str, sampled)]
    mark = partial(mark_of, models, on, on=on, options=asdict(pair.options), untie=match.untie)
    workers = on_backend(backend, worker_device)
    with kept_beside(place, mark, device) as ledger, unchanged(models), workers as over:
        find = matcher(match.match_on, anchor, donor, *sampled, device)
        yield match_pair(pair, listener(), partial(match_model, over=over) if by_weights else find, ledger)


@contextmanager
def _learned(
    pair: Pair, config: FitConfig, data: str, reading: ReadingConfig, device: str, place: str
) -> Iterator[rm.Alignment]:
    """The alignment by learning; an interrupted fit continues, its state goes with the block."""
    from rotation_merge.run.batches import check_labels
    from rotation_merge.run.data import described, read_samples
    from rotation_merge.run.functions import in_memory

    module = in_memory(pair.anchor, None).to(device)
    samples = read_samples(pair.anchor, data, seed=config.seed, module=module, **asdict(reading))
    if config.objective != "distill":
        check_labels(samples.batches, module, samples.task, data)

    with Store(place) as work:
        work.begin("learn")
        config = replace(config, state=work.path / "state")
        more: dict[str, Any] = {"untie": pair.anchor.untie, "module": module, "devices": [device]}
        (result,) = rm.fit(pair.anchor, pair.donor, samples.batches, pair.options, config, **more).alignments
        yield replace(result, metadata={**result.metadata, **described(samples), "seed": config.seed})
