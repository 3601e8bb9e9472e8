"""Mutants: the package with one line broken at a time, and whether the tests that cover the file notice.

    make mutants                                    # a random sample, for ten minutes
    python tests/mutants.py --minutes 60 --files rotation_merge/symmetry/group.py --seed 1

A mutant exchanges one operator, comparison, constant or argument, negates a condition, or drops a statement (see
`changed`). It is judged by the quick tests of its part, which run on a copy of the package. `tests/mutants.md` judges
those that have survived.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PARTS = {
    "architecture": "architecture laws/test_laws.py",
    "record": "report",
    "diagnose": "diagnose laws/test_planted_faults.py",
    "report": "report laws/test_planted_faults.py",
    "run": "run laws/test_bad_inputs.py",
    "cli": "cli project/test_manners.py",
    **{part: f"{part} laws/test_bad_methods.py" for part in ("averaging", "carrying", "search")},
    "errors": "laws/test_bad_inputs.py",
    "config": "cli mergekit_plugin",
    "workers": "matching/test_workers.py",
    "api": "cli",
}
"""By part of the package: folders and files of its tests, where that is not the folder of the same name."""

COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
ARITHMETIC |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
LOGIC = {ast.And: ast.Or, ast.Or: ast.And}


def changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """What is done to a node: a name, and the node that takes its place."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp() if type(new.op) in ARITHMETIC:
            new.op = ARITHMETIC[type(new.op)]()
            return "operator", new
        case ast.BinOp(op=ast.MatMult()):
            new.left, new.right = new.right, new.left
            return "factors exchanged", new
        case ast.Compare() if type(new.ops[0]) in COMPARE:
            new.ops[0] = COMPARE[type(new.ops[0])]()
            return "comparison", new
        case ast.BoolOp():
            new.op = LOGIC[type(new.op)]()
            return "and/or", new
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            return "sign or not dropped", new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            return "branches exchanged", new
        case ast.If() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            return "condition negated", new
        case ast.Constant(value=bool() | int() | float()):
            new.value = not new.value if isinstance(new.value, bool) else new.value + 1
            return "constant", new
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(x, ast.Starred) for x in (first, second)):
            new.args = [second, first, *rest]
            return "arguments exchanged", new
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "statement dropped", ast.Pass()
    return None


def places(path: Path) -> list[int]:
    """The nodes of a file that have a mutant, counted as `ast.walk` goes; texts in messages, defaults of classes and
    annotations are left alone."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    skipped = {inner for node in nodes for root in _untouched(node) for inner in ast.walk(root)}
    known = (number for number, node in enumerate(nodes) if isinstance(node, ast.expr | ast.stmt))
    return [number for number in known if nodes[number] not in skipped and changed(nodes[number])]


def _untouched(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef):
        annotations = [node.returns, *(a.annotation for a in node.args.args + node.args.kwonlyargs)]
        return [*node.decorator_list, *(annotation for annotation in annotations if annotation is not None)]
    return [node] if isinstance(node, ast.AnnAssign | ast.Raise | ast.Assert | ast.JoinedStr) else []


def mutant(path: Path, number: int) -> tuple[str, str]:
    """What a mutant changes and where, in words, and the file's source with it."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    target: Any = list(ast.walk(tree))[number]
    change, new = changed(target) or ("nothing", target)

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(new, node) if node is target else self.generic_visit(node)

    words = f"{path.relative_to(ROOT)}:{target.lineno} {change}: {source.splitlines()[target.lineno - 1].strip()}"
    return words, ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


def tests_of(path: Path) -> list[str]:
    """The tests of the part of the package that a file belongs to."""
    part = path.relative_to(ROOT / "rotation_merge").parts[0].removesuffix(".py")
    return [str(ROOT / "tests" / name) for name in PARTS.get(part, part).split()]


def verdict_of(path: Path, source: str, limit: float) -> str:
    """killed, survived or timeout, by the quick tests of a package in which one file has another source."""
    with TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "rotation_merge", Path(folder, "rotation_merge"))
        Path(folder, path.relative_to(ROOT)).write_text(source, encoding="utf-8")
        options = ["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-W", "ignore"]
        command = [Path(sys.executable).with_name("pytest"), *options, *tests_of(path)]
        try:
            ended = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": folder}, stdout=subprocess.DEVNULL, timeout=limit, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    return "survived" if ended.returncode == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="order in which mutants are tried; default: another one each time")
    parser.add_argument("--limit", type=float, default=300, help="seconds that the tests of one mutant may take")
    parser.add_argument("--files", nargs="*", default=["rotation_merge"], help="files or folders of the package")
    args = parser.parse_args()
    named = [ROOT / name for name in args.files]
    paths = sorted(path for name in named for path in ([name] if name.is_file() else name.rglob("*.py")))
    sample = [(path, number) for path in paths for number in places(path)]
    random.Random(args.seed).shuffle(sample)
    until, green, counts = time.monotonic() + 60 * args.minutes, set(), Counter[str]()
    for path, number in sample:
        if time.monotonic() > until:
            break
        if (tests := " ".join(tests_of(path))) not in green:
            whole = verdict_of(path, path.read_text(encoding="utf-8"), 10 * args.limit)
            assert whole == "survived", f"these tests fail without a mutant: {tests}"
            green.add(tests)
        words, source = mutant(path, number)
        verdict = verdict_of(path, source, args.limit)
        counts[verdict] += 1
        print(f"{verdict}: {words}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
