"""`rotation-merge report`."""

from __future__ import annotations

import click

from rotation_merge.cli.options import writes
from rotation_merge.cli.show import json_option, print_json, say, shown


@click.command(epilog="Example: rotation-merge report ./merged --out report.html")
@click.argument("directory")
@click.option("--out", metavar="FILE", help="Where to write the page; report.html in DIRECTORY if not given.")
@json_option
@shown
@writes(files="out")
def command(directory: str, out: str | None, as_json: bool) -> int:
    """Write the report of the merge in DIRECTORY as one self-contained HTML page.

    Reads rotation_merge.json and, where `rotation-merge barrier --save` wrote it, barrier.json.
    """
    from rotation_merge.report.html import REPORT_FILE, read_report, write_page

    target = write_page(directory, out)
    if as_json:
        report = read_report(f"{directory}/{REPORT_FILE}")
        print_json({"page": target, "summary": report.to_dict()["summary"]})
        return 0
    say(f"Written to {target}", "green")
    return 0
