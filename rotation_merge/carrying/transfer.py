"""Transfer of a fine-tune's change from one base to another, as a model, an adapter or a task vector."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rotation_merge.carrying.bases import Bases, open_bases, usable_as_it_is
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.lora import adapter_of, left_out
from rotation_merge.carrying.session import Execution, TransferResult, TransferSession, check_head
from rotation_merge.carrying.tokens import AddedTokens, adds_tokens
from rotation_merge.errors import CheckpointError, DataError
from rotation_merge.files import TemporaryFolder
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.adapter_base import check_base
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.gguf import quantised
from rotation_merge.model.open import open_model
from rotation_merge.workers import Progress

if TYPE_CHECKING:
    from rotation_merge.carrying.sampled import SampledTransfer

OWN_BASE = "name its own base, or a copy of it (the command carries it anyway with --force)"
ALONE = "carry by weights, at a given scale: they alone can be carried by shared tokens"


def carry(
    works: Mapping[str, str],
    old: str,
    new: str,
    config: TransferConfig | None = None,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> list[TransferResult]:
    """Carry adapters and fine-tunes of one base to another, each to a separate directory.

    Args:
        works: directories of adapters and of whole models, by the directory that each is to be written to.

    Raises:
        RotationMergeError: a model, an adapter or the samples cannot be read, or they do not fit together.
    """
    config, execution = config or TransferConfig(), execution or Execution()
    carry_all = _carry_with_samples if config.needs_samples else _carry_weights
    return carry_all(works, old, new, config, execution, progress)


def _carry_weights(
    works: Mapping[str, str],
    old: str,
    new: str,
    config: TransferConfig,
    execution: Execution,
    progress: Progress | None,
) -> list[TransferResult]:
    """Carry changes by weights alone. All adapters are carried before anything is written."""
    adapters = {out: Adapter(path) for out, path in works.items() if is_adapter(path)}
    whole = {out: path for out, path in works.items() if out not in adapters}
    untie = execution.storage.untie or bool(config.rank) or not whole
    bases = open_bases(new, old, execution.device, untie)
    if (unmoved := unchanged_results(works, bases, config, execution)) is not None:
        return unmoved
    config = resolved_residual(config, bases)
    added = {out: AddedTokens.of(bases, path, config.rank) for out, path in whole.items()}
    tuned = {out: bases.tuned(path, added[out].lengths[1]) for out, path in whole.items()}
    aligned = TransferSession.aligned(bases, config, execution, progress)
    if whole and not config.rank:
        check_head(aligned.bases, execution.storage, bool(aligned.carrier.alignment.folded))
    sessions = {
        out: aligned.with_added_tokens(*AddedTokens.of_adapter(bases, adapter)) for out, adapter in adapters.items()
    }
    sessions |= {
        out: _naming_types(aligned.with_added_tokens(added[out], source), whole[out]) for out, source in tuned.items()
    }
    ready = {out: sessions[out].adapter(adapter) for out, adapter in adapters.items()}
    if config.rank:
        ready |= {out: sessions[out].as_adapter(source, config.rank) for out, source in tuned.items()}
    return [
        *(sessions[out].write_adapter(works[out], out, *result) for out, result in ready.items()),
        *(sessions[out].write_model(works[out], out, tuned[out], progress) for out in tuned if out not in ready),
    ]


def _carry_with_samples(
    works: Mapping[str, str],
    old: str,
    new: str,
    config: TransferConfig,
    execution: Execution,
    progress: Progress | None,
) -> list[TransferResult]:
    """Carry changes by solving for them, or by scaling them, on samples."""
    from rotation_merge.carrying.sampled import SampledTransfer

    ranks = {out: config.rank or (Adapter(work).rank if is_adapter(work) else 0) for out, work in works.items()}
    untie = execution.storage.untie or config.method != "weights" or all(ranks.values())
    bases = open_bases(new, old, execution.device, untie)
    if (unmoved := unchanged_results(works, bases, config, execution)) is not None:
        return unmoved
    if bases.rows is not None:
        raise DataError(
            f"its vocabulary differs from that of {new}, so samples cannot be shared", where=old, remedy=ALONE
        )
    names = {out: f"{old}+{path}" if is_adapter(path) else path for out, path in works.items()}
    config = resolved_residual(config, bases)
    added = {out: AddedTokens.of(bases, name, ranks[out]) for out, name in names.items()}
    sources = {out: bases.tuned(name, added[out].lengths[1]) for out, name in names.items()}
    session = TransferSession.aligned(bases, config, execution, progress)
    used = [
        {"of": f"carrying {work}", "source": config.data, "samples": config.sample_count} for work in works.values()
    ]
    session = replace(session, report=replace(session.report, data=[*session.report.data, *used]))
    results = []
    for out, tuned in sources.items():
        of_work = _naming_types(session.with_added_tokens(added[out], tuned), names[out])
        sampled = SampledTransfer(of_work, names[out], tuned, ranks[out], progress)
        results.append(_write_sampled(sampled, works[out], out))
    return results


def _naming_types(session: TransferSession, tuned: str) -> TransferSession:
    """The session of a fine-tune, whose report names the types of its weights if they were read from GGUF."""
    types = quantised(open_model(tuned).folder)
    if not types:
        return session
    return replace(session, report=replace(session.report, notes=[*session.report.notes, f"`{tuned}` {types}."]))


def _write_sampled(sampled: SampledTransfer, work: str, out: str) -> TransferResult:
    """Write the change that samples chose, as an adapter or a model."""
    session, by_weights = sampled.session, sampled.config.method == "weights"
    if not sampled.rank:
        check_head(session.bases, session.execution.storage, by_weights and bool(session.carrier.alignment.folded))
    chosen = sampled.carried(out)
    session = replace(session, report=replace(session.report, lift=chosen.lift.facts()))
    if chosen.delta.solved is None:
        report = replace(session.report, notes=[*session.report.notes, *chosen.lines])
        return _write_moved(replace(session, report=report, scale=chosen.delta.scale), sampled, work, out)
    how = f"{chosen.how} {chosen.lines[0]}"
    if not sampled.rank:
        return session.write_solved(work, out, chosen.delta, chosen.lines, how, sampled.progress)
    written, _ = adapter_of(chosen.delta, sampled.rank, session.bases.new)
    return session.write_adapter(work, out, written, [*left_out(session.bases.new), *chosen.lines], how)


def _write_moved(session: TransferSession, sampled: SampledTransfer, work: str, out: str) -> TransferResult:
    """Write the change moved by weights, at the scales of a session."""
    if not sampled.rank:
        return session.write_model(work, out, sampled.tuned, sampled.progress)
    if is_adapter(work):
        return session.write_adapter(work, out, *session.adapter(Adapter(work)))
    return session.write_adapter(work, out, *session.as_adapter(sampled.tuned, sampled.rank))


def resolved_residual(config: TransferConfig, bases: Bases) -> TransferConfig:
    """The config with `residual: largest` resolved to none if the bases share their coordinates.

    Streams then stay, and so does a tied head.
    """
    if config.match.residual != "largest" or not bases.nearness.shared:
        return config
    return replace(config, match=replace(config.match, residual="none"))


def unchanged_results(
    works: Mapping[str, str], bases: Bases, config: TransferConfig, execution: Execution
) -> list[TransferResult] | None:
    """Return results for work that needs no carrying because the bases share their coordinates, else None.

    Work with added tokens is always carried, because plain addition would lose them.

    Raises:
        RotationMergeError: an adapter cannot be read, or is of another base.
    """
    for work in works.values():
        if is_adapter(work) and not execution.force:
            check_base(Adapter(work), [bases.old], work, open_model, OWN_BASE)
    if execution.even_if_near or config.alignment is not None or any(adds_tokens(w, bases) for w in works.values()):
        return None
    lines = usable_as_it_is(works, bases)
    return None if lines is None else [TransferResult(works[out], None, notes) for out, notes in lines.items()]


Transferred = tuple[dict[str, Tensor], list[str], Alignment, dict[str, Any] | None]
"""The new base's tensors that a fine-tune changes, in float32 or wider; notes; the alignment of the bases; the facts of
the recovered lift, where samples judged."""


def transferred(
    name: str,
    old: str,
    new: str,
    config: TransferConfig,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """A fine-tune carried for a merge: the new base's tensors as it changes them, instead of something written.

    Args:
        name: of the fine-tune, as it is loaded: a path, or `base+adapter`.
    """
    from rotation_merge.carrying.sampled import SampledTransfer

    execution = execution or Execution()
    session = TransferSession.aligned(open_bases(new, old, execution.device), config, execution, progress)
    tokens, tuned = AddedTokens.of(session.bases, name, config.rank), session.bases.tuned(name)
    session, lost = session.with_added_tokens(replace(tokens, rows_held=False), tuned), tokens.words(written=False)
    sampled = SampledTransfer(session, name, tuned, config.rank, progress)
    alignment = session.carrier.alignment
    if not config.needs_samples:
        return sampled.by_weights(session.scale), [*session.report.notes, *lost], alignment, None
    with TemporaryFolder() as folder:
        chosen = sampled.carried(os.path.join(folder, "out"))
    if chosen.delta.solved is None:
        return sampled.by_weights(chosen.delta.scale), [*chosen.lines, *lost], alignment, chosen.lift.facts()
    return dict(chosen.delta.named(torch.float32)), [*chosen.lines, *lost], alignment, chosen.lift.facts()


def check_places(works: Sequence[str], places: Sequence[str]) -> None:
    """Refuse to write two adapters to one place.

    Raises:
        CheckpointError: names the two.
    """
    for i, place in enumerate(places):
        if place in places[:i]:
            raise CheckpointError(
                f"has the same output as {works[places.index(place)]}: {place}",
                where=works[i],
                remedy="carry them one by one",
            )
