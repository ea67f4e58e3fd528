"""TOML files of one level: names and plain values."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtools.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8, as TOML is (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    return values


def write_toml(values: Mapping[str, Any]) -> str:
    """Values as lines of TOML. None, for which TOML has no word, is left out.

    Args:
        values: texts, booleans, finite numbers, lists or tuples of these, None.

    Raises:
        ConfigError: a text that is not Unicode, such as the name of a file in another encoding.
    """
    return "".join(f"{name} = {_literal(name, value)}\n" for name, value in values.items() if value is not None)


def _literal(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_literal(name, item) for item in value)}]"
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} = {value!r}: not UTF-8, as TOML is; choose another name") from error
        # A JSON string is a TOML basic string, but for DEL, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
