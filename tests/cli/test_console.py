"""What other libraries say of full disks, damaged files and too little memory, in words of ours."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from rotation_merge.mergekit_plugin.console import line

SAID: dict[str, tuple[Exception, str]] = {
    f"safetensors: {text}": (SafetensorError(f"Error while {text}"), means)
    for text, means in (
        ("serializing: I/O error: No space left on device (os error 28)", "the disk is full"),
        ('serializing: IoError(Os { code: 28, kind: StorageFull, message: "..." })', "the disk is full"),
        ("serializing: I/O error: File too large (os error 27)", "grew over the limit"),
        ('serializing: IoError(Os { code: 27, kind: FileTooLarge, message: "..." })', "grew over the limit"),
        ('serializing: IoError(Os { code: 13, kind: PermissionDenied, message: "..." })', "permissions"),
        ("deserializing header: InvalidHeaderDeserialization", "corrupt"),
        ("deserializing header: incomplete metadata, file not fully covered", "corrupt"),
    )
}
ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB")
ON_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")
SAID |= {
    "a GPU": (ON_GPU, "the GPU ran out of memory (tried to allocate 2.00 GiB); match on another device"),
    "torch": (ON_CPU, "this machine ran out of memory (tried to allocate 64 bytes); match fewer blocks at once (OMP_"),
    "Python": (
        MemoryError(),
        "memory; match fewer blocks at once (OMP_NUM_THREADS=1; merges: --low-cpu-memory), or on",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_other_libraries_say(name: str) -> None:
    error, means = SAID[name]
    assert means in line(error)
