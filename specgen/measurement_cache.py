"""What was measured on this machine, kept for the next run: a file a pair and way of running it, in the user's cache folder."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

from specgen.cost_model import ParallelCosts
from specgen.files import write_whole


def cache_folder() -> Path:
    """Where the system keeps what programs may lose: `SPECGEN_CACHE`, else the user's cache folder."""
    if own := os.environ.get("SPECGEN_CACHE"):
        return Path(own)
    home = Path(os.path.expanduser("~"))  # unlike Path.home() it takes a user who has none
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "specgen"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "specgen" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "specgen"


def machine() -> dict[str, Any]:
    """What a figure holds for: a cache folder may be shared by several machines."""
    return {"node": platform.node(), "processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}


class CostStore:
    """Costs by what they were measured for."""

    def __init__(self, folder: Path) -> None:
        self._files = _Files(folder / "costs", "costs")

    def find(self, key: Mapping[str, Any]) -> ParallelCosts | None:
        try:
            costs = ParallelCosts(**self._files.find(key))
            return costs if min(astuple(costs)) > 0 and max(astuple(costs)) < math.inf else None
        except TypeError:
            return None

    def keep(self, key: Mapping[str, Any], costs: ParallelCosts) -> None:
        if max(astuple(costs)) < math.inf:  # else a draft that could not follow: true of that context alone
            self._files.keep(key, asdict(costs))


class SkipStore:
    """The layers that a search found best to skip, as text, by what they were searched for."""

    def __init__(self, folder: Path) -> None:
        self._files = _Files(folder / "skips", "skips")

    def find(self, key: Mapping[str, Any]) -> str | None:
        found = self._files.find(key)
        return found if isinstance(found, str) else None

    def keep(self, key: Mapping[str, Any], skips: str) -> None:
        self._files.keep(key, skips)


class _Files:
    """A file a key. One that cannot be read counts for nothing, one that cannot be written too."""

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
