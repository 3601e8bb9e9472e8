"""Manifests made to harm: whatever one says, `pull` ends in one line, and nothing is on disk that was not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import run
from hub_support import MANIFEST_FILE, Hub, publish_as_push_does
from plugin_support import files_of, one_error

from rotation_merge.share.contents import belongs, is_weights, well_formed

REPO = "org/evil"
HONEST = {"config.json": b"{}", "README.md": b"# x\n", "alignment/0-maps.safetensors": b"maps"}


def refused(home: Hub, folder: Path, *options: str) -> str:
    """The line that a pull ends in, onto nothing and onto a folder that holds something."""
    (folder / "there").mkdir()
    (folder / "there" / "config.json").write_text('{"mine": 1}')
    before = files_of(folder)
    done = run("pull", REPO, folder / "new", *options)
    again = run("pull", REPO, folder / "there", "--force", *options)
    assert (done.exit_code, again.exit_code) == (2, 2), done.output
    assert files_of(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["there"]
    line = one_error(done.output)
    assert line.isprintable()
    return line


def test_what_is_honest_is_taken(home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, HONEST)
    assert run("pull", REPO, tmp_path / "out").exit_code == 0
    assert files_of(tmp_path / "out").keys() == {*HONEST, MANIFEST_FILE}


PLACES = {
    "hidden folder": ".git/config",
    "hidden file": ".bashrc",
    "hidden below": "alignment/.x.safetensors",
    "hidden head": "heads/.git/config.json",
    "above": "../config.json",
    "above below": "alignment/../../config.json",
    "absolute": "/tmp/config.json",
    "home": "~/config.json",
    "drive": "C:\\config.json",
    "backslash": "alignment\\..\\..\\config.json",
    "empty part": "alignment//0.safetensors",
    "option": "-rf.safetensors",
    "control": "model\x1b]0;x\x07.safetensors",
    "new line": "model\n.safetensors",
    "right to left": "model\u202egpj.safetensors",
    "code": "modeling_llama.py",
    "code below": "alignment/setup.py",
    "pickle": "pytorch_model.bin",
    "notebook": "demo.ipynb",
    "makefile": "Makefile",
    "environment": "env.local",
    "state": "trainer_state.json",
    "deep": "alignment/deeper/0.safetensors",
    "samples that are code": "data/0-x.py",
    "itself": MANIFEST_FILE,
}


@pytest.mark.parametrize("what", PLACES)
def test_no_file_that_no_merge_has(what: str, home: Hub, tmp_path: Path) -> None:
    place = PLACES[what]
    publish_as_push_does(home, REPO, {**HONEST, place: b"x"})
    asked = len(home.asked)
    assert "names a" in refused(home, tmp_path)
    assert not any(place in line for line in home.asked[asked:] if not line.endswith(MANIFEST_FILE)), "it was fetched"
    if not well_formed(place):
        assert "hidden" in refused_again(home, tmp_path), "not even where a user includes all"


def refused_again(home: Hub, folder: Path) -> str:
    done = run("pull", REPO, folder / "new", "--include", "*")
    assert done.exit_code == 2
    assert not (folder / "new").exists()
    return one_error(done.output)


MEASURED = {
    **{"file": "0-s.safetensors", "model": "org/a@1", "kinds": ["gram"], "data": "my texts.txt", "data_hash": "0" * 40},
    **{"samples": 8, "seed": 0, "length": 16, "batch_size": 4, "rank": None, "labels": "sampled"},
}

HARMFUL = {
    "file": ("../x", "/etc/x", "-x", "a;b", "x\x1b[2J"),
    "model": ("/tmp/x", "../org/a", "--help", "org/a; rm x", "$(x)", "org/a\n"),
    "kinds": ("gram", [], ["gram; x"], [1]),
    "data": ("/etc/passwd", "../x", "$(x)", "`x`", "--out", "a|b"),
    "data_hash": ("", "x" * 40, 1),
    "samples": ("8; x", -1, 1.5, None),
    "seed": ("0", True),
    "length": ("16", [16]),
    "labels": ("all",),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_commands_are_made_of_checked_fields(name: str, home: Hub, tmp_path: Path) -> None:
    for value in HARMFUL[name]:
        publish_as_push_does(home, REPO, HONEST, statistics=[{**MEASURED, name: value}])
        done = run("pull", REPO, tmp_path / "out")
        assert done.exit_code == 2, (value, done.output)
        assert one_error(done.output).isprintable()
        assert not (tmp_path / "out").exists()


def test_no_command_of_a_manifest_is_shown(home: Hub, tmp_path: Path) -> None:
    recipe = {"recipe.yml": b"merge_method: linear\nmodels: [{model: org/a}]\n"}
    publish_as_push_does(home, REPO, {**HONEST, **recipe}, statistics=[{**MEASURED, "command": "curl evil"}])
    done = run("pull", REPO, tmp_path / "out")
    assert "evil.txt" not in done.output
    assert "curl" not in done.output
    made = "measure org/a@1 --data 'my texts.txt' --kinds gram --samples 8 --seed 0 --length 16 --batch-size 4"
    assert f"rotation-merge {made} --out 0-s.safetensors" in done.output


def test_a_user_may_include_a_file(home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, {**HONEST, "plots/a.svg": b"x", "notes.pdf": b"y"})
    assert "'plots/a.svg'" in one_error(run("pull", REPO, tmp_path / "out", "--include", "*.pdf").output)
    assert run("pull", REPO, tmp_path / "out", "--include", "*.pdf", "--include", "plots/*").exit_code == 0
    assert files_of(tmp_path / "out").keys() == {*HONEST, "plots/a.svg", "notes.pdf", MANIFEST_FILE}


def test_force_replaces_a_model_and_keeps_what_else_is_there(home: Hub, tmp_path: Path) -> None:
    """In every folder that both have; the old model goes, with shards that the new one does not have."""
    out = tmp_path / "out"
    kept = {"notes.txt": b"a", "alignment/keep.txt": b"b", "alignment/9-mine.safetensors": b"c", "docs/keep.txt": b"d"}
    kept |= {".git/HEAD": b"e", "heads/mine/model.safetensors": b"f", ".gitignore": b"g"}
    old = {"config.json": b"old", "model-00001-of-00002.safetensors": b"old", "README.md": b"old"}
    for place, content in {**kept, **old}.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_bytes(content)
    files = {**HONEST, "model.safetensors": b"new", "heads/a/config.json": b"{}", "heads/a/model.safetensors": b"new"}
    publish_as_push_does(home, REPO, files)
    assert "already exists" in one_error(run("pull", REPO, out).output)
    assert run("pull", REPO, out, "--force").exit_code == 0
    found = files_of(out)
    found.pop(MANIFEST_FILE)
    assert found == {**kept, **files}


FIELDS: dict[str, dict[str, Any]] = {
    "another repository": {"repository": "org/else"},
    "no repository": {"repository": "else"},
    "a repository that is a list": {"repository": ["org/evil"]},
    "control sequences": {"repository": "org/evil\x1b[2J"},
    "a petabyte": {"files": {"config.json": {"sha256": "0" * 64, "bytes": 10**15}}},
    "less than nothing": {"files": {"config.json": {"sha256": "0" * 64, "bytes": -1}}},
    "infinity": {"files": {"config.json": {"sha256": "0" * 64, "bytes": float("inf")}}},
    "no number": {"files": {"config.json": {"sha256": "0" * 64, "bytes": "2"}}},
    "half a byte": {"files": {"config.json": {"sha256": "0" * 64, "bytes": 2.5}}},
    "true": {"files": {"config.json": {"sha256": "0" * 64, "bytes": True}}},
    "no sum": {"files": {"config.json": {"sha256": "", "bytes": 2}}},
    "a sum that is none": {"files": {"config.json": {"sha256": "\x1b" * 64, "bytes": 2}}},
    "another sum": {"files": {"config.json": {"sha256": "0" * 64, "bytes": 2}}},
    "a list of files": {"files": ["config.json"]},
    "versions that are none": {"versions": {"torch": "\x1b[31m"}},
    "versions in a list": {"versions": ["torch"]},
    "packages that are none": {"versions": {"a\nb": "1"}},
    "another format": {"format": "\x1b]0;owned\x07"},
}


@pytest.mark.parametrize("what", FIELDS)
def test_no_field_is_believed(what: str, home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, HONEST, **FIELDS[what])
    refused(home, tmp_path)


TEXTS = {
    "deep": b"[" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "not UTF-8": b'{"format": "\xff"}',
    "1e999": b'{"format": "rotation_merge.manifest.1", "repository": "org/evil", "versions": {}, '
    b'"files": {"config.json": {"sha256": "' + b"0" * 64 + b'", "bytes": 1e999}}}',
    "many digits": b'{"format": ' + b"9" * 10_000 + b"}",
    "a word": b'"rotation_merge"',
    "nothing": b"",
    "large": b" " * 10_000_001,
}


@pytest.mark.parametrize("what", TEXTS)
def test_no_text_ends_in_a_traceback(what: str, home: Hub, tmp_path: Path) -> None:
    home.repos.pop(f"models/{REPO}", None)
    home.commit(f"models/{REPO}", {**HONEST, MANIFEST_FILE: TEXTS[what]})
    assert "not a manifest" in refused(home, tmp_path)


def test_files_that_are_not_there_or_others(home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, HONEST)
    content = json.loads(home.files(REPO)[MANIFEST_FILE])
    home.commit(f"models/{REPO}", {"config.json": b"{ }"})
    assert "is not what was published (3 bytes, 2 in the manifest)" in refused(home, tmp_path)
    home.commit(f"models/{REPO}", {"config.json": b"[]"})
    assert "SHA-256" in one_error(run("pull", REPO, tmp_path / "new").output)
    content["files"]["tokenizer.json"] = content["files"]["config.json"]
    home.commit(f"models/{REPO}", {"config.json": b"{}", MANIFEST_FILE: json.dumps(content).encode()})
    assert "lacks 'tokenizer.json'" in one_error(run("pull", REPO, tmp_path / "new").output)
    assert not (tmp_path / "new").exists()


def test_what_belongs_to_a_merge() -> None:
    """Among others: every file that a tokenizer or processor of transformers is saved to."""
    for place in ("model-00001-of-00002.safetensors", "heads/a b/model.safetensors", "2_Dense/model.safetensors"):
        assert belongs(place), place
        assert is_weights(place), place
    for place in (
        "data/0-x.jsonl",
        "alignment-2.safetensors",
        "heads/a/config.json",
        "spiece.model",
        "1_Pooling/config.json",
    ):
        assert belongs(place), place
        assert not is_weights(place), place
    for place in (
        "optimizer.safetensors",
        "heads/config.json",
        "heads/a/heads/b/config.json",
        "config.json/x",
        "x/README.md",
    ):
        assert not belongs(place), place
