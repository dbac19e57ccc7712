"""The help of the commands: options explain themselves, examples are accepted."""

import shlex

import pytest
import typer.main
from trilith.cli.app import make_app
from trilith.cli.reference import EXAMPLES, every_command

COMMANDS = dict(every_command(typer.main.get_command(make_app())))
#: Words with which a help text would lean on the option above it or on its section.
LEANING = {"and", "of", "also", "ditto", "with", "its", "it", "so", "the", "a", "an", "another"}


def examples(command):
    """Return the commands below "Examples:", with continued lines joined."""
    text = command.help.partition(EXAMPLES)[2].replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_makes_sense_alone(name):
    for one in COMMANDS[name].params:
        if not getattr(one, "hidden", False):
            assert one.param_type_name == "option" or one.metavar, f"{one.name} has no name for users"
            assert one.help and one.help.split()[0].strip(",:;").lower() not in LEANING, (one.name, one.help)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_a_command_line_that_the_command_accepts(name):
    shown = examples(COMMANDS[name])
    assert shown, f"trilith {name} shows no example"
    for line in shown:
        words = shlex.split(line)
        words = words[words.index("trilith") + 1 :]
        said = len(name.split())
        assert " ".join(words[:said]) == name, line
        COMMANDS[name].make_context(name, words[said:])  # parses and runs nothing


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_shows_one_sentence_for_each(name):
    first = COMMANDS[name].help.split("\n\n")[0]
    assert first.endswith(".") and len(first) <= 80, first
