"""The layers of DESIGN section 3: each part imports only from those before it, and no two files stand in a circle.

Laws import only what is public, so that they still prove something when the code behind them is rewritten: the names of
`rotation_merge` itself, and errors. Benchmarks run rarely: what they import must still be there.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rotation_merge

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rotation_merge"
LAWS = sorted((ROOT / "tests" / "laws").glob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

ROOMS: dict[tuple[str, ...], tuple[int, int]] = {
    ("errors", "config", "files", "workers"): (600, 1045),
    ("linalg",): (350, 338),
    ("symmetry",): (1200, 1315),
    ("architecture",): (1800, 1800),
    ("record",): (250, 249),
    ("model",): (4000, 6100),
    ("run",): (2400, 3747),
    ("matching",): (3400, 4887),
    ("averaging",): (2000, 3462),
    ("carrying",): (1500, 2305),
    ("report",): (1400, 1710),
    ("mergekit_plugin",): (2500, 4130),
    ("diagnose",): (2100, 2790),
    ("search", "share"): (1400, 2035),
    ("api", "cli", "__init__"): (1400, 2791),
}
"""Lines that parts of the package may have together: the figure of the design, and what they had when it was drawn."""

ORDER = [part for parts in ROOMS for part in parts]
"""Each part imports only from those before it."""

REBUILT = frozenset({"linalg", "architecture", "record"})
"""Parts that have been written anew: from then on they keep to the design's figure."""

KNOWS_MERGEKIT = ("model", "run", "matching", "averaging", "carrying", "mergekit_plugin", "diagnose")

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    return ".".join(("rotation_merge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too, or names in strings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{path}: star import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= by_string(node.value)
    return found


def by_string(text: str) -> set[str]:
    """Names inside our parts, as `import_module` and `monkeypatch` take them; of the beginning of an f-string, all."""
    found = set()
    for name in re.findall(rf"\brotation_merge\.(?:{'|'.join(ORDER)})\b(?:\.\w+)*\.?", text):
        found |= {m for m in map(module_of, FILES) if m.startswith(name)} if name.endswith(".") else {name}
    return found


def ours(path: Path) -> set[str]:
    """Names of ours that a file imports: of parts, and public ones."""
    steps = (module.split(".") for module in imports(path))
    return {step[1] for step in steps if step[0] == "rotation_merge" and len(step) > 1}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from rotation_merge.model.fold import Fold",
        "def f():\n    import rotation_merge.model.fold",
        "from rotation_merge import model",
        "import_module('rotation_merge.model.fold')",
        "patch.setattr('rotation_merge.model.fold.Fold', None)",
        "def f(name):\n    return import_module(f'rotation_merge.model.{name}')",
    ],
)
def test_imports_by_string_and_inside_functions_count(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(f"import rotation_merge as rm\nfrom rotation_merge import align\n{text}")
    assert ours(tmp_path / "file.py") == {"align", "model"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_above(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in ORDER, f"{part} has no place in the layers"
    assert ours(path) <= {*ORDER[: ORDER.index(part) + 1], "__version__"}
    if part not in KNOWS_MERGEKIT:
        assert not [module for module in imports(path) if module.split(".")[0] == "mergekit"]


@pytest.mark.parametrize("path", LAWS, ids=lambda path: path.stem)
def test_laws_call_only_what_is_public(path: Path) -> None:
    assert ours(path) & {*ORDER} <= {"errors"}


@pytest.mark.slow
def test_benchmarks_import_what_there_is() -> None:
    for script in BENCHMARKS:
        for name in imports(script):
            if name.startswith("rotation_merge."):
                pkgutil.resolve_name(name)


@pytest.mark.parametrize("parts", ROOMS, ids=", ".join)
def test_no_part_grows_unseen(parts: tuple[str, ...]) -> None:
    """A part that holds more than its figure has a concept too many; whoever lets it grow says so here."""
    lines = sum(len(path.read_text().splitlines()) for path in FILES if part_of(path) in parts)
    figure, before = ROOMS[parts]
    assert lines <= (figure if REBUILT.issuperset(parts) else before)


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


def test_what_every_interpreter_start_imports_is_light() -> None:
    """rotation_merge.pth imports the package whenever Python starts: no module comes up with it."""
    others = "{m for m in {*sys.modules} - before if not m.startswith('rotation_merge')}"
    code = f"import os, sys; before = {{*sys.modules}}; import rotation_merge; print({others})"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "set()"


def test_public_names_are_there() -> None:
    assert all(hasattr(rotation_merge, name) for name in rotation_merge.__all__)
