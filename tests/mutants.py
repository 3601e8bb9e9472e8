"""Mutants: the package with one line broken at a time, and whether the tests that cover the file notice.

    make mutants                                    # goes on where it was stopped, for ten minutes
    python tests/mutants.py --minutes 60 --files rotation_merge/symmetry/group.py --seed 1

A mutant exchanges one operator, comparison, constant or argument, negates a condition, or drops a statement (see
`changed`). It is judged by the quick tests of its part, in a process forked from one that has imported
already what these tests import of other packages, so that it costs what its tests cost. Each verdict is a line of
`tests/mutants.jsonl`, keyed by the text of the mutated line, so that mutants of lines that have not changed are not
run again. `--report` lists the survivors; `tests/mutants.md` judges them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "tests" / "mutants.jsonl"
OWN = ("rotation_merge", "mergekit", "conftest", "pytest", "_pytest", "py", "__main__")
"""What every forked process imports by itself; mergekit too, whose modules are extended as they are imported."""

ROOMS = {
    "architecture": "architecture laws/test_laws.py",
    "record": "report",
    "diagnose": "diagnose laws/test_planted_faults.py",
}
"""By part of the package: folders and files of its tests, where that is not the folder of the same name."""
FILES = {
    "errors": "laws/test_bad_inputs.py",
    "config": "cli mergekit_plugin",
    "files": "files",
    "workers": "matching/test_workers.py",
    "api": "cli",
}
"""The same of the package's single files."""

COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
LOGIC = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: which node (counted as `ast.walk` goes) and what is done to it."""

    file: str
    node: int
    what: str
    line: int
    text: str

    @property
    def key(self) -> str:
        return f"{self.file}|{self.text}|{self.what}"


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may be done to a node: a name, and the node that takes its place."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp() if type(new.op) in ARITHMETIC:
            new.op = ARITHMETIC[type(new.op)]()
            yield "operator", new
        case ast.BinOp(op=ast.MatMult()):
            new.left, new.right = new.right, new.left
            yield "factors exchanged", new
        case ast.Compare() if type(new.ops[0]) in COMPARE:
            new.ops[0] = COMPARE[type(new.ops[0])]()
            yield "comparison", new
        case ast.BoolOp():
            new.op = LOGIC[type(new.op)]()
            yield "and/or", new
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield "sign or not dropped", new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield "branches exchanged", new
        case ast.If() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition negated", new
        case ast.Constant(value=bool()):
            new.value = not new.value
            yield "constant", new
        case ast.Constant(value=int() | float()):
            new.value = new.value + 1
            yield "constant", new
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(x, ast.Starred) for x in (first, second)):
            new.args = [second, first, *rest]
            yield "arguments exchanged", new
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement dropped", ast.Pass()


def mutants(path: Path) -> list[Mutant]:
    """All mutants of a file; texts in messages, defaults of classes and annotations are left alone."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    found, file = [], str(path.relative_to(ROOT))
    skipped = {id(inner) for node in ast.walk(tree) for inner in _untouched(node)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in skipped:
            for what, _ in changed(node):
                line = getattr(node, "lineno", 0)
                found.append(Mutant(file, number, what, line, f"{lines[line - 1].strip()} @{node.col_offset}"))  # type: ignore[attr-defined]
    return found


def _untouched(node: ast.AST) -> Iterator[ast.AST]:
    roots: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef):
        roots = [node.returns, *(a.annotation for a in node.args.args + node.args.kwonlyargs), *node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        roots = [node.annotation]
    elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        roots = [node]
    for root in roots:
        yield from ast.walk(root) if root is not None else ()


def applied(mutant: Mutant) -> str:
    """The file's source with the mutant in it."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    wanted = list(ast.walk(tree))[mutant.node]
    fresh = next(new for what, new in changed(wanted) if what == mutant.what)

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(fresh, node) if node is wanted else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


def tests_of(file: str) -> list[str]:
    """The quick tests of the part of the package that a file belongs to."""
    part = Path(file).relative_to("rotation_merge").parts[0].removesuffix(".py")
    names = {**ROOMS, **FILES}.get(part, part)
    return [str(ROOT / "tests" / name) for name in names.split()]


class _Loader(importlib.abc.SourceLoader):
    """Gives one module of the package from a changed text."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        return self.text.encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.loader = _Loader(str(ROOT / mutant.file), applied(mutant))

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        return importlib.util.spec_from_loader(name, self.loader) if name == self.name else None


def run(mutant: Mutant | None, tests: list[str], limit: float, imported: Path | None = None) -> str:
    """killed, survived or timeout, by the tests in a forked process (no mutant: are the tests green?).

    Args:
        imported: file that takes the names of all modules that the tests have imported.
    """
    child = os.fork()
    if child == 0:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            if mutant is not None:
                sys.meta_path.insert(0, _Finder(mutant))
            import pytest

            import rotation_merge  # noqa: F401  (extends mergekit's modules)

            code = int(pytest.main(["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests]))
            if imported is not None:
                imported.write_text("\n".join(sys.modules))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "survived" if code == 0 else "timeout" if code == -signal.SIGXCPU else "killed"


def forget() -> None:
    """Leave the package to the forked processes: it may have been imported at the start of this one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rotation_merge"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "MergekitFinder"]


def warm(tests: list[str], limit: float) -> None:
    """See that tests pass as things are, and import what they do of other packages, once for all their mutants."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "imported")
        assert run(None, tests, 10 * limit, file) == "survived", f"these tests fail without a mutant: {tests}"
        names = file.read_text().splitlines()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{ended.ru_utime - began.ru_utime:.0f} s of CPU: {' '.join(Path(test).name for test in tests)}", flush=True)
    for name in names:
        spec = None if name in sys.modules or name.partition(".")[0] in OWN else _spec(name)
        if spec is not None and not str(spec.origin).startswith(str(ROOT / "tests")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    assert run(None, tests, 10 * limit) == "survived", f"these tests fail in a process that has all imported: {tests}"


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def known() -> dict[str, dict[str, object]]:
    lines = LOG.read_text(encoding="utf-8").splitlines() if LOG.exists() else []
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def report() -> None:
    verdicts = known()
    by_file: dict[str, Counter[str]] = {}
    for entry in verdicts.values():
        by_file.setdefault(str(entry["file"]), Counter())[str(entry["verdict"])] += 1
    for file, counts in sorted(by_file.items()):
        late = f", {counts['timeout']} not decided in time" if counts["timeout"] else ""
        print(f"{file}: {counts['killed']} of {sum(counts.values())} killed{late}")
    for entry in verdicts.values():
        if entry["verdict"] == "survived":
            print(f"  {entry['file']}:{entry['line']} {entry['what']}: {entry['text']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="mutants tried at most")
    parser.add_argument("--seed", type=int, default=0, help="order in which mutants are tried")
    parser.add_argument("--limit", type=float, default=120, help="CPU seconds that the tests of one mutant may take")
    parser.add_argument("--files", nargs="*", help="files or folders of the package; default: all")
    parser.add_argument("--report", action="store_true", help="only list what is known")
    args = parser.parse_args()
    if args.report:
        return report()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    forget()
    warnings.simplefilter("ignore")
    names = args.files or ["rotation_merge"]
    paths = sorted(
        p for name in names for p in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    )
    everything = [mutant for path in paths for mutant in mutants(path)]
    random.Random(args.seed).shuffle(everything)
    before, until, green = known(), time.monotonic() + 60 * args.minutes, set()
    for mutant in [one for one in everything if one.key not in before][: args.count]:
        if time.monotonic() > until:
            break
        tests = tests_of(mutant.file)
        if tuple(tests) not in green:
            warm(tests, args.limit)
            green.add(tuple(tests))
        verdict = run(mutant, tests, args.limit)
        entry = {"key": mutant.key, **vars(mutant), "verdict": verdict}
        with LOG.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        if verdict == "survived":
            print(f"{mutant.file}:{mutant.line} {mutant.what}: {mutant.text}", flush=True)
    report()


if __name__ == "__main__":
    main()
