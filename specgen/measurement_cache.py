"""Cache of measurements on this machine: one file for each key, in the user's cache folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

from specgen.cost_model import ParallelCosts
from specgen.files import write_whole


class CostStore:
    """Pass times by what they were measured for."""

    def __init__(self, folder: Path) -> None:
        self._files = _Files(folder / "costs", "costs")

    def find(self, key: Mapping[str, Any]) -> ParallelCosts | None:
        try:
            costs = ParallelCosts(**self._files.find(key))
            return costs if min(astuple(costs)) > 0 and max(astuple(costs)) < math.inf else None
        except TypeError:
            return None

    def keep(self, key: Mapping[str, Any], costs: ParallelCosts) -> None:
        if max(astuple(costs)) < math.inf:  # infinite where the draft could not follow that one context
            self._files.keep(key, asdict(costs))


class SkipStore:
    """The layers that a search found best to skip, in the notation of the `skip` setting, by what they were searched for."""

    def __init__(self, folder: Path) -> None:
        self._files = _Files(folder / "skips", "skips")

    def find(self, key: Mapping[str, Any]) -> str | None:
        found = self._files.find(key)
        return found if isinstance(found, str) else None

    def keep(self, key: Mapping[str, Any], skips: str) -> None:
        self._files.keep(key, skips)


class _Files:
    """One JSON file for each key. Files that cannot be read or written are ignored."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def find(self, key: Mapping[str, Any]) -> Any:
        try:
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
            return found[self._name] if found["key"] == key else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, key: Mapping[str, Any], value: Any) -> None:
        with suppress(OSError):
            write_whole(self._path(key), json.dumps({"key": key, self._name: value}, indent=1))

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._folder / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
