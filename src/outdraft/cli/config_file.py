"""Flags from a TOML file."""

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from outdraft.core.errors import ConfigError, did_you_mean


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of a command's flags; for the callback of --config.

    Keys are names of flags without the leading dashes. `model` is the argument of that name, and a
    table stands for a flag that takes JSON.

    Raises:
        ConfigError: the file is no TOML, or a key is no flag.
    """
    if path is None:
        return None
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    names = {
        spelling.lstrip("-").replace("_", "-"): parameter.name
        for parameter in context.command.params
        for spelling in parameter.opts
        if parameter.name not in ("config", "help")
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise ConfigError(f"unknown key {key!r} in {path}: {did_you_mean(key, names)}")
        defaults[name] = json.dumps(value) if isinstance(value, dict) else value
    context.default_map = defaults
    return path
