"""A donor aligned outside a merge: opening two checkpoints, writing the aligned one as a normal checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace

import torch
import yaml
from mergekit.common import dtype_from_name, parse_kmb
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.checkpoints.models import Model
from rotation_merge.checkpoints.output import staged
from rotation_merge.checkpoints.pair import Pair
from rotation_merge.checkpoints.sentence import module_of, write_modules
from rotation_merge.checkpoints.spliced import Spliced
from rotation_merge.checkpoints.stamps import unchanged
from rotation_merge.errors import CheckpointError, RotationMergeError, nearest, not_written
from rotation_merge.matching.block import named
from rotation_merge.matching.ledger import NOWHERE, Ledger
from rotation_merge.matching.model import Alignment, Match, Progress, aligned_tensors, match_model
from rotation_merge.report.card import metadata, section, with_metadata
from rotation_merge.report.record import MergeReport, versions
from rotation_merge.report.run import Run

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

OWN = ("config.json", "rotation_merge.json")


def match_pair(
    pair: Pair, progress: Progress | None = None, match: Match = match_model, ledger: Ledger = NOWHERE
) -> tuple[Alignment, MergeReport]:
    """The best alignment of the donor to the anchor, and the report on it.

    Args:
        ledger: where what is found is kept, and looked for.
    """
    anchor, donor = pair.matched
    run = Run()
    options = pair.checked.options
    with named(str(pair.anchor.reference), str(pair.donor.reference)):
        alignment = match(pair.architecture, anchor, donor, options, progress, ledger=ledger)
    run.aligned(str(pair.donor.reference), alignment)
    recipe = yaml.safe_dump(asdict(options), sort_keys=False)
    return alignment, pair.report(run, recipe)


def empty_report(pair: Pair) -> MergeReport:
    """A report of nothing, where nothing was matched."""
    return pair.report(Run())


Check = Callable[[str], tuple[bool, str]]
"""Looks at a checkpoint that has been written: whether it may stay, and what was seen, in words."""


@dataclass(frozen=True)
class Storage:
    """How a model is written: the largest weight file, the dtype (None: as it was stored), a head of its own."""

    shard_size: int = 5_000_000_000
    dtype: str | None = None
    untie: bool = False


def write_aligned(
    pair: Pair,
    alignment: Alignment,
    report: MergeReport,
    out: str,
    storage: Storage = Storage(),
    progress: Progress | None = None,
    check: Check | None = None,
) -> None:
    """The aligned donor as a normal checkpoint: weights, config, tokenizer, card and report, whole or not at all."""
    anchor, donor = pair.sources
    tensors = aligned_tensors(pair.architecture, donor, alignment, anchor, dtype_from_name(storage.dtype))
    unread = left_behind(pair, alignment)
    if unread:
        report = replace(report, notes=[*report.notes, not_written(unread)])
    text = card(pair, report, os.path.basename(out))
    write_checkpoint(pair.donor, tensors, report, text, out, storage, progress, check, unread)


def left_behind(pair: Pair, alignment: Alignment) -> list[str]:
    """What the donor does not read and has to be left out, because a stream moves that it was made for: layers that
    predict tokens further ahead (MTP)."""
    return pair.donor.ignored if alignment.moves_streams(pair.architecture) else []


def write_checkpoint(
    like: Model,
    tensors: Iterable[tuple[str, Tensor]],
    report: MergeReport,
    text: str | Callable[[], str],
    out: str,
    storage: Storage,
    progress: Progress | None = None,
    check: Check | None = None,
    left_out: Collection[str] = (),
    body: tuple[str, Collection[str]] | None = None,
) -> None:
    """A model as a normal checkpoint, whole or not at all.

    Args:
        like: whose config and tokenizer it has, and those of its tensors that `tensors` leaves out.
        text: the model card; or what makes it once all tensors are written.
        check: looks at what has been written, before it takes its place.
        left_out: those of its tensors that are not written at all.
        body: a folder in safetensors, and which of its tensors are taken as they stand, in files of the same names.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    wanted, written = dtype_from_name(storage.dtype), set(body[1] if body else ())
    apart: dict[str, Tensor] = {}
    with staged(out) as staging:
        os.makedirs(staging, exist_ok=True)
        writer = Spliced(*body, staging) if body else TensorWriter(staging, max_shard_size=storage.shard_size)

        def save(name: str, tensor: Tensor) -> None:
            stored = _stored(tensor, wanted or like.dtypes.get(name))
            if module_of(name, like.modules) is None:
                writer.save_tensor(name, stored, clone=True)
            else:
                apart[name] = stored.clone()
            written.add(name)

        with unchanged([like.reference]):
            for name, tensor in tensors:
                if progress is not None:
                    progress("writing", len(written), len(like.names))
                save(name, tensor)
            for name in like.names:
                if name not in written and name not in left_out:
                    save(name, like[name])
        writer.finalize()
        write_modules(like.folder, staging, apart)
        report.write(os.path.join(staging, "rotation_merge.json"))
        _write_beside(like, staging, storage)
        passed, words = check(staging) if check is not None else (True, "")
        if not passed:
            rejected = f"{out.rstrip(os.sep)}.rejected"
            shutil.rmtree(rejected, ignore_errors=True)
            shutil.move(staging, rejected)
            what = f"does not compute what {like.reference} computes ({words})"
            raise CheckpointError(what, where=rejected, remedy="nothing else was written; please report it")
        text = text if isinstance(text, str) else text()
        with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
            file.write(f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    try:
        size = parse_kmb(text)
    except (ValueError, IndexError) as error:
        raise RotationMergeError(f"'{text}' is no size", remedy="write bytes, or 500M, or 5B") from error
    if size <= 0:
        raise RotationMergeError(f"'{text}' is no size", remedy="it must be positive")
    return size


def check_dtype(name: str | None) -> None:
    """Refuse a dtype that weights cannot be stored in.

    Raises:
        RotationMergeError: names the nearest known one.
    """
    known = ("bfloat16", "float16", "float32", "float64")
    if name is not None and name not in known:
        raise RotationMergeError(f"there is no dtype '{name}'", remedy=nearest(name, known))


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _write_beside(like: Model, out: str, storage: Storage) -> None:
    source = like.loader.index.base_path
    for name in sorted(os.listdir(source)):
        path = os.path.join(source, name)
        if os.path.isfile(path) and name.endswith(KEPT) and name not in OWN and not name.endswith(".index.json"):
            shutil.copyfile(path, os.path.join(out, name))
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = {**json.load(file), **like.rewritten}
    if storage.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = storage.dtype
    if storage.untie:
        for part in (config, *(part for part in config.values() if isinstance(part, dict))):
            if part is config or "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def card(pair: Pair, report: MergeReport, name: str) -> str:
    """A model card for an aligned donor."""
    donor, anchor = str(pair.donor.reference), str(pair.anchor.reference)
    before, after = report.relative_distances(donor)
    body = (
        f"# {name}\n\n"
        f"This is `{donor}` in the coordinates of `{anchor}`. It computes what `{donor}` computes, up to rounding; its "
        "weights were moved by symmetries of the architecture as near as possible to the anchor's, by rotation_merge "
        f"{versions().get('rotation-merge', '')}.\n\n"
        f"Relative distance to the anchor over the matched tensors: {before:.4g} before, {after:.4g} after. "
        f"{report.verdict(donor)[:1].upper()}{report.verdict(donor)[1:]}.\n\n"
        f"Options:\n\n```yaml\n{report.recipe}```\n"
        + "".join(f"\n{note}\n" for note in report.notes)
        + f"\nPer space: `rotation_merge.json`.\n\n{section(report, name, _class(pair))}"
    )
    return with_metadata(metadata(report), body)


def _class(pair: Pair) -> str | None:
    found = pair.donor.config.get("architectures")
    return str(found[0]) if found else None
