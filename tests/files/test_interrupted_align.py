"""An alignment that is killed leaves whole checkpoints and whole alignment files, or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import cli_support
import pytest
import safetensors.torch
from interrupted_support import assert_whole_or_not_at_all, equal, load
from matching_support import save_for
from mergekit.io.tasks import LoaderCache
from plugin_support import make, state, twin
from transformers import AutoConfig

from rotation_merge import Alignment
from rotation_merge.architecture import resolve
from rotation_merge.matching import alignment as file
from rotation_merge.matching.alignment import load_alignment


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up afterwards."""


def test_killed_while_an_alignment_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays until the new one is whole."""
    anchor = make("llama", tmp_path / "anchor")
    architecture = resolve(AutoConfig.from_pretrained(anchor).to_dict(), list(state(anchor)), "anchor")
    path = tmp_path / "map.safetensors"
    save_for(path, Alignment({}), architecture, "a", "old")

    def dying(tensors: object, where: Path, metadata: object) -> None:
        Path(where).write_bytes(b"half a file")
        raise Killed

    monkeypatch.setattr(file, "save_file", dying)
    with pytest.raises(Killed):
        save_for(path, Alignment({}), architecture, "a", "new")
    assert load_alignment(path, architecture).basis.donor.fingerprint == "old"


@pytest.mark.slow
def test_killed_at_every_step_of_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over another checkpoint in equal shards: at no step does a mixture of the two load."""
    anchor = make("llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor")

    def align(out: Path, *options: str) -> None:
        arguments = ["align", "--force", anchor, donor, out, "--shard-size", "15000", *options]
        LoaderCache.loaders.clear()
        done = cli_support.run(*arguments)
        assert done.exit_code == 0, done.output

    align(tmp_path / "old", "--ffn", "none")
    align(tmp_path / "new", "--heads", "permutation")
    old, new = state(tmp_path / "old"), state(tmp_path / "new")
    for step in range(1, 60):
        left, work = step, tmp_path / f"work{step}"
        shutil.copytree(tmp_path / "old", work / "out")

        def dying(real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    raise Killed
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(safetensors.torch, "save_file", dying(safetensors.torch.save_file))
            for name in ("remove", "replace", "rename"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                align(work / "out", "--heads", "permutation")
            except Killed:
                assert_whole_or_not_at_all(work, old, new)
                continue
        assert equal(load(work / "out") or {}, new)
        assert step > 20
        return
    raise AssertionError("the writing never came to its end")
