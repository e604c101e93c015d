"""Where what was tuned and trained is kept: a folder a pair, in the user's data folder."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

EXIT_WEIGHTS = "exit.safetensors"


def data_folder() -> Path:
    """Where the system keeps what programs may not lose: `SPECGEN_DATA`, else the user's data folder."""
    if own := os.environ.get("SPECGEN_DATA"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "specgen"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "specgen" / "Data"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "specgen"


def pair_folder(target: str, target_fingerprint: str, draft: str | None) -> Path:
    """The profile folder of a pair, by its models' names and the fingerprint of the target's weights."""
    names = "+".join(readable(name) for name in (target, draft) if name is not None)
    return data_folder() / "pairs" / f"{names}-{target_fingerprint}"


def exit_folder(target: str, target_fingerprint: str) -> Path:
    """Where a target's exit layer is kept: it is the target's alone, whatever it is paired with."""
    return pair_folder(target, target_fingerprint, None)


def kept_exit(target: str, target_fingerprint: str) -> Path | None:
    """The folder with the exit layer that was trained for such a target here, None where there is none."""
    own = exit_folder(target, target_fingerprint)
    if (own / EXIT_WEIGHTS).is_file():
        return own
    # The same weights under another name, as a folder has that is reached in another way.
    others = own.parent.glob(f"*-{target_fingerprint}/{EXIT_WEIGHTS}")
    return next((path.parent for path in sorted(others)), None)


def readable(name: str) -> str:
    """A model's name as part of a file's: its last two parts, other characters than letters, digits, dots and dashes gone."""
    return re.sub(r"[^\w.-]+", "-", "-".join(Path(name).parts[-2:])).strip("-.")[:60]
