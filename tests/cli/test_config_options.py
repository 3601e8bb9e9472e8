"""One config a job: the command line has its options with its defaults, and a wrong value is one line everywhere."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

import rotation_merge as rm
from rotation_merge.cli import barrier, evaluate, fit, measure, polish
from rotation_merge.config import Config

COMMANDS: dict[type[Config], click.Command] = {
    rm.MeasureConfig: measure.command,
    rm.EvaluateConfig: evaluate.command,
    rm.BarrierConfig: barrier.command,
    rm.FitConfig: fit.command,
    rm.PolishConfig: polish.command,
}
CONFIGS = [*COMMANDS, rm.RefitConfig]


@pytest.mark.parametrize("config", COMMANDS, ids=lambda c: c.__name__)
def test_the_command_has_every_option_with_its_default(config: type[Config]) -> None:
    options = {p.name: p for p in COMMANDS[config].params if isinstance(p, click.Option)}
    for field in fields(config):
        described = config.options()[field.name]
        if not described.command:
            continue
        default = ",".join(field.default) if described.kind is tuple else field.default
        assert described.kind is bool or options[field.name].default == default, field.name
        assert described.help[1:] in str(options[field.name].help)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_every_field_is_described(config: type[Config]) -> None:
    assert set(config.options()) == {field.name for field in fields(config)}
    assert all(described.help and described.allowed for described in config.options().values())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_a_wrong_value_names_the_option_and_what_it_may_be(config: type[Config]) -> None:
    wrong: dict[type, Any] = {int: "many", float: "much", bool: "yes", str: 3, tuple: ("nothing",)}
    for name, described in config.options().items():
        values = [wrong.get(described.kind, 3)]
        values += [described.low - 1] if described.kind in (int, float) and described.low > -1e9 else []
        for value in values if described.kind is not tuple or described.choices else []:
            with pytest.raises(rm.RotationMergeError, match=f"option '{name}'") as error:
                config(**{name: value})
            assert error.value.remedy
            assert "\n" not in str(error.value)


def test_the_nearest_value_and_the_nearest_name_are_told() -> None:
    with pytest.raises(rm.RotationMergeError, match="did you mean 'sampled'"):
        rm.MeasureConfig(labels="sample")
    with pytest.raises(rm.RotationMergeError, match="holds 'gramm'; did you mean 'gram'"):
        rm.MeasureConfig(kinds=("fisher", "gramm"))
    with pytest.raises(rm.RotationMergeError, match="did you mean 'points'"):
        rm.BarrierConfig.from_values({"point": 3})
