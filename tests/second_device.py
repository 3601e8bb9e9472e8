"""A second device for machines that have one: tensors that hold CPU values and report another device.

Under `second_device()` an operation on tensors of both devices raises, as it would with a GPU. (Fake tensors of PyTorch
stop at the first `bool(tensor)`, because they hold no values.) What a GPU allows is allowed: numbers (tensors without
dimensions) of the CPU, indices of the CPU into a tensor of the device, copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
"""The only device besides the CPU that every build of PyTorch knows; here it has values."""

_NUMBERS = {bool, int, float}
_ANYWHERE = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class Far(Tensor):
    """A tensor that says it is on the second device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Far:
        result = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        result.held = held
        return result

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and hiding every operation from that takes time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given: list[Tensor] = []
    plain = [_plain(x, given) for x in args]
    named = {name: _plain(x, given) for name, x in kwargs.items()}
    far = any(isinstance(x, Far) for x in given)
    if far and len(given) > 1:
        _check(func, args, given)
    if (asked := named.get("device")) is not None:
        far, named["device"] = torch.device(asked) == DEVICE, torch.device("cpu")
    if far and named.get("generator") is not None:
        raise AssertionError(f"{func}: a generator of the CPU draws on the second device")
    if func is torch.ops.aten._conj.default:
        func = torch.ops.aten._conj_physical.default  # a conjugate bit is lost below a wrapper
    found = func(*plain, **named)
    if not far:
        return found
    if isinstance(found, Tensor):
        return args[0] if func._schema.name[-1] == "_" else Far(found)
    return (
        type(found)(Far(x) if isinstance(x, Tensor) else x for x in found) if isinstance(found, list | tuple) else found
    )


def _plain(x: Any, given: list[Tensor]) -> Any:
    """An argument as the CPU has it; the tensors in it are added to those given."""
    if x is None or type(x) in _NUMBERS:  # the quickest question first: there are hundreds of thousands
        return x
    if isinstance(x, Tensor):
        given.append(x)
        return x.held if isinstance(x, Far) else x
    return [_plain(part, given) for part in x] if isinstance(x, list | tuple) else x


def _check(func: Any, args: Any, given: list[Tensor]) -> None:
    near = [x for x in given if not isinstance(x, Far) and x.ndim]
    if func in _ANYWHERE or not near:
        return
    if func in _INDEXING and isinstance(args[0], Far) and all(isinstance(x, Far) or not x.ndim for x in args[2:3]):
        return
    shapes = [(tuple(x.shape), str(x.device)) for x in given]
    raise AssertionError(f"{func} is given tensors of two devices: {shapes}")


@contextlib.contextmanager
def second_device() -> Iterator[torch.device]:
    """Inside, tensors may be moved to the device, and operations on both devices at once raise."""
    made = torch.tensor

    def tensor(data: Any, device: torch.device | None = None, **kwargs: Any) -> Tensor:
        """torch.tensor asks no mode where its values go."""
        return Far(made(data, **kwargs)) if device == DEVICE else made(data, device=device, **kwargs)

    torch.tensor = tensor
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch.tensor = made


def sent(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, on the second device."""
    return {name: Far(tensor) for name, tensor in tensors.items()}
