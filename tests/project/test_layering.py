"""The layers of DESIGN section 3: each part imports only from those before it, and no two files stand in a circle."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rotation_merge"

ORDER = (
    "errors",
    "config",
    "files",
    "workers",
    "linalg",
    "symmetry",
    "architecture",
    "record",
    "model",
    "run",
    "matching",
    "averaging",
    "carrying",
    "report",
    "mergekit_plugin",
    "diagnose",
    "search",
    "share",
    "api",
    "cli",
)
"""Each part imports only from those before it."""

ROOMS: dict[tuple[str, ...], tuple[int, int]] = {
    ("errors", "config", "files", "workers"): (600, 1043),
    ("linalg",): (350, 340),
    ("symmetry",): (1200, 1364),
    ("architecture",): (1800, 1800),
    ("record",): (250, 235),
    ("model",): (4000, 5359),
    ("run",): (2400, 3655),
    ("matching",): (3400, 4957),
    ("averaging",): (2000, 3228),
    ("carrying",): (1500, 2090),
    ("report",): (1400, 1489),
    ("mergekit_plugin",): (2500, 3562),
    ("diagnose",): (2100, 2041),
    ("search", "share"): (1400, 1780),
    ("api", "cli", "__init__"): (1400, 2638),
}
"""Lines that parts of the package may have together: the figure of the design, and what they had when it was drawn."""

REBUILT = frozenset({"linalg", "architecture", "record"})
"""Parts that have been written anew: from then on they keep to the design's figure."""

KNOWS_MERGEKIT = ("model", "run", "matching", "averaging", "carrying", "mergekit_plugin", "diagnose")

HEAVY = ("torch", "transformers", "mergekit", "numpy", "pydantic", "click")

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    return ".".join(("rotation_merge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


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
    return found | (by_string(tree) if lazy and path != PACKAGE / "__init__.py" else set())


def by_string(tree: ast.AST) -> set[str]:
    """Modules of ours that strings name, and those that f-strings may name: `import_module` takes them."""
    modules, found = {module_of(path) for path in FILES}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in modules - {"rotation_merge"}:
            found.add(str(node.value))
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            start = str(node.values[0].value)
            found |= {module for module in modules if start.startswith("rotation_merge.") and module.startswith(start)}
    return found


def test_imports_by_string_and_inside_functions_count(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for text in (
        "def f():\n    from rotation_merge.cli import app",
        "def f():\n    import rotation_merge.cli.app",
        "import_module('rotation_merge.cli.app')",
        "def f(name):\n    return import_module(f'rotation_merge.cli.{name}')",
    ):
        file.write_text(text)
        assert "rotation_merge.cli.app" in imports(file), text


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


@pytest.mark.parametrize("parts", ROOMS, ids=", ".join)
def test_no_part_grows_unseen(parts: tuple[str, ...]) -> None:
    """A part that holds more than its figure has a concept too many; whoever lets it grow says so here."""
    lines = sum(len(path.read_text().splitlines()) for path in FILES if part_of(path) in parts)
    figure, before = ROOMS[parts]
    assert lines <= (figure if REBUILT.issuperset(parts) else before)


def test_every_part_has_a_figure() -> None:
    assert {part for parts in ROOMS for part in parts} == {*ORDER, "__init__"}


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["__init__.py", "mergekit_plugin/__init__.py", "mergekit_plugin/hooks.py"])
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


def test_public_names_are_there() -> None:
    import rotation_merge

    assert all(hasattr(rotation_merge, name) for name in rotation_merge.__all__)
