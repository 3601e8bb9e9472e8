"""Replays the cached outputs of modules that are already solved.

A map that is solved, and has run, gives to each batch what it gave: what it reads was there before. So does a part of
the layer (a module with maps in it, such as attention as a whole) in which no map is still to be solved, where none ran
before the part was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from rotation_merge.run.given import PLAIN
from rotation_merge.run.store import BatchStore, Store

Form = tuple[Any, list[Any]]
"""How a module's output is built of its tensors, and what it holds beside them."""


class SettledOutputs:
    """Cached outputs of modules of one block, by batch.

    Attributes:
        modules: the maps by key, and the parts by the name that they have in the layer.
        pending: keys of the maps that are still to be solved; those that have been are settled, where `keys` has them.
        keys: see above.
    """

    def __init__(self, store: Store, prefix: str, maps: Mapping[str, nn.Module], layer: nn.Module | None) -> None:
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
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
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
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name in forms:
                self.modules[name].__dict__.pop("forward", None)
        self._keep(batch, fresh)

    def forget(self) -> None:
        """Forget all cached outputs."""
        self._kept.keep(())
        self._forms.clear()

    def _hooks(self, known: set[str], fresh: dict[str, tuple[Any, int]]) -> list[Any]:
        """Hooks by which outputs are found, each with the sum of its tensors' versions: who changes one raises it."""
        before = [True]

        def gave(name: str, _: nn.Module, __: Any, output: Any) -> None:
            if name in self.maps or before[0]:
                fresh[name] = output, _versions(output)

        def entered(*_: Any) -> None:
            before[0] = False

        settled_names = [key for key in self.maps if key in self.keys]
        settled_names += [name for name, keys in self.within.items() if name in self._once and self._is_settled(keys)]
        hooks = [self.modules[n].register_forward_hook(partial(gave, n)) for n in settled_names if n not in known]
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
        """Whether what a part gives takes no more room than what its maps give."""
        if name in self.maps or not tensors:
            return name in self.maps
        outputs = sum(_outputs(self.maps[key]) for key in self.within[name])
        return sum(x.numel() for x in tensors) <= tensors[0].numel() // tensors[0].shape[-1] * outputs


_MOVING = object()
"""Stands for a tensor in an output."""


def _outputs(module: Any) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)


def _parts(layer: nn.Module, maps: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """By name: the modules of a layer that hold maps, and which."""
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
