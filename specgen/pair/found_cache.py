"""Remembers what was found to draft for a target, in the user's cache folder, for as long as the
files that were looked at stay as they are: a later search only lists folders. Each way to run the
target has its own memory. The files here may be deleted at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from specgen.base.files import cache_folder, write_whole
from specgen.base.machine import versions

_FORMAT = 1  # of a search and of its file; a change of either is a new number


def search_state(places: Sequence[Path]) -> str:
    """Returns a hash that changes when one of these files, or a file in one of these folders,
    changes, and with the versions of the libraries."""
    listed = [[str(place), _entries(place)] for place in places]
    facts = json.dumps([_FORMAT, versions(), listed])
    return sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()


def read_search(target: Path, conditions: str, state: str) -> list[dict[str, Any]] | None:
    """Returns `found` as `keep_search` was last given it for the target's folder and these
    conditions; None if the state was another one, or if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(_file(target, conditions).read_text("utf-8"))
        if kept["state"] == state:
            return [dict(drafter) for drafter in kept["found"]]
    return None


def keep_search(
    target: Path,
    conditions: str,
    state: str,
    found: Sequence[Mapping[str, Any]],
) -> None:
    """Stores `found`, what a search found for the target in the folder `target`, and what runs
    showed of it since.

    `conditions` say how the models were run, `state` is that of the files looked at
    (`search_state`). Does nothing where the file cannot be written.
    """
    with suppress(OSError, ValueError):
        write_whole(
            _file(target, conditions), json.dumps({"state": state, "found": list(found)}, indent=1)
        )


def _file(target: Path, conditions: str) -> Path:
    key = json.dumps([os.path.realpath(target), conditions])
    name = sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return cache_folder() / "drafters" / f"{name}.json"


def _entries(place: Path) -> list[list[Any]]:
    """Returns name, size and time of change of a file, or of each file in a folder; of a link,
    those of what it names."""
    with suppress(OSError):
        return [_facts(place / name) for name in sorted(os.listdir(place))]
    return [_facts(place)]


def _facts(path: Path) -> list[Any]:
    with suppress(OSError):
        facts = path.stat()
        return [path.name, facts.st_size, facts.st_mtime_ns]
    return [path.name]
