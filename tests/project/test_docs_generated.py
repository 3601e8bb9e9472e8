"""What the docs take from the code is up to date: tables, pictures; and links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]+)?\)")


@pytest.mark.slow
def test_tables_are_what_the_code_says() -> None:
    """In a process of its own, where no test has registered methods; `python docs/generate.py` mends it."""
    done = subprocess.run([sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"out of date: {done.stdout}{done.stderr}; run python docs/generate.py"


def test_pictures_are_what_the_script_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "make_pictures.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == draw(), f"run make_pictures.py for {name}"


MEASURED = re.compile(r"(?<![\d.])\d\.\d{3}(?!\d)|\d\.\d+ ?%|\d nats")
"""How losses, accuracies and barriers are written."""
KNOWN = "0.001 0.001) 0.07 nats"
"""Settings, a goal."""


def test_figures_are_those_of_the_results() -> None:
    """No figure, in a table or a sentence, without the file of its benchmark; `benchmarks/record.py` mends it."""
    record = runpy.run_path(str(DOCS.parent / "benchmarks" / "record.py"))
    for page in record["PAGES"]:
        text, of_benchmarks = page.read_text(encoding="utf-8"), page.parent.name == "benchmarks"
        assert record["filled"](text, of_benchmarks) == text, f"{page.name}: run benchmarks/record.py"
        text = record["MARK"].sub("", text)
        assert not of_benchmarks or "\n|" not in text, f"{page.name}: a table without its results"
        text = record["INLINE"].sub("", text)
        text = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
        found = [text[m.start() : m.end() + 1] for m in MEASURED.finditer(text) if m[0] not in KNOWN]
        assert found == [], f"{page.name}: write <!-- figure: NAME | column | key=value --><!-- /figure -->"


def test_results_are_those_of_the_benchmarks() -> None:
    """Each names the command that measured it, whose script is there."""
    for path in (DOCS.parent / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text("utf-8"))
        assert {"command", "commit", "date", "machine", "versions", "rows"} <= set(result)
        script = DOCS.parent / result["command"].split()[1]
        assert script.exists(), f"{path.name}: {script.name} is gone"


def anchors(page: Path) -> set[str]:
    """Names that links may use after the #, as mkdocs makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """And the page is in the navigation."""
    assert f" {page.name}\n" in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for file, anchor in LINK.findall(text):
        target = page if not file else DOCS / file
        assert target.exists(), f"no such file: {file}"
        assert not anchor or anchor[1:] in anchors(target), f"no heading {anchor} in {target.name}"


@pytest.mark.slow
def test_site_builds_offline_without_warnings(tmp_path: Path) -> None:
    """And loads nothing from other machines."""
    pytest.importorskip("material", reason="needs mkdocs-material")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text("utf-8"))
        assert loaded == [], page.name
