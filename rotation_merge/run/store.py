"""Stored states between layers and between forwards of one layer: in memory, or in files.

They are the hidden states that a layer gives to the next (`StateStore`), keys and values that layers after it read
(`SharedKVCache`), and outputs of its solved modules (`SettledOutputs`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from rotation_merge.errors import RotationMergeError, SpaceError, short
from rotation_merge.files import TemporaryFolder

SPILL = "free some space, or name a folder that has more in TMPDIR"
"""Remedy in a recipe if hidden states do not fit."""


class StateStore:
    """Values by key, with their tensors off the accelerator: tensors, lists and mappings of them, outputs of modules.

    Args:
        folder: tensors are written to a new folder inside of it, which goes with the store; None: kept in memory.
        remedy: for a full disk.
    """

    def __init__(self, folder: str | None = None, remedy: str = SPILL) -> None:
        self._remedy = remedy
        self._forms: dict[str, tuple[Any, list[Any]]] = {}
        self._held: dict[str, list[Tensor]] = {}
        self._files: dict[str, str] = {}
        self._count = 0
        self._scratch = None if folder is None else _scratch(folder)
        self.folder = None if self._scratch is None else self._scratch.path

    def put(self, key: str, value: Any, owned: bool = False) -> None:
        """Store a value under a key; an earlier one is replaced.

        Args:
            owned: nobody else has its tensors, so that they need not be copied.
        """
        leaves, form = _pytree.tree_flatten(value)
        stored = [x.detach().to("cpu", copy=not owned).contiguous() for x in leaves if isinstance(x, Tensor)]
        self._forms[key] = form, [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        if self.folder is None:
            self._held[key] = stored
            return
        if key not in self._files:
            self._count += 1
            self._files[key] = os.path.join(self.folder, f"{self._count}.safetensors")
        try:
            save_file({str(i): tensor for i, tensor in enumerate(stored)}, self._files[key])
        except (SafetensorError, OSError) as error:
            problem = f"hidden states cannot be written ({short(error)})"
            raise SpaceError(problem, where=os.path.dirname(self.folder), remedy=self._remedy) from error

    def get(self, key: str, device: torch.device | str = "cpu") -> Any:
        """The value of a key."""
        form, leaves = self._forms[key]
        loaded = {} if self.folder is None else load_file(self._files[key])
        tensors = iter(self._held[key] if self.folder is None else (loaded[str(i)] for i in range(len(loaded))))
        return _pytree.tree_unflatten([next(tensors).to(device) if x is _TENSOR else x for x in leaves], form)

    def __contains__(self, key: object) -> bool:
        return key in self._forms

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._forms.pop(key, None)
        self._held.pop(key, None)
        if key in self._files:
            os.remove(self._files.pop(key))

    def close(self) -> None:
        """Forget everything, for good."""
        self._forms.clear()
        self._held.clear()
        self._files.clear()
        if self._scratch is not None:
            self._scratch.close()


_TENSOR = object()
"""Stands for a tensor in a stored value."""


class BatchStore:
    """Named values of each batch in a store, which can be dropped one by one."""

    def __init__(self, store: StateStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._names: dict[int, list[str]] = {}

    def put(self, batch: int, known: Mapping[str, Any]) -> None:
        """Store a batch's values; earlier ones are replaced."""
        self.drop(batch, set(self.names(batch)) - known.keys())
        self.add(batch, known)

    def add(self, batch: int, known: Mapping[str, Any]) -> None:
        """Add values to a batch."""
        names = self._names.setdefault(batch, [])
        names += [name for name in known if name not in names]
        for name, value in known.items():
            self.store.put(self._key(batch, name), value, owned=True)

    def get(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The values of a batch."""
        return {name: self.store.get(self._key(batch, name), device) for name in self.names(batch)}

    def names(self, batch: int) -> list[str]:
        """The names of a batch's values."""
        return [*self._names.get(batch, [])]

    def keep(self, keep_names: Collection[str]) -> None:
        """Forget all but these names."""
        for batch, names in self._names.items():
            self.drop(batch, set(names) - set(keep_names))

    def drop(self, batch: int, names: Collection[str]) -> None:
        """Drop some values of a batch."""
        for name in names:
            self.store.drop(self._key(batch, name))
            self._names[batch].remove(name)

    def _key(self, batch: int, name: str) -> str:
        return f"{self.prefix}:{batch}:{name}"


def _scratch(parent: str) -> TemporaryFolder:
    try:
        return TemporaryFolder(parent)
    except OSError as error:
        raise RotationMergeError(
            f"cannot be written to ({short(error)})", where=parent, remedy="name another folder in TMPDIR"
        ) from error


PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of arguments and outputs of parts that leave nothing elsewhere; others may be stateful."""


class SharedKVCache:
    """Entries that layers add to shared mappings, kept in the store of hidden states."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._before: dict[str, dict[Any, Any]] = {}

    def entered(self, arguments: Mapping[str, Any]) -> None:
        """A layer is about to run on these arguments."""
        self._before = {
            name: dict(mapping) for name, mapping in arguments.items() if isinstance(mapping, MutableMapping)
        }

    def keep(self, key: str, arguments: Mapping[str, Any]) -> None:
        """Store the entries that the layer has added."""
        put = {
            name: {entry: x for entry, x in arguments[name].items() if before.get(entry) is not x}
            for name, before in self._before.items()
        }
        if any(put.values()):
            self.store.put(key, put)

    def restore_entries(self, key: str, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Restore a layer's entries without running it."""
        if key in self.store:
            for name, entries in self.store.get(key, device).items():
                arguments[name].update(entries)


class SettledOutputs:
    """Cached outputs of modules of one block, by batch.

    Attributes:
        modules: the maps by key, and the parts by the name that they have in the layer.
        pending: keys of the maps that are still to be solved; those that have been are settled, where `keys` has them.
        keys: see above.
    """

    def __init__(self, store: StateStore, prefix: str, maps: Mapping[str, nn.Module], layer: nn.Module | None) -> None:
        self.keys: set[str] = set()
        self.pending: set[str] = set()
        self.maps = maps
        self.within = {} if layer is None else _parts(layer, maps)
        self.modules = {**maps, **{name: layer.get_submodule(name) for name in self.within if layer is not None}}
        self._once: set[str] = set()
        self._kept = BatchStore(store, f"{prefix}:settled")

    def settle(self, keys: Iterable[str]) -> None:
        """Mark maps as solved."""
        self.keys.update(keys)
        self.pending.difference_update(keys)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """See which parts a forward of the whole layer enters once, with nothing that they could leave anything in."""
        calls: Counter[str] = Counter()

        def entered(name: str, _: nn.Module, args: Any, named: dict[str, Any]) -> None:
            leaves = any(isinstance(x, MutableMapping) for x in (*args, *named.values()))
            plain = all(isinstance(x, PLAIN) for x in _pytree.tree_leaves((args, named)))
            calls[name] += 1 if plain and not leaves else 2

        hooks = [
            self.modules[name].register_forward_pre_hook(partial(entered, name), with_kwargs=True)
            for name in self.within
        ]
        with hooked(hooks):
            yield
        self._once = {name for name, count in calls.items() if count == 1}

    @contextmanager
    def replaying(self, batch: int, device: torch.device) -> Iterator[None]:
        """Replay cached outputs of solved modules on this batch, and cache those of newly solved ones."""
        outputs = self._kept.get(batch, device)
        for name, output in outputs.items():
            self.modules[name].forward = partial(_replay, output)
        fresh: dict[str, tuple[Any, int]] = {}
        hooks = self._hooks({*outputs}, fresh) if self.keys and self.pending else []
        try:
            with hooked(hooks):
                yield
        finally:
            for name in outputs:
                self.modules[name].__dict__.pop("forward", None)
        self._keep(batch, fresh)

    def forget(self) -> None:
        """Forget all cached outputs."""
        self._kept.keep(())

    def _hooks(self, known: set[str], fresh: dict[str, tuple[Any, int]]) -> list[Any]:
        """Hooks that find outputs, each with the sum of its tensors' versions; a changed tensor raises the sum."""
        before = [True]

        def on_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
            if name in self.maps or before[0]:
                fresh[name] = output, versions(output)

        def entered(*_: Any) -> None:
            before[0] = False

        settled_names = [key for key in self.maps if key in self.keys]
        settled_names += [name for name, keys in self.within.items() if name in self._once and self._is_settled(keys)]
        hooks = [self.modules[n].register_forward_hook(partial(on_output, n)) for n in settled_names if n not in known]
        return hooks + [self.maps[key].register_forward_pre_hook(entered) for key in self.pending]

    def _is_settled(self, keys: set[str]) -> bool:
        return bool(keys & self.keys) and not keys & self.pending

    def _keep(self, batch: int, fresh: Mapping[str, tuple[Any, int]]) -> None:
        for name, (output, version) in fresh.items():
            leaves = _pytree.tree_leaves(output)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            plain = all(isinstance(x, PLAIN) for x in leaves)
            if versions(output) == version and self._worth(name, tensors) and plain:
                self._kept.add(batch, {name: output})
        kept = self._kept.names(batch)
        wholes = {part: self.within[part] for part in kept if part in self.within}
        inner = [n for n in kept if any(n in keys or n.startswith(f"{part}.") for part, keys in wholes.items())]
        self._kept.drop(batch, inner)

    def _worth(self, name: str, tensors: list[Tensor]) -> bool:
        """Whether a part's output takes no more memory than the outputs of its maps."""
        if name in self.maps or not tensors:
            return name in self.maps
        outputs = sum(_outputs(self.maps[key]) for key in self.within[name])
        return sum(x.numel() for x in tensors) <= tensors[0].numel() // tensors[0].shape[-1] * outputs


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks of modules that are removed when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _outputs(module: Any) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)


def _parts(layer: nn.Module, maps: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Modules of a layer that hold maps, with those maps, by the module's name."""
    places = {id(module): key for key, module in maps.items()}
    parts = {
        name: {places[id(inner)] for inner in module.modules() if id(inner) in places}
        for name, module in layer.named_modules()
        if name and id(module) not in places
    }
    return {name: keys for name, keys in parts.items() if keys}


def versions(value: Any) -> int:
    """The sum of the versions of all tensors in a value, which rises when one is changed in place."""
    return sum(x._version for x in _pytree.tree_leaves(value) if isinstance(x, Tensor))


def _replay(output: Any, *_: Any, **__: Any) -> Any:
    """A copy of an output, which what follows may change in place."""
    return _pytree.tree_map_only(Tensor, Tensor.clone, output)
