"""Writing into a folder: nobody else writes there meanwhile, and what is there stays where writing fails."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_support import equal, forked, load, start
from plugin_support import one_error, recipe_for, state, write_recipe
from safetensors.torch import load_file, save_file

from rotation_merge import RotationMergeError
from rotation_merge.files import locks
from rotation_merge.model import folder_exchange
from rotation_merge.model.output import mend_interrupted, staged
from rotation_merge.model.writing import SplicedWriter

MODEL = {"config.json": "{}", "model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder, through links, too."""
    paths = [Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def put(out: Path, files: dict[str, str]) -> None:
    with staged(str(out)) as staging:
        write(Path(staging), files)


def in_another_process(out: Path, signal_number: int = 0) -> tuple[int, int]:
    """A process that is writing into a folder, and the end of a pipe that lets it go on when it is closed."""
    begun, go_on = os.pipe(), os.pipe()
    if child := os.fork():
        os.close(begun[1])
        os.close(go_on[0])
        assert os.read(begun[0], 1) == b"!"
        os.close(begun[0])
        return child, go_on[1]
    os.close(go_on[1])
    with staged(str(out)) as staging:
        write(Path(staging), {"config.json": "theirs"})
        os.write(begun[1], b"!")
        os.read(go_on[0], 1)
        if signal_number:
            os.kill(os.getpid(), signal_number)
    os._exit(0)


@pytest.mark.parametrize("there", [False, True])
def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "deep" / "out"
    before = files(write(out, MODEL)) if there else {}
    child, go_on = in_another_process(out)
    (tmp_path / "link").symlink_to(out)
    for name in (out, tmp_path / "link"):
        with pytest.raises(RotationMergeError, match=f"another run .process {child}. is writing it"):
            put(name, {"config.json": "mine"})
    put(tmp_path / "deep" / "other", {"config.json": "mine"})  # beside it there is room
    assert {k: v for k, v in files(out).items() if not k.startswith(".")} == before
    os.close(go_on)
    os.waitpid(child, 0)
    assert files(out) == {"config.json": "theirs"}
    put(out, {"config.json": "mine"})
    assert files(out) == {"config.json": "mine"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["other", "out"]


@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_run_leaves_is_in_nobodys_way(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    before = files(write(out, MODEL)) if there else {}
    child, go_on = in_another_process(out, signal.SIGKILL)
    os.close(go_on)
    os.waitpid(child, 0)
    assert {k: v for k, v in files(out).items() if not k.startswith(".")} == before
    put(out, {"config.json": "mine"})
    assert files(tmp_path) == {"out/config.json": "mine"}


def test_two_threads_are_two_runs(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def second() -> None:
        try:
            put(tmp_path / "out", {"config.json": "second"})
        except RotationMergeError as error:
            refused.append(error)

    with staged(str(tmp_path / "out")) as staging:
        write(Path(staging), {"config.json": "first"})
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert files(tmp_path) == {"out/config.json": "first"}


@pytest.mark.parametrize("there", [False, True])
def test_without_locks_the_later_one_is_refused_at_its_last_step(
    tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where something else than a run of ours has written there meanwhile; nothing of the two is lost."""
    monkeypatch.setattr(locks, "fcntl", None)
    out = tmp_path / "out"
    if there:
        write(out, MODEL)

    def first() -> None:
        with staged(str(out)) as staging:
            write(Path(staging), {"config.json": "first"})
            put(out, {"config.json": "second"})

    with pytest.raises(RotationMergeError, match=r"another model was written there meanwhile.*kept in") as error:
        first()
    assert files(tmp_path) == {"out/config.json": "second", "out.kept/config.json": "first"}
    assert str(out) in str(error.value)


def test_other_files_that_come_meanwhile_are_no_hindrance(tmp_path: Path) -> None:
    out = write(tmp_path / "out", MODEL)
    with staged(str(out)) as staging:
        write(Path(staging), {"config.json": "new"})
        write(out, {"log.txt": "written meanwhile"})
    assert files(out) == {"config.json": "new", "log.txt": "written meanwhile"}


@pytest.mark.slow
def test_two_merges_started_together(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Of two recipes with other shards: what stands in the end is one of the two, whole, and the other said so."""
    anchor, donor = deep_pair
    said = [tmp_path / "said0", tmp_path / "said1"]
    runs, wanted = [], []
    for number, weight in enumerate((0.3, 0.7)):
        recipe = recipe_for("linear", anchor, donor)
        recipe["models"][0]["parameters"]["weight"] = weight
        path = write_recipe(recipe, tmp_path / f"recipe{number}.yml")
        assert forked("mergekit-yaml", path, tmp_path / f"alone{number}", "--quiet").returncode == 0
        wanted.append(state(tmp_path / f"alone{number}"))
        said[number].mkdir()
        arguments = (path, tmp_path / "out", "--quiet", "--out-shard-size", ("20000", "9000")[number])
        runs.append(("mergekit-yaml", arguments, said[number]))
    children = [start(*run) for run in runs]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    last = codes.index(0) if 2 in codes else None
    result = load(tmp_path / "out") or {}
    assert any(equal(result, one) for one in (wanted if last is None else [wanted[last]]))
    for code, place in zip(codes, said, strict=True):
        assert code in (0, 2)
        if code:
            assert "another run" in one_error((place / "err").read_text())
    assert not list(tmp_path.glob(".*"))
    assert not list((tmp_path / "out").glob(".*"))


def test_files_of_others_in_folders_of_the_same_name_stay(tmp_path: Path) -> None:
    mine = {"docs/keep.txt": "mine", "model_notes.safetensors": "mine", "model-ema.bin": "mine", "docs/both": "old"}
    out = write(tmp_path / "out", {**MODEL, **mine, "docs/model.safetensors": "mine"})
    put(out, {"config.json": "new", "model.safetensors": "new", "docs/both": "new", "docs/deep/er": "new"})
    new = {"config.json": "new", "model.safetensors": "new", "docs/both": "new", "docs/deep/er": "new"}
    assert files(out) == {**mine, **new, "docs/model.safetensors": "mine"}


def test_a_folder_with_a_model_of_its_own_is_exchanged_whole(tmp_path: Path) -> None:
    """As `heads/NAME` is: no shard and no index of the old one may be read with the new one."""
    out = write(tmp_path / "out", {f"heads/a/{name}": text for name, text in MODEL.items()})
    put(out, {"config.json": "new", "heads/a/config.json": "new", "heads/a/model.safetensors": "new"})
    assert files(out / "heads") == {"a/config.json": "new", "a/model.safetensors": "new"}


def test_a_link_gives_way_and_what_it_stands_for_stays(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere", {"gram": "mine"})
    out = write(tmp_path / "out", MODEL)
    (out / "stats").symlink_to(elsewhere)
    (out / "README.md").symlink_to(elsewhere / "gram")
    put(out, {"config.json": "new", "stats/gram": "new", "README.md": "new"})
    assert files(out) == {"config.json": "new", "stats/gram": "new", "README.md": "new"}
    assert files(elsewhere) == {"gram": "mine"}


def test_a_folder_in_the_way_of_a_file_stays(tmp_path: Path) -> None:
    out = write(tmp_path / "out", {**MODEL, "README.md/mine": "mine"})
    before = files(out)
    with pytest.raises(RotationMergeError, match=r"README.md: is a folder, where a file is to be written.*out\.kept"):
        put(out, {"config.json": "new", "README.md": "new"})
    assert files(out) == before
    assert files(tmp_path / "out.kept") == {"config.json": "new", "README.md": "new"}


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), KeyboardInterrupt()])
def test_whichever_move_fails_the_old_model_stands_again(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {"config.json": "new", "model.safetensors": "new", "a/b": "new"}
    for step in range(20):
        out = write(tmp_path / str(step) / "out", {**MODEL, "a/b": "old", "a/c": "mine"})
        before, moves = files(out), iter(range(1000))
        real = os.rename

        def failing(*names: Any, moves: Any = moves, step: int = step, real: Any = real) -> None:
            if next(moves) == step:
                raise error
            real(*names)

        with monkeypatch.context() as patch:
            patch.setattr(folder_exchange.os, "rename", failing)
            try:
                put(out, new)
            except (RotationMergeError, KeyboardInterrupt):
                assert files(out) == before, step
                kept = tmp_path / str(step) / "out.kept"
                assert not kept.exists() if isinstance(error, KeyboardInterrupt) else files(kept) == new
                continue
        assert files(out) == {**new, "a/c": "mine"}
        assert step > 4
        return
    raise AssertionError("the exchange never came to its end")


def test_what_cannot_be_put_back_is_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move after some number fails: the pieces lie where the next run finds them."""
    out = write(tmp_path / "out", MODEL)
    before, real, moves = files(out), os.rename, iter(range(1000))

    def failing(*names: Any) -> None:
        if next(moves) >= 3:
            raise OSError(5, "Input/output error")
        real(*names)

    with monkeypatch.context() as patch:
        patch.setattr(folder_exchange.os, "rename", failing)
        with pytest.raises(OSError, match="Input/output"):
            put(out, {"config.json": "new", "model.safetensors": "new"})
    assert files(out) != before
    with suppress(KeyError), staged(str(out)):
        assert {k: v for k, v in files(out).items() if not k.startswith(".")} == before
        raise KeyError
    assert files(tmp_path) == {f"out/{name}": text for name, text in before.items()}


def test_doctor_puts_back_what_a_killed_exchange_moved_out(tmp_path: Path) -> None:
    """And leaves what is being written alone."""
    out, step = write(tmp_path / "out", MODEL), iter(range(100))
    before, real = files(out), os.rename
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:

        def dying(*names: Any) -> None:
            if next(step) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*names)

        folder_exchange.os.rename = dying
        put(out, {"config.json": "new", "model.safetensors": "new"})
        os._exit(0)
    assert files(out) != before
    with locks.output_lock(out):
        assert mend_interrupted(str(out))
    assert not mend_interrupted(str(out))
    assert files(out) == before


@pytest.mark.parametrize(
    "journal",
    ["no json", "{}", json.dumps({"incoming": ["../../victim"], "outgoing": [], "staging": "out"})],
    ids=["no json", "empty", "names what is outside"],
)
def test_a_journal_is_not_believed(tmp_path: Path, journal: str) -> None:
    holder = ".rotation-merge.01234567.partial"
    (tmp_path / "victim").write_text("mine")
    out = write(tmp_path / "out", {**MODEL, f"{holder}/exchange.json": journal, f"{holder}/old/x": "old"})
    before = files(tmp_path)
    with pytest.raises(RotationMergeError, match=r"exchange.json: is not a record"):
        put(out, {"config.json": "new"})
    assert files(tmp_path) == before


def test_a_place_inside_a_folder_that_others_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of its own, mounted where nobody may write beside it."""
    out, real = write(tmp_path / "closed" / "out", MODEL), os.open

    def closed(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.dirname(path) == str(out.parent) and os.path.basename(path) != "out":
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(locks.os, "open", closed)
    child, go_on = in_another_process(out)
    with pytest.raises(RotationMergeError, match="another run"):
        put(out, {"config.json": "mine"})
    os.close(go_on)
    os.waitpid(child, 0)
    assert files(out) == {"config.json": "theirs"}


def test_heads_of_an_earlier_merge_go_and_other_folders_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("one", "other"):
        with staged(str(out)) as staging:
            head = Path(staging) / "heads" / name
            head.mkdir(parents=True)
            for file in ("config.json", "rotation_merge.json"):
                (head / file).write_text(name)
                (Path(staging) / file).write_text(name)
        if name == "one":
            (out / "heads" / "mine").mkdir()
            (out / "heads" / "mine" / "notes.txt").write_text("kept")
    assert sorted(path.name for path in (out / "heads").iterdir()) == ["mine", "other"]
    assert (out / "heads" / "mine" / "notes.txt").read_text() == "kept"


def test_shared_tensors_stand_where_their_type_may(tmp_path: Path) -> None:
    """Half precision with an odd number of elements, before single precision: the widest come first."""
    body = {"a": torch.arange(3).to(torch.bfloat16), "b": torch.ones(2, dtype=torch.bool), "c": torch.zeros(4)}
    (tmp_path / "out").mkdir()
    save_file(body, tmp_path / "model.safetensors")
    writer = SplicedWriter(str(tmp_path), ["a", "b"], str(tmp_path / "out"))
    writer.save_tensor("c", torch.full((5, 1), 2.0))
    writer.save_tensor("d", torch.tensor(7))
    writer.finalize()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["a"], body["a"])
    assert torch.equal(found["b"], body["b"])
    assert found["c"].tolist() == [[2.0]] * 5
    assert found["d"] == 7
