"""The `rotation-merge` command. Nothing heavy is imported until a command runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from rotation_merge.cli.app import app

    app(prog_name="rotation-merge")
