"""Getting into mergekit's commands without an import by the user.

`rotation_merge.pth` imports this package at every interpreter start, so nothing here may be heavy: a finder waits
for the few mergekit modules that are extended, and extends each right after it has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOOKS = {
    "mergekit.config": "extend_config",
    "mergekit.architecture": "extend_architecture",
    "mergekit.merge_methods.registry": "extend_registry",
    "mergekit.plan": "extend_plan",
    "mergekit.merge": "extend_merge",
}
"""mergekit modules and the functions of `rotation_merge.plugin.extensions` that extend them."""


def install() -> None:
    """Wait for mergekit's modules; extend those that are already there. Doing it twice changes nothing."""
    if not any(isinstance(finder, MergekitFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MergekitFinder())
        for name in HOOKS:
            if name in sys.modules and getattr(sys.modules[name], "__spec__", None) is not None:
                extend(sys.modules[name])


def extend(module: ModuleType) -> None:
    """Extend one freshly imported mergekit module."""
    from importlib import import_module

    extensions = import_module("rotation_merge.plugin.extensions")
    getattr(extensions, HOOKS[module.__name__])(module)


class MergekitFinder(MetaPathFinder):
    """Finds nothing itself; lets the other finders find mergekit's modules and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = ExtendingLoader(spec.loader)
                    return spec
        return None


class ExtendingLoader(Loader):
    """A loader that extends its module after executing it."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        extend(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)
