"""Getting into mergekit's commands without an import by the user.

`rotation_merge.pth` imports this package at every interpreter start, so this module imports next to nothing: a finder
waits for the few mergekit modules that are extended, and extends each right after it has been imported. A module that
cannot be extended stays unchanged; the error is kept and raised by the first rotation_merge recipe.
"""

import sys

from rotation_merge.mergekit_plugin import failed, switched_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

HOOKS = {
    "mergekit.config": "extend_config",
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
    """Extend one freshly imported mergekit module, once, or keep why that is impossible."""
    if getattr(module, "_rotation_merge", False):
        return
    try:
        from rotation_merge.mergekit_plugin import extensions

        getattr(extensions, HOOKS[name])(module)
        module._rotation_merge = True  # type: ignore[attr-defined]
    except Exception as error:
        failed[name] = error


class MergekitFinder:
    """Finds nothing itself; lets the other finders find mergekit's modules, whose loaders then extend them."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        for finder in sys.meta_path if fullname in HOOKS else ():
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    extend_after(spec.loader, fullname)
                    return spec
        return None


def extend_after(loader: "Loader", name: str) -> None:
    """Let a loader extend its module.

    A command of mergekit is imported without Python's garbage collector, which is not run at its end either: nothing is
    there to be collected meanwhile. Together it is more than a second of every merge.
    """
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        import atexit
        import gc

        command = HOOKS[name] == "extend_command" and "mergekit-" in sys.argv[0]
        held = command and gc.isenabled()
        if command and name != "mergekit.scripts.merge_raw_pytorch":
            from rotation_merge.mergekit_plugin.schema import refuse_early

            refuse_early(sys.argv[1:])
        if held:
            gc.disable()
            atexit.register(gc.freeze)
        try:
            execute(module)
        finally:
            if held:
                gc.freeze()
                gc.enable()
        extend(module, name)

    loader.exec_module = exec_module  # type: ignore[method-assign]
