"""Stored states between layers and between forwards of one layer: in memory, or in files.

They are the hidden states that a layer gives to the next (`StateStore`), the arguments with which it can be run again
(`LayerArguments`), keys and values that layers after it read (`SharedKVCache`), and outputs of its solved modules
(`SettledOutputs`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
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

SPILL = "name a folder for 'spill' that has more space, or give fewer samples"
"""Remedy in a recipe if hidden states do not fit."""


class StateStore:
    """Tensors by key, off the accelerator.

    Args:
        folder: they are written to a new folder inside of it, which goes with the store; None: kept in memory.
        remedy: for a full disk.
    """

    def __init__(self, folder: str | None = None, remedy: str = SPILL) -> None:
        self._remedy = remedy
        self._held: dict[str, list[Tensor]] = {}
        self._files: dict[str, str] = {}
        self._count = 0
        self._scratch = None if folder is None else _scratch(folder)
        self.folder = None if self._scratch is None else self._scratch.path

    def put(self, key: str, tensors: Sequence[Tensor], owned: bool = False) -> None:
        """StateStore tensors under a key; earlier ones are replaced.

        Args:
            owned: nobody else has them, so that they need not be copied.
        """
        stored = [tensor.detach().to("cpu", copy=not owned).contiguous() for tensor in tensors]
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

    def get(self, key: str, device: torch.device | str = "cpu") -> list[Tensor]:
        """The tensors of a key."""
        if self.folder is None:
            return [tensor.to(device) for tensor in self._held[key]]
        tensors = load_file(self._files[key])
        return [tensors[str(i)].to(device) for i in range(len(tensors))]

    def __contains__(self, key: object) -> bool:
        return key in self._held or key in self._files

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._held.pop(key, None)
        if key in self._files:
            os.remove(self._files.pop(key))

    def clear(self) -> None:
        """Forget everything; more may come."""
        for key in [*self._held, *self._files]:
            self.drop(key)

    def close(self) -> None:
        """Forget everything, for good."""
        self._held.clear()
        self._files.clear()
        if self._scratch is not None:
            self._scratch.close()


class BatchStore:
    """Named tensors of each batch in a store, which can be dropped one by one."""

    def __init__(self, store: StateStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._names: dict[int, list[str]] = {}

    def put(self, batch: int, known: Mapping[str, Tensor]) -> None:
        """StateStore a batch's tensors; earlier ones are replaced."""
        self.drop(batch, set(self._names.get(batch, [])) - known.keys())
        self.add(batch, known)

    def add(self, batch: int, known: Mapping[str, Tensor]) -> None:
        """Add tensors to a batch."""
        names = self._names.setdefault(batch, [])
        names += [name for name in known if name not in names]
        for name, tensor in known.items():
            self.store.put(self._key(batch, name), [tensor], owned=True)

    def get(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors of a batch."""
        return {name: self.store.get(self._key(batch, name), device)[0] for name in self._names.get(batch, [])}

    def keep(self, keep_names: Collection[str]) -> None:
        """Forget all but these names."""
        for batch, names in self._names.items():
            self.drop(batch, set(names) - set(keep_names))

    def drop(self, batch: int, names: Collection[str]) -> None:
        """Drop some tensors of a batch."""
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
            f"cannot be written to ({short(error)})", where=parent, remedy="name another folder for 'spill'"
        ) from error


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Place = tuple[str, int]
"""A tensor in the store: its key, and which of those it holds."""

PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of arguments that are stored; other arguments of a layer may be stateful."""


class LayerArguments:
    """The arguments of one layer on each batch, kept in the store of hidden states.

    Attributes:
        alone: whether the layer can be run by itself: it is entered once in a forward, is given nothing but tensors and
            plain values, and leaves them as they are.
    """

    def __init__(self, store: StateStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self.alone = False
        self._looks: list[list[tuple[Tensor, int]]] | None = None
        self._kept: dict[int, tuple[Any, list[Place | None], list[Any]]] = {}

    def look(self) -> None:
        """Watch the next forward to learn whether the layer can be run by itself."""
        self.clear()
        self._looks = []

    def begins(self) -> None:
        """A forward begins."""
        self._looks = None if self._looks is None else []

    def looked(self) -> None:
        """Stop watching."""
        looks, self._looks = self._looks or [], None
        unchanged = all(tensor._version == version for look in looks for tensor, version in look)
        self.alone = self.store.folder is None and len(looks) == 1 and unchanged

    def entered(self, batch: int, arguments: Arguments, known: Mapping[int, Place]) -> None:
        """The layer is about to run in a forward.

        Args:
            known: by the id of a tensor, where the store has it.
        """
        if self._looks is None and (not self.alone or batch in self._kept):
            return
        leaves, form = _pytree.tree_flatten(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        plain = all(isinstance(x, PLAIN) for x in leaves)
        if self._looks is not None:
            self._looks += [[(x, x._version) for x in tensors]] if plain else [[], []]
            return
        new_tensors = [x for x in tensors if id(x) not in known]
        if not plain or not tensors or sum(x.numel() for x in new_tensors[1:]) > tensors[0].numel():
            return  # more than the hidden states themselves: computed anew
        self.store.put(self._key(batch), new_tensors, owned=True)
        places = [known.get(id(x)) if isinstance(x, Tensor) else None for x in leaves]
        self._kept[batch] = (form, places, [_OWN if isinstance(x, Tensor) else x for x in leaves])

    def get(self, batch: int, device: torch.device) -> Arguments | None:
        """The layer's arguments on a batch; None if unknown."""
        if batch not in self._kept:
            return None
        form, places, still = self._kept[batch]
        new_tensors = iter(self.store.get(self._key(batch), device))
        leaves = [
            self.store.get(place[0], device)[place[1]] if place is not None else next(new_tensors) if x is _OWN else x
            for place, x in zip(places, still, strict=True)
        ]
        arguments: Arguments = _pytree.tree_unflatten(leaves, form)
        return arguments

    def drop(self, batch: int) -> None:
        """Forget the arguments of a batch."""
        if self._kept.pop(batch, None) is not None:
            self.store.drop(self._key(batch))

    def clear(self) -> None:
        """Forget everything, for the next layer."""
        for batch in list(self._kept):
            self.drop(batch)
        self.alone = False

    def _key(self, batch: int) -> str:
        return f"{self.prefix}:given:{batch}"


_OWN = object()
"""Stands for a tensor that nobody else keeps."""


class SharedKVCache:
    """Entries that layers add to shared mappings, kept in the store of hidden states."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._before: dict[str, dict[Any, Any]] = {}
        self._forms: dict[str, Any] = {}

    def entered(self, arguments: Mapping[str, Any]) -> None:
        """A layer is about to run on these arguments."""
        self._before = {
            name: dict(mapping) for name, mapping in arguments.items() if isinstance(mapping, MutableMapping)
        }

    def keep(self, key: str, arguments: Mapping[str, Any]) -> None:
        """StateStore the entries that the layer has added."""
        put = {
            name: {entry: x for entry, x in arguments[name].items() if before.get(entry) is not x}
            for name, before in self._before.items()
        }
        if any(put.values()):
            leaves, self._forms[key] = _pytree.tree_flatten(put)
            self.store.put(key, leaves)

    def restore_entries(self, key: str, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Restore a layer's entries without running it."""
        if key in self._forms:
            put = _pytree.tree_unflatten(self.store.get(key, device), self._forms[key])
            for name, entries in put.items():
                arguments[name].update(entries)


Form = tuple[Any, list[Any]]
"""Structure of a module's output, with its values other than tensors."""


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
        self._forms: dict[int, dict[str, Form]] = {}

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
        forms = self._forms.setdefault(batch, {})
        outputs = self._kept.get(batch, device) if forms else {}
        for name, form in forms.items():
            self.modules[name].forward = partial(_replay, form, outputs, name)
        fresh: dict[str, tuple[Any, int]] = {}
        hooks = self._hooks({*forms}, fresh) if self.keys and self.pending else []
        try:
            with hooked(hooks):
                yield
        finally:
            for name in forms:
                self.modules[name].__dict__.pop("forward", None)
        self._keep(batch, fresh)

    def forget(self) -> None:
        """Forget all cached outputs."""
        self._kept.keep(())
        self._forms.clear()

    def _hooks(self, known: set[str], fresh: dict[str, tuple[Any, int]]) -> list[Any]:
        """Hooks that find outputs, each with the sum of its tensors' versions; a changed tensor raises the sum."""
        before = [True]

        def on_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
            if name in self.maps or before[0]:
                fresh[name] = output, _versions(output)

        def entered(*_: Any) -> None:
            before[0] = False

        settled_names = [key for key in self.maps if key in self.keys]
        settled_names += [name for name, keys in self.within.items() if name in self._once and self._is_settled(keys)]
        hooks = [self.modules[n].register_forward_hook(partial(on_output, n)) for n in settled_names if n not in known]
        return hooks + [self.maps[key].register_forward_pre_hook(entered) for key in self.pending]

    def _is_settled(self, keys: set[str]) -> bool:
        return bool(keys & self.keys) and not keys & self.pending

    def _keep(self, batch: int, fresh: Mapping[str, tuple[Any, int]]) -> None:
        forms = self._forms[batch]
        for name, (output, version) in fresh.items():
            leaves, form = _pytree.tree_flatten(output)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if (
                _versions(output) == version
                and self._worth(name, tensors)
                and all(isinstance(x, PLAIN) for x in leaves)
            ):
                self._kept.add(batch, {f"{name}#{i}": x for i, x in enumerate(tensors)})
                forms[name] = form, [_MOVING if isinstance(x, Tensor) else x for x in leaves]
        inner = {
            name
            for part in forms
            if part in self.within
            for name in forms
            if name != part and (name in self.within[part] or name.startswith(f"{part}."))
        }
        for name in inner:
            self._kept.drop(batch, [f"{name}#{i}" for i in range(forms.pop(name)[1].count(_MOVING))])

    def _worth(self, name: str, tensors: list[Tensor]) -> bool:
        """Whether a part's output takes no more memory than the outputs of its maps."""
        if name in self.maps or not tensors:
            return name in self.maps
        outputs = sum(_outputs(self.maps[key]) for key in self.within[name])
        return sum(x.numel() for x in tensors) <= tensors[0].numel() // tensors[0].shape[-1] * outputs


_MOVING = object()
"""Stands for a tensor in an output."""


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


def _versions(output: Any) -> int:
    return sum(x._version for x in _pytree.tree_leaves(output) if isinstance(x, Tensor))


def _replay(form: Form, outputs: Mapping[str, Tensor], name: str, *_: Any, **__: Any) -> Any:
    tree, leaves = form
    tensors = (outputs[f"{name}#{i}"].clone() for i in range(leaves.count(_MOVING)))
    return _pytree.tree_unflatten([next(tensors) if x is _MOVING else x for x in leaves], tree)
