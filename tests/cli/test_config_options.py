"""One config a job: options of commands, parameters of recipes and errors are made of it, in one way everywhere."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import rotation_merge as rm
from rotation_merge.cli.app import app
from rotation_merge.config import Config, Kind, Option
from rotation_merge.matching.options import MatchConfig
from rotation_merge.mergekit_plugin.keys import BY_NAME, CONFIGS, RecipeConfig, checked

COMMANDS: dict[type[Config], str] = {
    rm.AlignConfig: "align barrier carry inspect",
    rm.AdapterMergeConfig: "lora",
    MatchConfig: "align",
    rm.MeasureConfig: "measure",
    rm.EvaluateConfig: "evaluate",
    rm.BarrierConfig: "barrier",
    rm.FitConfig: "align",
    rm.MergeConfig: "merge",
    rm.PolishConfig: "polish",
    rm.TransferConfig: "carry",
}
ALL = [*COMMANDS, rm.RefitConfig, RecipeConfig]
FIELDS = [pytest.param(config, name, id=f"{config.__name__}.{name}") for config in ALL for name in config.options()]
SETTINGS = {"alignment", "match", "untie"}
"""Fields of `TransferConfig` that are values, no options."""
WRONG: dict[type, Any] = {int: "many", float: "much", bool: "yes", str: 3, tuple: ("nothing",)}


def wrong_values(described: Option) -> list[Any]:
    """Values that an option cannot have: of another type, outside its range, a misspelt word."""
    if described.kind is tuple and not described.choices:
        return []
    values = [[]] if isinstance(described.kind, Kind) else [WRONG.get(described.kind, 3)]
    values += [described.low - 1] if described.kind in (int, float) and described.low > -1e9 else []
    words = () if described.kind is tuple else described.choices
    return values + [f"{choice}x" for choice in words if isinstance(choice, str)]


@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_a_wrong_value_names_the_option_what_it_may_be_and_the_nearest(config: type[Config], name: str) -> None:
    """In Python and, where it is one of their parameters, in recipes."""
    described = config.options()[name]
    key = described.key
    ways = {f"option '{name}'": lambda value: config(**{name: value})}
    if described.scope and key in BY_NAME and config in CONFIGS and key != "delegate":
        ways[f"parameter '{key}' is"] = lambda value: checked(key, value)
    for value, (words, way) in itertools.product(wrong_values(described), ways.items()):
        with pytest.raises(rm.RotationMergeError, match=words) as error:
            way(value)
        assert described.allowed in str(error.value)
        assert "\n" not in str(error.value)
        if isinstance(value, str) and value.endswith("x"):
            assert f"did you mean '{value[:-1]}'" in str(error.value)


@pytest.mark.parametrize("config", COMMANDS, ids=lambda c: c.__name__)
def test_commands_have_every_option_and_judge_it_alike(config: type[Config]) -> None:
    for command_name in COMMANDS[config].split():
        command = app.get_command(click.Context(app), command_name)
        assert command is not None
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        carries = command_name == "carry" and config is rm.AlignConfig
        defaults = rm.TransferConfig().match if carries else config  # carrying matches the largest group of the stream
        for name, described in config.options().items():
            if not described.command:
                continue
            option, flag = options[name], f"--{described.key.replace('_', '-')}"
            assert described.text[1:] in str(option.help)
            assert flag in option.opts
            context = click.Context(command)
            default = option.get_default(context)
            assert default in (None, False) or option.type_cast_value(context, default) == getattr(defaults, name)
            for choice in described.choices if described.kind is not tuple else ():
                result = CliRunner().invoke(command, [flag, f"{choice}x"])
                assert result.exit_code == 2
                assert f"did you mean '{str(choice).lower()}'" in result.output, result.output


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.__name__)
def test_every_field_is_described_and_has_a_default_that_it_may_have(config: type[Config]) -> None:
    settings = SETTINGS if config is rm.TransferConfig else set()
    assert {*config.options(), *settings} == {field.name for field in fields(config)}
    for name, described in config.options().items():
        described.check(name, getattr(config, name))
        assert all((described.help, described.allowed, re.match(r"^[a-z0-9_]+$", name)))


def test_every_exported_config_is_tried() -> None:
    exported = {value for value in (getattr(rm, name) for name in rm.__all__) if isinstance(value, type)}
    assert {value for value in exported if issubclass(value, Config)} == {*ALL} - {RecipeConfig, MatchConfig}


def test_paths_lists_and_single_words_are_what_people_write() -> None:
    for config, values, words in (
        (rm.MeasureConfig, {"kinds": ("fisher", "gramm")}, "holds 'gramm'; did you mean 'gram'"),
        (rm.MeasureConfig, {"kinds": "gam"}, r"holds 'gam'; did you mean 'gram'\?"),
        (rm.BarrierConfig, {"point": 3}, "did you mean 'points'"),
    ):
        with pytest.raises(rm.RotationMergeError, match=words):
            config.of(None, values)
    assert rm.TransferConfig(data=Path("texts.txt")).data == "texts.txt"
    assert rm.FitConfig(state="state.safetensors").state == Path("state.safetensors")
    assert rm.MeasureConfig(kinds="gram") == rm.MeasureConfig(kinds=["gram"]) == rm.MeasureConfig(kinds=("gram",))
