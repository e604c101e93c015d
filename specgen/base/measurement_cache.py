"""Keeps measurements made on this machine, such as pass times, as JSON files in the user's cache folder.

`kind` names the type of measurement. `key` describes what was measured, for instance the models and the machine. Each pair of a
kind and a key has one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from specgen.base.files import cache_folder, write_whole


def find(kind: str, key: Mapping[str, Any]) -> Any:
    """Returns the value that `keep` stored with the same kind and key, None if there is none or if its file cannot be read."""
    try:
        found = json.loads(_path(kind, key).read_text(encoding="utf-8"))
        return found[kind] if found["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Stores a JSON value with its kind and key. If the file cannot be written, nothing happens."""
    with suppress(OSError):
        write_whole(_path(kind, key), json.dumps({"key": key, kind: value}, indent=1))


def drop(kind: str, key: Mapping[str, Any]) -> None:
    """Removes what `keep` stored with the same kind and key. If the file cannot be removed, nothing happens."""
    with suppress(OSError):
        _path(kind, key).unlink()


def _path(kind: str, key: Mapping[str, Any]) -> Path:
    return cache_folder() / kind / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
