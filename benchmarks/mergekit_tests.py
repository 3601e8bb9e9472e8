"""mergekit's own tests, with this plugin and with it switched off.

    pip download mergekit==0.1.5 --no-binary mergekit --no-deps
    python benchmarks/mergekit_tests.py mergekit-0.1.5.tar.gz

They run against the mergekit that is installed. The archive leaves out tests/common.py, which makes tiny checkpoints;
`mergekit_common.py` stands in for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from record import Table

CASES = {"rotation_merge switched off": "0", "with rotation_merge": "1"}
LISTED = "import mergekit.merge_methods as methods; methods.get('rotation_merge')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive
    table = Table("mergekit-tests")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        shutil.rmtree(root / "mergekit")  # the one that is installed is to be tested
        shutil.copy(Path(__file__).with_name("mergekit_common.py"), root / "tests" / "common.py")
        (root / "tests" / "__init__.py").touch()
        for words, switch in CASES.items():
            counts = tested(root, switch)
            row = {"passed": "passed", "skipped": "skipped (no CUDA, no MPS)", "failed": "failed"}
            table.add({"case": words, **{title: counts.get(name, 0) for name, title in row.items()}})


def tested(root: Path, switch: str) -> dict[str, int]:
    """How many tests passed, were skipped and failed."""
    environment = {**os.environ, "ROTATION_MERGE_PLUGIN": switch}
    listed = subprocess.run([sys.executable, "-c", LISTED], env=environment, capture_output=True).returncode == 0
    if listed != (switch == "1"):
        sys.exit(f"with ROTATION_MERGE_PLUGIN={switch} the method is {'' if listed else 'not '}there")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests"]
    out = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True).stdout
    counts = re.findall(r"(\d+) (passed|skipped|failed|error)", out.splitlines()[-1])
    found = {name: int(number) for number, name in counts}
    if not found.get("passed") or found.get("error"):
        sys.exit(out[-3000:])
    return found


if __name__ == "__main__":
    main()
