"""The README says what the code does: tree, tables, commands, endpoints, settings."""

import re
import subprocess

import pytest
import typer
from readme import ROOT, filled

from service.settings import Settings
from study.config import presets
from study.run import app

README = (ROOT / "README.md").read_text()


def test_generated_tables_are_those_of_the_code() -> None:
    """`python tests/readme.py` writes them."""
    assert filled(README) == README


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## Layout")[1].split("```")[1]
    folder = ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = name if not line.startswith(" ") else folder
        path = ROOT / name if not line.startswith(" ") else ROOT / folder / name
        assert path.exists(), line


def test_every_option_in_a_command_exists() -> None:
    names = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    commands = re.findall(r"^python study/run\.py(.*)$", README, flags=re.M)
    assert commands
    for command in commands:
        for option in re.findall(r"--[a-z-]+", command.split("#")[0]):
            assert option in names, command


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)", README))))
def test_every_make_target_exists(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_preset_is_named() -> None:
    for preset in presets():
        assert f"`{preset}`" in README


def test_every_setting_of_the_service_is_in_the_table() -> None:
    rows = set(
        re.findall(r"`GRADNORM_([A-Z_]+)`", "\n".join(re.findall(r"^\| `GRADNORM_.*?\|", README, flags=re.M)))
    )
    assert rows == {name.upper() for name in Settings.model_fields}


def test_every_setting_of_the_command_is_in_the_table() -> None:
    options = {str(one.envvar): one.opts[0] for one in typer.main.get_command(app).params if one.envvar}
    assert options
    for variable, option in options.items():
        assert f"| `{variable}` | `{option}` |" in README
