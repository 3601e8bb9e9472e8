"""Getting into mergekit's commands without an import by the user.

`rotation_merge.pth` imports this package at every interpreter start, so this module imports next to nothing: a finder
waits for the few mergekit modules that are extended, and extends each right after it has been imported. A module that
cannot be extended stays unchanged; the error is kept and raised by the first rotation_merge recipe.
"""

import sys

from rotation_merge.mergekit_plugin.state import failed, switched_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HOOKS = {
    "mergekit.common": "extend_common",
    "mergekit.tokenizer.build": "extend_tokenizers",
    "mergekit.config": "extend_config",
    "mergekit.architecture": "extend_architecture",
    "mergekit.merge_methods.registry": "extend_registry",
    "mergekit.merge": "extend_merge",
    "mergekit.scripts.run_yaml": "extend_command",
    "mergekit.scripts.multimerge": "extend_command",
    "mergekit.scripts.merge_raw_pytorch": "extend_command",
}
"""mergekit modules and the functions of `rotation_merge.mergekit_plugin.extensions` that extend them."""


def install() -> None:
    """Extend mergekit's modules after their import, and those already imported; idempotent."""
    if switched_off() or any(isinstance(finder, MergekitFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, MergekitFinder())
    for name in HOOKS:
        if name in sys.modules and getattr(sys.modules[name], "__spec__", None) is not None:
            extend(sys.modules[name], name)


def extend(module: "ModuleType", name: str) -> None:
    """Extend one freshly imported mergekit module, or keep why that is impossible."""
    try:
        from rotation_merge.mergekit_plugin import extensions

        getattr(extensions, HOOKS[name])(module)
    except Exception as error:
        failed[name] = error


class MergekitFinder:
    """Finds nothing itself; lets the other finders find mergekit's modules and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = ExtendingLoader(spec.loader)  # type: ignore[assignment]
                    return spec
        return None


class ExtendingLoader:
    """A loader that extends its module after executing it."""

    def __init__(self, inner: "Any") -> None:
        self.inner = inner

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self.inner.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        name = module.__spec__.name if module.__spec__ else module.__name__
        if HOOKS.get(name) == "extend_command":
            from rotation_merge.mergekit_plugin.start import collector_held

            with collector_held():
                self.inner.exec_module(module)
        else:
            self.inner.exec_module(module)
        extend(module, name)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)
