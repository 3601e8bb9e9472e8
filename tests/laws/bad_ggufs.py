"""Bad GGUF files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
from spoiling import Row, Step, both, bytes_of, copied, gone, put, step

import rotation_merge as rm

WHOLE = "whole.gguf"
AGAIN = "download it again"
PARTS = tuple(f"whole-0000{number}-of-00003.gguf" for number in (1, 2, 3))


STORED = Path(__file__).parents[1] / "model" / "gguf" / "tokens-bytes.gguf"
"""A Llama with a tokenizer of bytes, which lies in the folder of this name."""


@step
def rewritten(split: int = 0, architecture: str = "llama", **metadata: Any) -> None:
    """Another file of the same model.

    Args:
        split: tensors in a part; 0: all in one file.
        metadata: in the place of the right ones; None leaves one out.
    """
    reader = gguf.GGUFReader(STORED)
    writer = gguf.GGUFWriter(WHOLE, architecture, split_max_tensors=split)
    right = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    del right["general.architecture"]
    for key, value in {**right, **metadata}.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def typed(code: int) -> Step:
    """The first query map is said to be of another type."""

    def change(whole: bytes) -> bytes:
        content, name = bytearray(whole), b"blk.0.attn_q.weight"
        at = whole.index(name) + len(name)
        struct.pack_into("<I", content, at + 4 + 8 * struct.unpack_from("<I", whole, at)[0], code)
        return bytes(content) + bytes(1 << 16)

    return bytes_of(WHOLE, change)


def endless(whole: bytes) -> bytes:
    """The list of types of tokens is said to be of 2^60 entries."""
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    return whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :]


def parts(*missing: str) -> Step:
    """The model in three files, but for those that are missing."""
    return both(rewritten(split=9), *(gone(name) for name in missing))


def swapped() -> None:
    """A tokenizer beside the file, with two words the other way round."""
    content = json.loads((STORED.with_suffix("") / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    Path("tokenizer.json").write_text(json.dumps(content))


def in_gguf(name: str, spoil: Step, *words: str, file: str = WHOLE) -> Row:
    ways: dict[str, Any] = {"python": lambda: rm.average([file]).state_dict()}
    return Row(f"GGUF: {name}", words, spoil, commands=(f"evaluate {file} --data samples.jsonl",), **ways)


def shortened(share: float) -> Step:
    return bytes_of(WHOLE, lambda x: x[: int(len(x) * share)])


NO_TEXT = bytes_of(WHOLE, lambda x: x.replace(b"<|start|>", b"<|st\xffrt|>"))
NO_TARGET = both(gone(WHOLE), lambda: Path(WHOLE).symlink_to("gone.gguf"))
INTEGERS = typed(int(gguf.GGMLQuantizationType.I32))
GGUFS = [
    in_gguf("empty", put(WHOLE), "is no GGUF file", AGAIN),
    in_gguf("another file", put(WHOLE, "x" * 99), "is no GGUF file", AGAIN),
    in_gguf("endless vocabulary", bytes_of(WHOLE, endless), "truncated", AGAIN),
    in_gguf("truncated header", shortened(0.02), "truncated", AGAIN),
    in_gguf("truncated tensors", shortened(0.999), "truncated", AGAIN),
    in_gguf("unknown type of a tensor", typed(99), "is not a valid GGMLQuantizationType", "update gguf"),
    in_gguf("integers", INTEGERS, "blk.0.attn_q.weight", "type I32"),
    in_gguf("part that is missing", parts(PARTS[1]), f"{PARTS[1]} is missing", file=PARTS[0]),
    in_gguf("part alone", both(parts(), copied(PARTS[0], "one.gguf")), "is one of 3 files", file="one.gguf"),
    in_gguf("tokenizer of another model", swapped, "other tokens than whole.gguf at 2 ids"),
    in_gguf("token that is no text", NO_TEXT, "its metadata are damaged"),
    in_gguf(
        "several models in a folder", copied(WHOLE, "x/a-Q4.gguf", "x/a-Q8.gguf"), "holds 2 models in GGUF", file="x"
    ),
    in_gguf(
        "vision tower alone", copied(WHOLE, "x/mmproj-F16.gguf"), "no language model", "only mmproj-F16.gguf", file="x"
    ),
    in_gguf("no file", gone(WHOLE), "whole.gguf: no such file"),
    in_gguf("link to nothing", NO_TARGET, "whole.gguf: no such file; check the path"),
    in_gguf("unknown architecture", rewritten(architecture="rwkv7"), "'rwkv7' cannot be read"),
    *(
        in_gguf(f"{key} {value}", rewritten(**{key: value}), words)
        for key, value, words in (
            ("general.type", "imatrix", "is of type 'imatrix'"),
            ("general.type", "adapter", "in peft's format"),
            ("general.type", "mmproj", "not a language model"),
            ("llama.block_count", None, "'llama.block_count' is None, which is no size"),
            ("llama.block_count", 2_000_000_000, "'num_hidden_layers' is 2000000000 in config.json, but"),
            ("llama.block_count", 0, "'llama.block_count' is 0, which is no size"),
            ("llama.block_count", "two", "'llama.block_count' is 'two', which is no size"),
            ("llama.expert_count", 2_000_000_000, "has no place in a MixtralForCausalLM"),
            ("llama.attention.head_count", 5, "its metadata are damaged"),
            ("llama.feed_forward_length", [48, 64], "not the same in all layers"),
            ("llama.rope.scaling.type", "of-nobody", "rotary positions are scaled by 'of-nobody'"),
            ("tokenizer.ggml.model", "of-nobody", "put the model's tokenizer.json beside the file"),
            ("tokenizer.ggml.pre", "of-nobody", "splits text by 'of-nobody'"),
            ("tokenizer.ggml.pre", None, "in a way that it does not name"),
            ("tokenizer.ggml.tokens", ["a"], "1 tokens"),
            ("tokenizer.ggml.eos_token_id", [1, 2], "its tokenizer cannot be read by transformers"),
        )
    ),
]
