"""`rotation-merge align`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from rotation_merge.cli.options import (
    THREADS,
    backend_option,
    config_of,
    config_options,
    device_option,
    devices,
    matcher,
    matching_options,
)
from rotation_merge.cli.paths import MODEL, NEW_ALIGNMENT, NEW_MODEL, SAMPLE_SOURCE, WORD, writes
from rotation_merge.cli.show import Progress, json_option, print_json, say, shown
from rotation_merge.config import DTYPES
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchConfig

SAMPLED = ("match_on", "data", "samples", "seed")
"""Options that say what chooses the maps."""


@click.command(epilog="Example: rotation-merge align org/anchor org/donor ./aligned --heads permutation")
@click.argument("anchor", type=MODEL)
@click.argument("donor", type=MODEL)
@click.argument("out", type=NEW_MODEL, required=False)
@matching_options
@config_options(MatchConfig, *SAMPLED, types={"data": SAMPLE_SOURCE})
@click.option(
    "--alignment",
    "alignment_file",
    type=NEW_ALIGNMENT,
    metavar="FILE",
    help="Also write the transforms, for recipes' 'alignment:'.",
)
@click.option("--half", is_flag=True, help="Store the maps of --alignment in half precision.")
@click.option("--shard-size", type=WORD, default="5B", show_default=True, help="Largest weight file, e.g. 500M.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Storage of the output; the donor's if not given.")
@device_option(" to compute on")
@backend_option
@click.option("--verify/--no-verify", default=True, help="Compare OUT's outputs with the donor's.")
@json_option
@shown
@writes
@click.pass_context
def command(
    context: click.Context,
    anchor: str,
    donor: str,
    out: str | None,
    alignment_file: str | None,
    half: bool,
    shard_size: str,
    dtype: str | None,
    device: str,
    as_json: bool,
    verify: bool,
    backend: str,
    **values: Any,
) -> int:
    """Write DONOR in ANCHOR's coordinates to OUT.

    OUT is an ordinary checkpoint with the donor's outputs, with tokenizer, config, card and report; any tool can
    average it with the anchor. OUT is complete or absent; large models are written in shards. Leave OUT out if you only
    want --alignment. The outputs of OUT on random inputs are compared with the donor's; if they differ by more than
    rounding, OUT is kept as OUT.rejected. After an interruption, matching continues from OUT.matching.unfinished.
    """
    from rotation_merge.matching.aligned_output import match_pair, with_basis, write_aligned
    from rotation_merge.matching.pair import open_pair
    from rotation_merge.model.run_keys import mark_of, unchanged
    from rotation_merge.model.writing import parse_size
    from rotation_merge.run.ledger import kept_beside
    from rotation_merge.run.proof import Proof, prove
    from rotation_merge.workers import on_backend

    options, match = config_of(AlignConfig, values), config_of(MatchConfig, values)
    untie = match.untie
    if out is None and alignment_file is None:
        raise click.UsageError("name OUT, or a file for --alignment")
    on = [] if match.match_on == WEIGHTS else [str(getattr(match, name)) for name in SAMPLED]
    if not on and any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in SAMPLED[1:3]):
        raise RotationMergeError("matching on weights uses no samples", remedy="add --match-on both, or activations")
    if on and backend != THREADS:
        problem = f"--backend {backend} works for matching on weights only"
        raise RotationMergeError(problem, remedy="leave out --match-on, or --backend")
    shard_bytes = parse_size(shard_size)
    device, worker_device = devices(device, backend)
    pair = open_pair(anchor, donor, options, untie, device)
    progress = Progress()
    proof: Proof | None = None
    left_out_notes: tuple[str, ...] = ()
    mark = mark_of((pair.anchor, pair.donor), on, on=on, options=asdict(options), untie=untie)
    with kept_beside(out or str(alignment_file), lambda: mark, device) as ledger:
        with unchanged([pair.anchor, pair.donor]), on_backend(backend, worker_device) as over:
            how = matcher(match, anchor, donor, device, over)
            alignment = with_basis(pair, match_pair(pair, progress, how, ledger))
        if out is not None:
            proofs: list[Proof] = []

            def check(staging: str) -> tuple[bool, str]:
                proofs.append(prove(donor, staging, options.shift_head))
                return not proofs[0].failed, proofs[0].words

            writing = dtype, shard_bytes, progress, check if verify else None
            left_out_notes = write_aligned(pair, alignment, out, *writing).notes
            proof = proofs[0] if proofs else None
        if alignment_file is not None:
            alignment.write(alignment_file, half)
    progress.close()
    name, report = str(pair.donor.reference), alignment.known_report
    before, after = report.relative_distances(name)
    if as_json:
        print_json(
            {
                "out": out,
                "alignment": alignment_file,
                "before": before,
                "after": after,
                "proof": proof and asdict(proof),
                **report.to_dict()["summary"],
            }
        )
        return 0
    for warning in pair.warnings:
        say(f"Warning: {warning}", "yellow")
    for note in (*pair.notes, *alignment.notes, *left_out_notes):
        say(note)
    say(f"{report.verdict(name)[:1].upper()}{report.verdict(name)[1:]}.")
    if out is not None:
        verification = proof.words if proof is not None else f"'rotation-merge verify {donor} {out}' checks its outputs"
        say(f"Written to {out}; {verification}.", "green")
    if alignment_file is not None:
        say(f"Transforms written to {alignment_file}.", "green")
    return 0
