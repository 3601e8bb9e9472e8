"""The layers of DESIGN section 3: each part imports only from those before it, and no two files stand in a circle."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "rotation_merge"

ORDER = (
    "errors",
    "durable",
    "scratch",
    "unfinished",
    "spread",
    "linalg",
    "groups",
    "architectures",
    "matching",
    "report",
    "checkpoints",
    "samples",
    "learning",
    "averaging",
    "recipe",
    "planning",
    "seam",
    "checking",
    "choosing",
    "sharing",
    "api",
    "cli",
)
"""Each part imports only from those before it."""

KNOWS_MERGEKIT = ("checkpoints", "averaging", "recipe", "planning", "seam", "checking")

HEAVY = ("torch", "transformers", "mergekit", "numpy", "pydantic", "click")

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path, lazy: bool = True) -> set[str]:
    """Modules that a file imports; without `lazy`, only at its top level and not for type checkers alone."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{path}: star import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_above(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in ORDER, f"{part} has no place in the layers"
    for module in imports(path):
        steps = module.split(".")
        if steps[0] == "rotation_merge" and len(steps) > 1 and steps[1] != "__version__":
            assert steps[1] in ORDER[: ORDER.index(part) + 1], f"{path.name} imports {module}"
        if steps[0] == "mergekit":
            assert part in KNOWS_MERGEKIT, f"{path.name} imports {module}"


def module_of(path: Path) -> str:
    return ".".join(("rotation_merge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_circles() -> None:
    """Within a part, too, files can be read one after the other."""
    modules = {module_of(path): path for path in FILES}

    def needs(name: str) -> set[str]:
        found = imports(modules[name])
        return {m if m in modules else m.rpartition(".")[0] for m in found} & modules.keys() - {name}

    left = {name: needs(name) - {"rotation_merge"} for name in modules}
    while free := [name for name, rest in left.items() if not rest & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a circle, or behind one: {sorted(left)}"


@pytest.mark.parametrize("name", ["__init__.py", "seam/__init__.py", "seam/hooks.py"])
def test_what_every_interpreter_start_imports_is_light(name: str) -> None:
    """rotation_merge.pth imports these whenever Python starts."""
    allowed = {"sys", "rotation_merge"}
    for module in imports(PACKAGE / name, lazy=False):
        assert module.split(".")[0] in allowed, module


def test_light_at_run_time() -> None:
    import subprocess

    code = f"import rotation_merge, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_ten_public_names_at_most() -> None:
    import rotation_merge

    assert len(rotation_merge.__all__) <= 10
    assert all(hasattr(rotation_merge, name) for name in rotation_merge.__all__)


def test_files_are_of_a_readable_size() -> None:
    long = {str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long
