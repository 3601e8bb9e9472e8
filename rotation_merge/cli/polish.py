"""`rotation-merge polish`."""

from __future__ import annotations

from typing import Annotated, Any

import click

import rotation_merge as rm
from rotation_merge.averaging.config import PolishConfig
from rotation_merge.cli.command import Command, Device, Model, cli_command
from rotation_merge.cli.paths import MODEL, NEW_MODEL, SAMPLES
from rotation_merge.cli.show import Answer, sentence
from rotation_merge.run.sample_kinds import KINDS, SELF


class ValuesCommand(Command):
    """Repeated options may be followed by several values: `--teachers A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeated = {flag for p in self.params if isinstance(p, click.Option) and p.multiple for flag in p.opts}
        words, flag = list[str](), ""
        for arg in args:
            if arg.startswith("-"):
                flag = arg if arg in repeated else ""
            elif flag and words[-1] != flag:
                words.append(flag)
            words.append(arg)
        return super().parse_args(ctx, words)


@cli_command(
    "rotation-merge polish ./merged ./polished --teachers org/a org/b",
    "rotation-merge polish ./merged ./adapter --teachers org/a --data a.txt --lora 16",
    cls=ValuesCommand,
)
def command(
    merged: Model,
    out: Annotated[str, NEW_MODEL],
    *,
    teachers: Annotated[tuple[str, ...], MODEL, "--teachers", "-t", "MODEL...", "the parents"],
    data: Annotated[
        tuple[str, ...],
        SAMPLES,
        "DATA...",
        f"samples: one for each teacher in their order, or one for all. {KINDS}; self (if not given): each teacher's "
        "own text; synthetic: images made of noise",
    ] = (),
    config: PolishConfig,
    device: Device = "cpu",
    force: bool,
) -> Answer:
    """Distil the teachers into MERGED for a few steps and write OUT.

    The targets of each sample are the outputs of its teacher. Teachers answer first, one at a time; their answers are
    kept in OUT.unfinished, from which an interrupted run continues. A held-out part of the samples chooses learning
    rate and step. If nothing improves, nothing is written, and the exit code is 1.

    If MERGED was merged with `heads_of: each`, each teacher in MERGED/heads trains the body under its own head.
    """
    if len(data) not in (0, 1, len(teachers)):
        raise click.UsageError(f"give --data once, or for each of the {len(teachers)} teachers")
    samples = list(data) if len(data) > 1 else next(iter(data), SELF)
    report: Any = rm.polish(merged, teachers, samples, config, out=out, device=device, force=force).report
    lines = sentence(report.verdict()), f"Written to {out}." if report.gained else "Nothing was written."
    return Answer({"out": out if report.gained else None, **report.to_dict()}, lines, int(not report.gained))
