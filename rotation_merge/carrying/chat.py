"""The chat template of a fine-tune, brought to a new base that has its tokens at the same ids."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rotation_merge.model.headers import TOKENIZER, read_json
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import tokenizer_in, vocabulary_size
from rotation_merge.model.writing import small_files

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of a config and of generation_config.json that name tokens."""

GENERATION = "generation_config.json"


def chat_folder(old: View, tuned: View | str) -> str:
    """The folder of a fine-tune or adapter with a chat template that the old base lacks; empty if it has none."""
    if old.files is None or vocabulary_size(old) is None:
        return ""
    if isinstance(tuned, View):
        lora = tuned.reference.lora
        tuned = lora.path if lora is not None else "" if tuned.files is None else tuned.folder
    tokenizers = [tokenizer_in(folder) for folder in (old.folder, tuned) if os.path.isdir(folder)]
    before, template = (getattr(tokenizer, "chat_template", None) for tokenizer in (tokenizers[0], tokenizers[-1]))
    return tuned if template is not None and template != before else ""


def with_chat(base: View, chat: str, old: View, tuned: View) -> View:
    """The new base with the fine-tune's tokenizer, and the ids with which that begins, ends and pads.

    Args:
        chat: the folder of the tokenizer.
    """
    ids, generation = (_changed_ids(old, tuned, file) for file in ("config.json", GENERATION))
    files = {} if base.files is None else small_files(base.folder)
    files = {name: content for name, content in files.items() if not TOKENIZER.fullmatch(name)} | tokenizer_files(chat)
    if generation:
        entries = {**json.loads(files.get(GENERATION, b"{}")), **generation}
        files[GENERATION] = f"{json.dumps(entries, indent=2)}\n".encode()
    return replace(base, config={**base.config, **ids}, changed={**base.changed, **ids}, beside=files)


def tokenizer_files(folder: str) -> dict[str, bytes]:
    """The files of the tokenizer in a folder, by name."""
    names = filter(TOKENIZER.fullmatch, sorted(os.listdir(folder)))
    return {name: Path(folder, name).read_bytes() for name in names}


def chat_lines(chat: str, same_ids: bool) -> list[str]:
    """A line for the report on the chat template, if there is one."""
    if not chat:
        return []
    return [
        "Its chat template was copied."
        if same_ids
        else "Its chat template was not copied: the new base has its tokens at other ids."
    ]


def _changed_ids(old: View, tuned: View, file: str) -> dict[str, Any]:
    """Entries of a file that name other tokens than the old base's file."""
    before, after = ({} if view.files is None else _read(os.path.join(view.folder, file)) for view in (old, tuned))
    return {key: after[key] for key in SPECIAL if after.get(key) is not None and after[key] != before.get(key)}


def _read(path: str) -> dict[str, Any]:
    return read_json(path) if os.path.exists(path) else {}
