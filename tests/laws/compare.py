"""Does the list of laws keep what it had? Compares `pairs.tsv` with each version of it in the history of the checkout.

usage: python tests/laws/compare.py

No line goes, no tolerance widens, no model moves fewer tensors. What is different is printed. Exceptions are marks in a
line's last column:

    issue N                  a known fault, which that issue mends; the law is tried, and must fail
    gone, part N: ROW        the law is not tried any more: a row of the design's table of what goes
    fewer, part N: ROW       fewer tensors move than before, for the same reason

Exit code: 0 the list keeps everything, 1 it does not, 2 there is no history.
"""

from __future__ import annotations

import re
import subprocess
import sys

from subjects import PAIRS, Pair, read_pairs

ROOT = PAIRS.parents[2]
MARK = re.compile(r"|issue \d+|(gone|fewer), part \d: .+")


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def versions() -> list[list[Pair]]:
    """Every committed version of the list.

    Raises:
        OSError, subprocess.CalledProcessError: this is no checkout of git.
    """
    path = PAIRS.relative_to(ROOT).as_posix()
    commits = git("log", "--format=%H", "--diff-filter=AM", "--", path).split()
    return [read_pairs(git("show", f"{commit}:{path}")) for commit in commits]


def losses(earlier: list[Pair], now: list[Pair]) -> list[str]:
    """What an earlier list has and this one lacks, a line each."""
    current = {(pair.model, pair.law, pair.residual): pair for pair in now}
    lines = [f"{pair.name}: '{pair.mark}' is no mark" for pair in now if not MARK.fullmatch(pair.mark)]
    for old in earlier:
        new = current.get((old.model, old.law, old.residual))
        if new is None:
            lines.append(f"{old.name}: is not in the list any more")
        elif new.tolerance > old.tolerance:
            lines.append(f"{old.name}: tolerance {new.tolerance:g} where {old.tolerance:g} held")
        elif new.moved < old.moved and not new.mark.startswith(("fewer", "gone")):
            lines.append(f"{old.name}: moves {new.moved} tensors where {old.moved} moved")
    return lines


def main() -> int:
    now = read_pairs(PAIRS.read_text(encoding="utf-8"))
    try:
        earlier = versions()
    except (OSError, subprocess.CalledProcessError):
        print("no history to compare with: this is no checkout of git", file=sys.stderr)
        return 2
    lost = sorted({line for version in earlier for line in losses(version, now)})
    marked = [pair for pair in now if pair.mark]
    print("\n".join([*(f"{pair.name}: {pair.mark}" for pair in marked), *lost]))
    models = len({pair.model for pair in now})
    print(f"{len(now)} pairs of {models} models, {len(marked)} with a mark, {len(earlier)} versions: {len(lost)} lost")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
