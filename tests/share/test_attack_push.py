"""What must not leave this machine: files that are no part of a merge, links out of its folder, hidden files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import parsed, run
from hub_support import Hub, at_home
from plugin_support import make, merged, one_error, recipe_for

from rotation_merge.share.contents import belongs, is_weights

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
STRAY = (
    *("id_rsa", "env.local", "notes.txt", "trainer_state.json", "training_args.bin", "optimizer.pt", "model.py"),
    *("model.safetensors.partial", "out.unfinished/run.txt", "wandb/run.log", "checkpoint-100/optimizer.pt"),
    *("checkpoint-100/model.safetensors", "__pycache__/x.pyc", "runs/events.out", ".env", ".git/config", "data/x.key"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> tuple[Path, list[str], list[str]]:
    """A merge, what `--as` says of its models, and what is published of it."""
    folder = tmp_path_factory.mktemp("made")
    models = [make("llama", folder / name, seed) for seed, name in enumerate(("a", "b"))]
    merged(recipe_for("linear", *models), folder / "out")
    names = [word for model in models for word in ("--as", f"{model}=org/{model.name}@1")]
    with pytest.MonkeyPatch.context() as patch:
        at_home(hub, folder / "cache", patch)
        usual = list(parsed("push", folder / "out", "me/x", *names)["files"])
    return folder / "out", names, usual


@pytest.fixture
def out(made: tuple[Path, list[str], list[str]]) -> Iterator[Path]:
    """The merge's folder; what a test puts there goes with it."""
    before = set(made[0].rglob("*"))
    yield made[0]
    for path in sorted(set(made[0].rglob("*")) - before, reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def put(folder: Path, *places: str) -> None:
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(SECRET)


@pytest.mark.slow
def test_only_what_belongs_to_a_merge(made: tuple[Path, list[str], list[str]], out: Path, home: Hub) -> None:
    put(out, *STRAY)
    found = parsed("push", out, "me/x", *made[1])
    assert list(found["files"]) == made[2]
    assert sorted(found["left_out"]) == sorted(place for place in STRAY if not place.startswith("."))
    done = run("push", out, "me/x", *made[1], "--yes")
    assert done.exit_code == 0, done.output
    assert "Left out: " in done.output
    assert sorted(home.files("me/x")) == sorted(made[2])
    assert not any(SECRET in content for content in home.files("me/x").values())


def test_what_a_user_includes(made: tuple[Path, list[str], list[str]], out: Path, home: Hub) -> None:
    put(out, *STRAY, "plots/a/b.svg")
    found = parsed("push", out, "me/x", *made[1], "--include", "notes.txt", "--include", "plots/*")
    assert sorted(found["files"]) == sorted([*made[2], "notes.txt", "plots/a/b.svg"])
    for pattern in (".env", ".git/*", "nowhere/*"):
        line = one_error(run("push", out, "me/x", *made[1], "--include", pattern).output)
        assert f"--include {pattern} names no file" in line


LINKS = {
    "of a name that a merge has": "tokenizer.json",
    "the card": "README.md",
    "the recipe": "recipe.yml",
    "weights": "model-00009-of-00009.safetensors",
    "of any name": "notes.txt",
    "deep": "alignment/maps.safetensors",
}


@pytest.mark.parametrize("what", LINKS)
def test_links_out_of_the_folder(
    what: str, made: tuple[Path, list[str], list[str]], out: Path, home: Hub, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_bytes(SECRET)
    link = out / LINKS[what]
    link.parent.mkdir(exist_ok=True)
    kept = link.read_bytes() if link.exists() else None
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "id_rsa")
    before = len(home.asked)
    try:
        for options in ((), ("--include", "*"), ("--yes",)):
            line = one_error(run("push", out, "me/y", *made[1], *options).output)
            assert f"links that lead out of the folder are not published: {LINKS[what]}" in line
    finally:
        link.unlink()
        if kept is not None:
            link.write_bytes(kept)
    assert home.asked[before:] == []
    assert "models/me/y" not in home.repos


def test_links_to_folders_and_inside(
    made: tuple[Path, list[str], list[str]], out: Path, home: Hub, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes(SECRET)
    (out / "1_Pooling").symlink_to(tmp_path / "other")
    assert "are not published: 1_Pooling" in one_error(run("push", out, "me/y", *made[1]).output)
    (out / "1_Pooling").unlink()
    (out / "loop").symlink_to(out)
    (out / "LICENSE").symlink_to("README.md")
    found = parsed("push", out, "me/y", *made[1])
    assert sorted(found["files"]) == sorted([*made[2], "LICENSE"])


def test_a_model_without_safetensors(made: tuple[Path, list[str], list[str]], out: Path, home: Hub) -> None:
    """Pickles can hold code."""
    weights = {path: path.read_bytes() for path in out.glob("*.safetensors")}
    try:
        for path in weights:
            path.unlink()
        put(out, "pytorch_model.bin")
        assert "no weights in safetensors" in one_error(run("push", out, "me/y", *made[1]).output)
    finally:
        for path, content in weights.items():
            path.write_bytes(content)


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
