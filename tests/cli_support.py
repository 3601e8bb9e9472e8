"""Commands of rotation-merge, run in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from rotation_merge.cli.app import app


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def parsed(*args: object) -> Any:
    """What a command prints with --json."""
    done = run(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
