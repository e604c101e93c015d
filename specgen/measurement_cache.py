"""Cache of measurements on this machine: one file for each kind and key, in the user's cache folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from specgen.files import write_whole
from specgen.paths import cache_folder


def find(kind: str, key: Mapping[str, Any]) -> Any:
    """What was kept under a key that equals `key`; None where there is nothing or where the file cannot be read."""
    try:
        found = json.loads(_path(kind, key).read_text(encoding="utf-8"))
        return found[kind] if found["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keep a JSON value; a cache that cannot be written is ignored."""
    with suppress(OSError):
        write_whole(_path(kind, key), json.dumps({"key": key, kind: value}, indent=1))


def _path(kind: str, key: Mapping[str, Any]) -> Path:
    return cache_folder() / kind / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
