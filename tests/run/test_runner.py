"""Running models block by block: the same answers as the whole model, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import ALL, Case, difference, keep_float64, make, outputs, save

from rotation_merge import RotationMergeError
from rotation_merge.architecture import resolve
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run import functions
from rotation_merge.run.proof import random_batch
from rotation_merge.run.runner import Runner, StateStore

FIRST = {case.family: case for case in reversed(ALL)}
HARD = [case for case in ALL if case.name in ("classifier, all layers", "t5-mt5", "v2, own keys, convolution")]


def runner(case: Case, folder: Path, store: StateStore | None = None) -> tuple[Runner, dict[str, torch.Tensor]]:
    """A tiny model about to run on two batches of the same random examples, and what it answers.

    Mixtures too, whose experts stand one by one in their files and together in transformers' models.
    """
    model = make(case)
    draw = random_batch(model, torch.Generator().manual_seed(0))
    batch = {name: x.double() if x.is_floating_point() else x for name, x in draw.items()}
    config, state = save(model, folder)
    view = View(case.name, config, resolve(config, list(state), case.name), as_tensors(state))
    return Runner(view, [batch, dict(batch)], store, dtype=torch.float64), outputs(model, batch)


@pytest.mark.parametrize("case", [*FIRST.values(), *HARD], ids=lambda case: f"{case.family}-{case.name}")
def test_block_by_block_is_the_whole_model(case: Case, tmp_path: Path) -> None:
    run, expected = runner(case, tmp_path)
    filled = []
    with keep_float64():
        while (block := run.advance()) is not None:
            for batch in range(2):
                run.run(batch, record=True)
            layers = [run.module_of(b) for b in run.architecture.blocks if b.index is not None]
            filled.append(sum(all(p.device.type != "meta" for p in m.parameters()) for m in layers if m is not None))
            assert filled[-1] <= 1, block.name
        assert difference(outputs(run.model, run.batches[1]), expected) <= 1e-9
        assert functions.outputs(run.model, run.batches[1]).keys() == expected.keys()
    assert max(filled) >= 1


def test_states_wait_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states in a folder give the same as in memory, and the folder is left as it was; or it is named."""
    store = StateStore(str(tmp_path / "spill"))
    run, expected = runner(FIRST["llama"], tmp_path / "model", store)
    with keep_float64():
        run.run_through()
        assert len(list((tmp_path / "spill").rglob("*.safetensors"))) == 2
        assert difference(outputs(run.model, run.batches[0]), expected) <= 1e-9

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("rotation_merge.run.runner.save_file", full)
    with pytest.raises(RotationMergeError, match=r"No space left.*name a folder that has more in TMPDIR"):
        store.put([torch.zeros(2)])
    store.close()
    assert list((tmp_path / "spill").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RotationMergeError, match="file: cannot be written"):
        StateStore(str(tmp_path / "file"))
