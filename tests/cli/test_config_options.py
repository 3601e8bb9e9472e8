"""One config a job: options of commands, parameters of recipes and errors are made of it, in one way everywhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import rotation_merge as rm
from rotation_merge.cli import align, barrier, carry, evaluate, inspect, lora, measure, merge, polish
from rotation_merge.config import Config, Kind, Option
from rotation_merge.matching.options import MatchConfig
from rotation_merge.mergekit_plugin.keys import BY_NAME, CONFIGS, RecipeConfig, checked

COMMANDS: dict[type[Config], list[click.Command]] = {
    rm.AlignConfig: [each.command for each in (align, barrier, carry, inspect)],
    rm.AdapterMergeConfig: [lora.command],
    MatchConfig: [align.command],
    rm.MeasureConfig: [measure.command],
    rm.EvaluateConfig: [evaluate.command],
    rm.BarrierConfig: [barrier.command],
    rm.FitConfig: [align.command],
    rm.MergeConfig: [merge.command],
    rm.PolishConfig: [polish.command],
    rm.TransferConfig: [carry.command],
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
    key = described.key or name
    in_recipes = described.scope and key in BY_NAME and config in CONFIGS and key != "delegate"
    for value in wrong_values(described):
        with pytest.raises(rm.RotationMergeError, match=f"option '{name}'") as error:
            config(**{name: value})
        messages = [str(error.value)]
        if in_recipes:
            with pytest.raises(rm.RotationMergeError, match=f"parameter '{key}' is") as error:
                checked(key, value)
            messages.append(str(error.value))
        for message in messages:
            assert described.allowed in message
            assert "\n" not in message
            if isinstance(value, str) and value.endswith("x"):
                assert f"did you mean '{value[:-1]}'" in message


@pytest.mark.parametrize("config", COMMANDS, ids=lambda c: c.__name__)
def test_commands_have_every_option_and_judge_it_alike(config: type[Config]) -> None:
    for command in COMMANDS[config]:
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        carries = command is carry.command and config is rm.AlignConfig
        defaults = rm.TransferConfig().match if carries else config  # carrying matches the largest group of the stream
        for name, described in config.options().items():
            if not described.command:
                continue
            option, flag = options[name], f"--{(described.key or name).replace('_', '-')}"
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
