"""Published merges and checkpoints that `pull` and recipes refuse."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bad_checkpoints import EVERY_READER
from spoiling import Bench, Row, both, edit

HONEST = {"config.json": b"{}", "README.md": b"# x\n"}
MANIFEST = "rotation_merge.manifest.json"


def published(
    contents: Mapping[str, bytes] = HONEST, /, repo: str = "org/merge", **changes: Any
) -> Callable[[Bench], None]:
    """A repository with a manifest that is right but for some entries."""

    def spoil(bench: Bench) -> None:
        content: dict[str, Any] = {
            "format": "rotation_merge.manifest.1",
            "repository": repo,
            "versions": {"torch": "2.8.0"},
        }
        content["files"] = {n: {"sha256": hashlib.sha256(x).hexdigest(), "bytes": len(x)} for n, x in contents.items()}
        for key, value in changes.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        bench.hub.commit("models/org/merge", {**contents, MANIFEST: json.dumps(content).encode()})

    return spoil


def committed(**files: bytes) -> Callable[[Bench], None]:
    return lambda bench: bench.hub.commit("models/org/merge", {name.replace("__", "."): x for name, x in files.items()})


PULL = ("pull org/merge out", "pull org/merge vit --force")


def in_pull(name: str, spoil: Callable[[Bench], object], *words: str, commands: tuple[str, ...] = PULL) -> Row:
    """A repository that is pulled into a new folder, and over a model."""
    return Row(f"pull: {name}", words, spoil, commands=commands)


def facts(**changes: Any) -> dict[str, Any]:
    return {"config.json": {"sha256": "0" * 64, "bytes": 2, **changes}}


MEASURED = {
    **{"file": "0-s.safetensors", "model": "org/a@1", "kinds": ["gram"], "data": "my texts.txt", "data_hash": "0" * 40},
    **{"samples": 8, "seed": 0, "length": 16, "batch_size": 4, "labels": "sampled"},
}
PULLED = {"models": [{"model": "org/a@main"}], "base_model": "org/a@main", "merge_method": "rotation_merge"}

PULLS = [
    *(
        in_pull(
            f"file {name!r}",
            published({**HONEST, name: b"x"}),
            "a hidden file, or one outside its folder",
            commands=(*PULL, "pull org/merge out --include '*'"),
        )
        for name in (
            *(".git/config", "alignment/.x.safetensors", "../config.json", "/tmp/config.json", "C:\\config.json"),
            *("alignment//0.safetensors", "-rf.safetensors", "model\x1b]0;x\x07.safetensors"),
        )
    ),
    *(
        in_pull(f"file '{name}'", published({**HONEST, name: b"x"}), "not part of a merge", "ask its publisher")
        for name in (
            *("modeling_llama.py", "pytorch_model.bin", "data/0-x.py", "alignment/deeper/0.safetensors", MANIFEST),
        )
    ),
    in_pull("manifest of another repository", published(repository="org/else"), "its manifest belongs to 'org/else'"),
    *(
        in_pull(f"manifest with {name}", published(**changes), "is not a manifest", "ask its publisher")
        for name, changes in (
            ("no repository's name", {"repository": "else"}),
            ("another format", {"format": "\x1b]0;owned\x07"}),
            ("a list of files", {"files": ["config.json"]}),
            ("a version that is none", {"versions": {"torch": "\x1b[31m"}}),
            ("a negative size", {"files": facts(bytes=-1)}),
            ("an infinite size", {"files": facts(bytes=float("inf"))}),
            ("a size that is text", {"files": facts(bytes="2")}),
            ("a size that is true", {"files": facts(bytes=True)}),
            ("a sum that is none", {"files": facts(sha256="\x1b" * 64)}),
            *(
                (f"statistics whose {key} is {value!r}", {"statistics": [{**MEASURED, key: value}]})
                for key, value in (
                    ("file", "../x"),
                    ("model", "org/a; rm x"),
                    ("kinds", ["gram; x"]),
                    ("data", "/etc/passwd"),
                    ("data_hash", ""),
                    ("samples", "8; x"),
                    ("seed", True),
                    ("length", [16]),
                    ("labels", "all"),
                )
            ),
        )
    ),
    *(
        in_pull(
            f"manifest that is {name}",
            committed(**{"config__json": b"{}", MANIFEST.replace(".", "__"): text}),
            "not a manifest",
        )
        for name, text in (
            ("deep", b"[" * 100_000),
            ("not UTF-8", b'{"format": "\xff"}'),
            ("a number of many digits", b'{"format": ' + b"9" * 10_000 + b"}"),
            ("nothing", b""),
            ("large", b" " * 10_000_001),
        )
    ),
    in_pull(
        "file of another size",
        both(published(), committed(config__json=b"{ }")),
        "is not what was published (3 bytes, 2 in the manifest)",
    ),
    in_pull("file of another content", both(published(), committed(config__json=b"[]")), "SHA-256"),
    in_pull(
        "file that is missing",
        published(files={"tokenizer.json": {"sha256": "0" * 64, "bytes": 2}}),
        "lacks 'tokenizer.json'",
    ),
    *(
        in_pull(
            f"recipe that names {name!r}",
            published({**HONEST, "recipe.yml": json.dumps({**PULLED, "parameters": {"data": name}}).encode()}),
            "recipe.yml",
            "parameters.data",
        )
        for name in (
            "/etc/passwd",
            "../x",
            "a/../../x",
            "~/.bashrc",
            "~root/x",
            "other/x",
            ".bashrc",
            "org/m/.git/config@main",
            "./x",
            "C:\\x",
            "..\\x",
        )
    ),
    *(
        in_pull(
            f"recipe with a path in {place}",
            published({**HONEST, "recipe.yml": json.dumps({**PULLED, **entries}).encode()}),
            "recipe.yml",
            "../x",
            "ask its publisher",
        )
        for place, entries in (
            ("base_model", {"base_model": "../x"}),
            ("a model", {"models": [{"model": "../x"}]}),
            ("a model in parts", {"models": [{"model": {"model": {"path": "../x"}}}]}),
            ("an adapter", {"models": [{"model": "org/a+../x"}]}),
            ("a slice", {"slices": [{"sources": [{"model": "../x", "layer_range": [0, 1]}]}]}),
            ("a module", {"modules": {"text": {"models": [{"model": "../x"}]}}}),
            ("the tokenizer", {"tokenizer": {"source": "../x"}}),
            ("a token", {"tokenizer": {"tokens": {"a": {"source": {"kind": "model_token", "model": "../x"}}}}}),
            ("a name of mergekit-multi", {"name": "../x"}),
            ("alignment", {"models": [{"model": "org/a", "parameters": {"alignment": "../x"}}]}),
            ("save_alignment", {"parameters": {"save_alignment": "../x"}}),
            ("statistics", {"parameters": {"statistics": [{"filter": "mlp", "value": "../x"}]}}),
            ("finetuned_from", {"parameters": {"finetuned_from": ["../x"]}}),
            ("what nobody knows", {"parameters": {"anything": [{"at": {"all": "../x"}}]}}),
        )
    ),
    *(
        in_pull(f"{file} that is {name}", published({**HONEST, file: text}), file, "ask its publisher")
        for file, name, text in (
            ("mergekit_config.yml", "no YAML", b"a: ["),
            ("recipe.yml", "not UTF-8", b"merge_method: \xff\n"),
            ("recipe.yml", "a list", b"- a\n"),
            ("recipe.yml", "deep", b"a: " + b"[" * 1200),
            ("recipe.yml", "bytes", b"base_model: !!binary " + base64.b64encode(b"../x") + b"\n"),
            ("recipe.yml", "a set", b"parameters: {data: !!set {/etc/passwd: null}}\n"),
            ("recipe.yml", "a date", b"base_model: 2020-01-01\n"),
            ("recipe.yml", "an alias of itself", b"a: &a [*a]\n"),
        )
    ),
    *(
        Row(
            f"hub: {name}",
            (words,),
            both(
                spoil,
                lambda bench: bench.hub.publish("org/donor", Path("donor")),
                edit(("model: donor", "model: org/donor")),
            ),
            ("merge",),
            ("verify anchor org/donor",),
        )
        for name, (spoil, words) in EVERY_READER.items()
    ),
]
