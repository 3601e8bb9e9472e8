"""Bad values of methods end in one line, as all bad inputs do."""

from __future__ import annotations

import pytest
from bad_methods import METHODS
from hub_support import Hub
from spoiling import Row
from test_bad_inputs import bench as bench
from test_bad_inputs import good_inputs as good_inputs
from test_bad_inputs import test_bad_input as is_refused


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
def test_bad_value(row: Row, bench: Hub) -> None:
    is_refused(row, bench)
