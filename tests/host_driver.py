"""Run by test_host.py: mergekit with one name renamed throughout, as another release may have it, in forked processes.

Arguments: a stock recipe, a recipe of ours, a folder for outputs. Prints one JSON object: by name, what the stock merge
and ours ended with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["ROTATION_MERGE_PLUGIN"] = "0"
import mergekit.evo.genome
import mergekit.scripts.run_yaml  # noqa: F401  (what it needs of other packages stays imported)

STOCK, OURS, FOLDER = sys.argv[1:4]
NAMES = (
    *("_METHODS", "METHOD_PARAM_MAPS", "callback", "get_architecture_info", "MergePlanner", "run_merge"),
    *("_get_donor_model", "plan_layer", "GatherTensors", "MergeMethodSpec"),
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


def fresh(name: str, plugin: str) -> None:
    """Forget mergekit and ourselves; begin as a new process would."""
    for module in [m for m in sys.modules if m.split(".")[0] in ("mergekit", "rotation_merge")]:
        del sys.modules[module]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "MergekitFinder"]
    sys.meta_path.insert(0, Renamer(name))
    os.environ["ROTATION_MERGE_PLUGIN"] = plugin
    import rotation_merge  # noqa: F401


def merged(recipe: str, out: str) -> dict[str, Any]:
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    logging.disable(logging.CRITICAL)
    result = CliRunner().invoke(main, [recipe, out, "--quiet"])
    files = sorted(path.name for path in Path(out).iterdir()) if Path(out).exists() else []
    return {"code": result.exit_code, "output": result.output, "error": repr(result.exception), "files": files}


def attempt(name: str) -> dict[str, Any]:
    """What a stock recipe and one of ours end with."""
    if name != "callback":
        fresh(name, "1")
    else:
        fresh("no such name", "1")
        import mergekit.scripts.run_yaml as command

        from rotation_merge.seam import hooks

        hooks.extend(object(), "mergekit.scripts.run_yaml")  # type: ignore[arg-type]
        assert command.main is not None
    import mergekit.evo.genome
    import mergekit.merge_methods  # noqa: F401

    return {
        "stock": merged(STOCK, f"{FOLDER}/stock-{name}"),
        "ours": merged(OURS, f"{FOLDER}/ours-{name}"),
    }


def forked(name: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            found = attempt(name)
        except BaseException as error:
            found = {"broken": repr(error)}
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


json.dump({name: forked(name) for name in NAMES}, sys.stdout)
