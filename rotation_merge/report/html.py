"""The report as one self-contained HTML page: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

import json
import os
from html import escape
from pathlib import Path

from rotation_merge.errors import RotationMergeError
from rotation_merge.files.durable import write_text
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report import sections
from rotation_merge.run.curves import FILE as BARRIER_FILE
from rotation_merge.run.curves import Barrier, read_barriers

PAGE_FILE = "report.html"
GENERATOR = '<meta name="generator" content="rotation_merge">'


def page(report: MergeReport, barriers: list[Barrier] | None = None, name: str = "") -> str:
    """The whole page."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = f"Alignment report: {name}" if name else "Alignment report"
    body = [sections.header(report, title)]
    for donor in dict.fromkeys(row.donor for row in report.rows):
        body.append(sections.donor(report, donor))
    body += [sections.barrier(barrier) for barrier in barriers or []]
    body.append(sections.footer(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{GENERATOR}"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def is_page(path: str) -> bool:
    """Whether a file is a page that we wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            return GENERATOR in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False


def write_page(directory: str, out: str | None = None) -> str:
    """Write the page for a merged (or aligned) model from the files beside it.

    Args:
        directory: holds rotation_merge.json and, where it was measured, barrier.json.
        out: where to; `report.html` in the directory if not given.

    Returns:
        The page's path.

    Raises:
        RotationMergeError: there is no report, or it is damaged.
    """
    path = os.path.join(directory, REPORT_FILE)
    measured = os.path.join(directory, BARRIER_FILE)
    barriers = read_barriers(measured) if os.path.exists(measured) else []
    name = os.path.basename(os.path.abspath(directory))
    text = page(read_report(path), barriers, name)
    target = out or os.path.join(directory, PAGE_FILE)
    write_text(target, text)
    return target


def read_report(path: str) -> MergeReport:
    """The report that a merge wrote.

    Raises:
        RotationMergeError: there is none, or it is damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return MergeReport.from_dict(json.load(file))
    except FileNotFoundError as error:
        raise RotationMergeError(
            "no such file", where=path, remedy="name the directory of a model that rotation_merge wrote"
        ) from error
    except NotADirectoryError as error:
        remedy = "name the directory of a model that rotation_merge wrote"
        raise RotationMergeError("is a file", where=os.path.dirname(path), remedy=remedy) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise RotationMergeError(f"is not a report ({problem})", where=path, remedy="merge again") from error
