"""What other libraries say of full disks, damaged files and too little memory, in words of ours."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from rotation_merge.mergekit_plugin.console import line


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", "the disk is full"),
        ('Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "..." })', "the disk is full"),
        ("Error while serializing: I/O error: File too large (os error 27)", "grew over the limit"),
        (
            'Error while serializing: IoError(Os { code: 27, kind: FileTooLarge, message: "..." })',
            "grew over the limit",
        ),
        ('Error while serializing: IoError(Os { code: 13, kind: PermissionDenied, message: "..." })', "permissions"),
        ("Error while deserializing header: InvalidHeaderDeserialization", "corrupt"),
        ("Error while deserializing header: incomplete metadata, file not fully covered", "corrupt"),
    ],
)
def test_what_safetensors_says_in_new_and_old_releases(said: str, means: str) -> None:
    assert means in line(SafetensorError(said))


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB"),
            "the GPU ran out of memory (tried to allocate 2.00 GiB)",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
            "this machine ran out of memory (tried to allocate 64 bytes); match fewer blocks at once (OMP_NUM_",
        ),
        (MemoryError(), "this machine ran out of memory; match fewer blocks at once (OMP_NUM_THREADS=1; merges: --low"),
    ],
)
def test_what_torch_says_of_too_little_memory(error: Exception, means: str) -> None:
    assert line(error).startswith(means)
    assert "another device" in line(error)
