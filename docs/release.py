"""Build wheel and sdist and look into them; with a version, make a release of it.

    python docs/release.py                 # both into dist/, checked (`make wheel`)
    python docs/release.py 0.2.0           # version, changelog, commit, tag, both built and checked (`make release`)

Nothing is fetched: hatchling has to be installed. Nothing is uploaded: what is left to do is printed.
"""

from __future__ import annotations

import argparse
import datetime
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONED = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
    "rotation_merge/__init__.py": r'(?m)^__version__ = "(.+)"$',
}
"""Files that say the version, and how."""
HEADING = r"(?m)^## {version} \(unreleased\)$"


def run(*command: str) -> str:
    """A command's output; its own words on stderr end everything where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def version() -> str:
    """The version that all files agree on."""
    found = {name: re.search(words, (ROOT / name).read_text("utf-8")) for name, words in VERSIONED.items()}
    said = {name: match[1] if match else "none" for name, match in found.items()}
    if len(set(said.values())) != 1:
        raise SystemExit(f"versions differ: {', '.join(f'{name} {value}' for name, value in said.items())}")
    return next(iter(said.values()))


def build(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist, from what is here; nothing is downloaded."""
    out.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), ".")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out))
    stem = f"rotation_merge-{version()}"
    return out / f"{stem}-py3-none-any.whl", out / f"{stem}.tar.gz"


def tracked(*folders: str) -> set[str]:
    """Files that belong to the project; of a tree without git, all but caches."""
    if (ROOT / ".git").exists():
        return set(run("git", "ls-files", *folders).splitlines())
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {str(p.relative_to(ROOT)) for p in paths if p.is_file() and "__pycache__" not in p.parts}


def faults_of_wheel(path: Path) -> list[str]:
    """What a wheel lacks or should not have: code, data files, the .pth file, licence, command, metadata."""
    with zipfile.ZipFile(path) as file:
        names, info = set(file.namelist()), f"rotation_merge-{version()}.dist-info"
        wanted = tracked("rotation_merge") | {"rotation_merge.pth", f"{info}/licenses/LICENSE"}
        faults = [f"lacks {name}" for name in sorted(wanted - names)]
        spare = {name for name in names - wanted if not name.startswith(f"{info}/")}
        faults += [f"holds {name}" for name in sorted(spare)]
        if faults:
            return faults
        entries = file.read(f"{info}/entry_points.txt").decode()
        facts = file.read(f"{info}/METADATA").decode()
    script = "rotation-merge = rotation_merge.cli:main"
    faults = [] if script in entries else [f"does not say {script}"]
    return [*faults, *faults_of_metadata(facts)]


def faults_of_sdist(path: Path) -> list[str]:
    """What an sdist lacks: everything that a checkout needs to build, test and document itself."""
    stem = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as file:
        names = {name.removeprefix(f"{stem}/") for name in file.getnames()}
        member = file.extractfile(f"{stem}/PKG-INFO") if "PKG-INFO" in names else None
        facts = member.read().decode() if member is not None else ""
    wanted = tracked("rotation_merge", "tests", "docs", "recipes") | {"rotation_merge.pth", "LICENSE", "pyproject.toml"}
    return [*(f"lacks {name}" for name in sorted(wanted - names)), *faults_of_metadata(facts)]


def faults_of_metadata(text: str) -> list[str]:
    """What an index would refuse: a page that it cannot render, or none (and `twine check`, where it is installed)."""
    facts = email.message_from_string(text)
    wanted = {"Version": version(), "License-Expression": "Apache-2.0", "Description-Content-Type": "text/markdown"}
    faults = [f"does not say {name}: {value}" for name, value in wanted.items() if facts[name] != value]
    return faults if str(facts.get_payload()).strip() else [*faults, "has no page for an index"]


def checked(out: Path) -> list[Path]:
    """Both built, and looked into."""
    wheel, sdist = build(out)
    faults = [f"{wheel.name} {fault}" for fault in faults_of_wheel(wheel)]
    faults += [f"{sdist.name} {fault}" for fault in faults_of_sdist(sdist)]
    if faults:
        raise SystemExit("\n".join(faults))
    if importlib.util.find_spec("twine"):
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    else:
        print("Left out: 'twine check --strict', for which twine has to be installed.", file=sys.stderr)
    return [wheel, sdist]


def release(number: str, out: Path) -> None:
    """Version, date in the changelog, commit, tag; both built from the commit. Refused on unfinished work."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", number):
        raise SystemExit(f"'{number}' is no version; write 0.2.0, or 0.2.0rc1")
    if run("git", "status", "--porcelain"):
        raise SystemExit("there are changes that are not committed")
    if run("git", "tag", "--list", f"v{number}"):
        raise SystemExit(f"v{number} is there already")
    changes = ROOT / "CHANGELOG.md"
    heading = re.compile(HEADING.format(version=re.escape(number)))
    if not heading.search(changes.read_text("utf-8")):
        raise SystemExit(f"CHANGELOG.md has no heading '## {number} (unreleased)'")
    today = datetime.date.today().isoformat()
    changes.write_text(heading.sub(f"## {number} ({today})", changes.read_text("utf-8")), "utf-8")
    for name, words in VERSIONED.items():
        text = (ROOT / name).read_text("utf-8")
        found = re.search(words, text)
        assert found is not None
        (ROOT / name).write_text(text[: found.start(1)] + number + text[found.end(1) :], "utf-8")
    try:
        made = checked(out)
    except SystemExit:
        run("git", "checkout", "--", "CHANGELOG.md", *VERSIONED)
        raise
    run("git", "commit", "-qam", f"Release {number}")
    run("git", "tag", "-a", f"v{number}", "-m", f"rotation_merge {number}")
    print(f"Released {number}: {', '.join(path.name for path in made)} in {out}, tagged v{number}.")
    print(f"Left to do: git push --follow-tags; upload {out}/* where the package is published.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="release this version; without it, build and check only")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    if given.version:
        release(given.version, given.out)
        return
    for path in checked(given.out):
        print(path)


if __name__ == "__main__":
    main()
