"""Writing into a folder: nobody else writes there meanwhile, and a killed process leaves nothing that looks whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from interrupted_support import at_step

from rotation_merge import RotationMergeError
from rotation_merge.files import locked
from rotation_merge.model.writing import is_of_a_model, staged
from rotation_merge.record import REPORT_FILE

MODEL = {"config.json": "{}", "model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
NEW = {"config.json": "new", "model.safetensors": "new"}


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


@contextmanager
def in_another_process(out: Path) -> Iterator[None]:
    """A process is writing into a folder while the block runs, and ends with it."""
    begun, go_on = os.pipe(), os.pipe()
    if child := os.fork():
        assert os.read(begun[0], 1) == b"!"
        yield
        os.write(go_on[1], b"!")
        os.waitpid(child, 0)
        for end in (*begun, *go_on):
            os.close(end)
        return
    with staged(str(out)) as staging:
        write(Path(staging), {"config.json": "theirs"})
        os.write(begun[1], b"!")
        os.read(go_on[0], 1)
    os._exit(0)


@pytest.mark.parametrize("exists", [False, True])
def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, exists: bool) -> None:
    out = tmp_path / "deep" / "out"
    before = files(write(out, MODEL)) if exists else {}
    (tmp_path / "link").symlink_to(out)
    with in_another_process(out):
        for name in (out, tmp_path / "link"):
            with pytest.raises(RotationMergeError, match="another run is writing it; wait until that has ended"):
                put(name, {"config.json": "mine"})
        put(tmp_path / "deep" / "other", {"config.json": "mine"})  # beside it there is room
        assert files(out) == before
    assert files(out) == {"config.json": "theirs"}
    put(out, {"config.json": "mine"})
    assert files(out) == {"config.json": "mine"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["other", "out"]


def test_two_threads_are_two_runs_and_a_lock_within_a_lock_is_the_same_one(tmp_path: Path) -> None:
    """And folders that were made for nothing go again; those that were there stay."""
    with staged(str(tmp_path / "out")) as staging, ThreadPoolExecutor(1) as pool:
        write(Path(staging), {"config.json": "first"})
        refused = pool.submit(put, tmp_path / "out", {"config.json": "second"}).exception()
    assert isinstance(refused, RotationMergeError)
    assert files(tmp_path) == {"out/config.json": "first"}
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "deep" / "out"
    with locked(out, out / "file"), locked(out):
        assert out.parent.is_dir()
        assert not out.exists()
    assert list((tmp_path / "mine").iterdir()) == []


MINE = {"docs/keep.txt": "mine", "model_notes.safetensors": "mine", "model-ema.bin": "mine"}
HEAD = {f"heads/a/{name}": text for name, text in MODEL.items()}
PICKLED = ("config.json", "pytorch_model.bin")
ADAPTER = {"adapter_config.json": "new", "adapter_model.bin": "new"}
MOVED: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "files of others stay": ({**MINE, "docs/model.safetensors": "mine", "docs/both": "old"},
                             {**NEW, "docs/both": "new", "docs/deep/er": "new"},
                             {**MINE, "docs/model.safetensors": "mine"}),
    "old shards go": (HEAD, {f"{at}{name}": "new" for at in ("", "heads/a/") for name in PICKLED}, {}),
    "heads of an earlier merge go": ({**HEAD, "heads/a/rotation_merge.json": "old", "heads/mine/notes.txt": "mine"},
                                     {**NEW, "heads/b/config.json": "new"}, {"heads/mine/notes.txt": "mine"}),
    "the picture of an earlier merge goes": ({REPORT_FILE: "old", "distances.png": "old"},
                                             {**NEW, REPORT_FILE: "new"}, {}),
    "a picture of others stays": ({"distances.png": "mine"}, NEW, {"distances.png": "mine"}),
    "an adapter is no model": ({}, ADAPTER, {}),
}  # fmt: skip
"""Beside a model, what is in a folder, what is written into it, and what of the first stays."""


@pytest.mark.parametrize("law", MOVED)
def test_what_stays_beside_a_new_model(law: str, tmp_path: Path) -> None:
    before, new, stays = MOVED[law]
    out = write(tmp_path / "out", {**MODEL, **before})
    with staged(str(out)) as staging:
        write(Path(staging), new)
        write(out, {"log.txt": "written meanwhile"})
    assert files(out) == {**stays, **new, "log.txt": "written meanwhile"}
    put(out, MODEL)
    further = {name for name in new if "/" in name or name == REPORT_FILE}
    assert set(files(out)) == {*stays, *MODEL, "log.txt", *further} - ADAPTER.keys()


def test_a_link_gives_way_and_what_it_stands_for_stays(tmp_path: Path) -> None:
    mine = {"gram": "mine", "deep/config.json": "mine"}
    elsewhere = write(tmp_path / "elsewhere", mine)
    out = write(tmp_path / "out", MODEL)
    (out / "stats").symlink_to(elsewhere)
    (out / "README.md").symlink_to(elsewhere / "gram")
    new = {"config.json": "new", "stats/gram": "new", "stats/deep/adapter_config.json": "new", "README.md": "new"}
    put(out, new)
    assert files(out) == new
    assert files(elsewhere) == mine


def test_a_folder_in_the_way_of_a_file_stays(tmp_path: Path) -> None:
    """What was written stays, too, until the next run."""
    out = write(tmp_path / "out", {**MODEL, "README.md/mine": "mine"})
    before = files(out)
    with pytest.raises(RotationMergeError, match=r"README.md is a folder, where a file is to be written.*kept in"):
        put(out, {"config.json": "new", "README.md": "new"})
    assert files(out) == before
    assert files(tmp_path / ".out.partial" / "out") == {"config.json": "new", "README.md": "new"}
    shutil.rmtree(out / "README.md")
    put(out, NEW)
    assert files(tmp_path) == {f"out/{name}": text for name, text in NEW.items()}


def model_in(content: dict[str, str], folder: str) -> dict[str, str]:
    """The files of the model in one folder (`""`, or with a slash at its end), by name."""
    below = {name.removeprefix(folder): text for name, text in content.items() if name.startswith(folder)}
    return {name: text for name, text in below.items() if is_of_a_model(name)}


def killed(out: Path, new: dict[str, str], step: int) -> bool:
    """Write in a process of its own, which kills itself before its move or removal of this number; whether it lived."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    at_step(step, out.parents[1] / "count", names=("remove", "replace", "rename", "unlink", "rmdir"))()
    put(out, new)
    os._exit(0)


def test_killed_at_every_step(tmp_path: Path) -> None:
    """A folder has no config, or is one of the two models, whole; the next run writes the other one."""
    mine = {"notes.txt": "mine", "sub/mine.txt": "mine", "sub/both": "old"}
    old = {**MODEL, **mine, **HEAD, "heads/a/rotation_merge.json": "old"}
    new = {**NEW, "sub/both": "new", "heads/b/config.json": "new", "heads/b/model.safetensors": "new"}
    after = {**mine, **new}
    for step in range(1, 100):
        place = tmp_path / str(step)
        write(place / "out", old)
        lived = killed(place / "out", new, step)
        present = files(place / "out")
        for folder in ("", "heads/a/", "heads/b/"):
            model = model_in(present, folder)
            assert "config.json" not in model or model in (model_in(old, folder), model_in(after, folder)), step
        put(place / "out", new)
        assert files(place) == {f"out/{name}": text for name, text in after.items()}, step
        if lived:
            assert step > 10
            return
    raise AssertionError("the writing never came to its end")


@pytest.mark.parametrize("mounted", [False, True])
def test_a_place_inside_a_folder_that_nothing_can_lie_beside(
    tmp_path: Path, mounted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of its own, or one mounted where nobody may write beside it."""
    out = write(tmp_path / "closed" / "out", MODEL)
    if mounted:
        monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(out))
    else:
        real = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(out.parent) and real(path, mode))
    with in_another_process(out):
        with pytest.raises(RotationMergeError, match="another run"):
            put(out, {"config.json": "mine"})
        assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert files(out) == {"config.json": "theirs"}
