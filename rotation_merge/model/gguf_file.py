"""A GGUF file, read by the `gguf` package: metadata, and tensors as floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.headers import AGAIN, FLOATS, reason


class CheckedReader(gguf.GGUFReader):
    """The `gguf` package's reader; where a file ends early, that one reads empty arrays, without end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self.data = np.asarray(self.data)  # type: ignore[assignment]  # still mapped, but quicker to slice
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise EOFError(f"it ends after {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF: one file, or the files that it was split into.

    Attributes:
        paths: of all files, in their order.
        fields: metadata of the first file.
        tensors: by the name in the file, as the `gguf` package reads them.
    """

    paths: Sequence[str]
    fields: Mapping[str, gguf.ReaderField]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata("general.architecture", ""))

    def metadata(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        if field is None:
            return default
        if field.types[0] == gguf.GGUFValueType.FLOAT32:
            return float(str(field.parts[-1][0]))  # 1e-05, not 9.999999747378752e-06
        return field.contents()

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture, such as `block_count`."""
        return self.metadata(f"{self.architecture}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as torch has it, the dimension that is contiguous in memory last."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor when read: floating-point numbers keep theirs, codes become float32."""
        return getattr(torch, FLOATS.get(self.tensors[name].tensor_type.name, "float32"))

    def refusal(self, problem: str, remedy: str = AGAIN) -> CheckpointError:
        return CheckpointError(problem, where=self.paths[0], remedy=remedy)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The numbers of a tensor, or of one of the matrices that are stored one after the other in it.

        Raises:
            CheckpointError: the `gguf` package cannot read its type.
        """
        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        if tensor.tensor_type.name in FLOATS:
            return torch.from_numpy(np.array(data)).view(self.dtype(name))
        try:
            numbers = gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            words = f"of type {tensor.tensor_type.name}, which the gguf package cannot turn into numbers"
            remedy = "update gguf, or quantise the model again to another type"
            raise self.refusal(f"tensor '{name}' is {words}", remedy) from None
        return torch.from_numpy(np.ascontiguousarray(numbers, np.float32))


def open_gguf(paths: Sequence[str]) -> GgufFile:
    """The header of a model in GGUF.

    Args:
        paths: all files of the model.

    Raises:
        CheckpointError: a file is truncated, damaged or no GGUF, or the files do not belong together.
    """
    readers = [_opened(path) for path in paths]
    model = GgufFile(paths, readers[0].fields, {tensor.name: tensor for reader in readers for tensor in reader.tensors})
    count = max(1, model.metadata("split.count", len(paths)))
    total = model.metadata("split.tensors.count", sum(len(reader.tensors) for reader in readers))
    if (count, total) != (len(paths), len(model.tensors)):
        problem = f"is one of {count} files with {total} tensors, but here are {len(paths)} with {len(model.tensors)}"
        raise model.refusal(problem, f"name them NAME-00001-of-{count:05}.gguf, as they were, or download them again")
    return model


def _opened(path: str) -> CheckedReader:
    try:
        reader = CheckedReader(path)
    except (OSError, EOFError, ValueError, KeyError, OverflowError, MemoryError) as error:
        problem = f"is no GGUF file that the gguf package can read, or truncated ({short(reason(error))})"
        raise CheckpointError(problem, where=path, remedy=f"{AGAIN}, or update gguf") from error
    if reader.byte_order == "S":
        raise CheckpointError("is big-endian", where=path, remedy="write it again with llama.cpp")
    return reader
