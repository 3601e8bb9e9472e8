"""mergekit with one name renamed throughout, as another release may have it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

NAMES = (
    *("_METHODS", "callback", "get_architecture_info", "run_merge"),
    *("_execute_resolved", "layer_weights", "MergeMethodSpec"),
)
"""What is taken hold of in mergekit's modules, overridden, and imported; the rest is looked for by `check_host`."""


class Renamer(importlib.abc.MetaPathFinder):
    """mergekit's modules, one word of their sources replaced by another."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("mergekit"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or self.name not in Path(spec.origin).read_text():
            return None
        loader = Renaming(fullname, spec.origin)
        loader.word = self.name
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


class Renaming(importlib.machinery.SourceFileLoader):
    word = ""

    def get_code(self, fullname: str) -> Any:
        text = re.sub(rf"(?<![\w'\"]){self.word}(?![\w'\"])", f"{self.word}_renamed", Path(self.path).read_text())
        return compile(text, self.path, "exec")


def attempt(name: str, stock: Path, ours: Path, folder: Path) -> dict[str, Any]:
    """What a stock recipe and one of ours end with; to be done in a process that has not imported mergekit.

    Args:
        name: what is called otherwise in mergekit, or `callback` of click.
        folder: for outputs.
    """
    if name != "callback":
        sys.meta_path.insert(0, Renamer(name))
        import rotation_merge  # noqa: F401
    else:
        import mergekit.scripts.run_yaml as command

        from rotation_merge.mergekit_plugin import hooks

        hooks.extend(object(), "mergekit.scripts.run_yaml")  # type: ignore[arg-type]
        assert command.main is not None
    import mergekit.merge_methods  # noqa: F401

    return {"stock": _merged(stock, folder / f"stock-{name}"), "ours": _merged(ours, folder / f"ours-{name}")}


def _merged(recipe: Path, out: Path) -> dict[str, Any]:
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    logging.disable(logging.CRITICAL)
    result = CliRunner().invoke(main, [str(recipe), str(out), "--quiet"])
    files = sorted(path.name for path in out.iterdir()) if out.exists() else []
    return {"code": result.exit_code, "output": result.output, "error": repr(result.exception), "files": files}
