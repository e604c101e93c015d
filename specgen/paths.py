"""Folders for data (profiles, trained parts) and for caches (measurements), and the files that the package carries."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

EXIT_WEIGHTS = "exit.safetensors"


def examples_file() -> Path:
    """The prompts for the bundled pair: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).parent
    inside = package / "examples.yaml"
    return inside if inside.is_file() else package.parent / "examples.yaml"


def data_folder() -> Path:
    """Where profiles and trained parts are kept: `SPECGEN_DATA`, else a folder in the user's data folder."""
    return _user_folder("SPECGEN_DATA", "Application Support/specgen", "specgen/Data", "XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Where measurements are kept, which can be repeated: `SPECGEN_CACHE`, else a folder in the user's cache folder."""
    return _user_folder("SPECGEN_CACHE", "Caches/specgen", "specgen/Cache", "XDG_CACHE_HOME", ".cache")


def _user_folder(override: str, on_macos: str, on_windows: str, xdg_variable: str, xdg_default: str) -> Path:
    if own := os.environ.get(override):
        return Path(own)
    home = Path(os.path.expanduser("~"))  # unlike Path.home(), works for a user without a home folder
    if sys.platform == "darwin":
        return home / "Library" / on_macos
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / on_windows
    return Path(os.environ.get(xdg_variable) or home / xdg_default) / "specgen"


def pair_folder(target: str, target_fingerprint: str, draft: str | None) -> Path:
    """The profile folder of a pair, by the models' names and the fingerprint of the target's weights."""
    names = "+".join(readable(name) for name in (target, draft) if name is not None)
    return data_folder() / "pairs" / f"{names}-{target_fingerprint}"


def exit_folder(target: str, target_fingerprint: str) -> Path:
    """Where a target's exit layer is kept. It belongs to the target alone, whatever draft model it is used with."""
    return pair_folder(target, target_fingerprint, None)


def kept_exit(target: str, target_fingerprint: str) -> Path | None:
    """The folder with the exit layer that was trained here for a target with these weights; None where there is none."""
    own = exit_folder(target, target_fingerprint)
    if (own / EXIT_WEIGHTS).is_file():
        return own
    # The same weights may have been given under another name, for instance another path.
    others = own.parent.glob(f"*-{target_fingerprint}/{EXIT_WEIGHTS}")
    return next((path.parent for path in sorted(others)), None)


def readable(name: str) -> str:
    """A model's name as part of a file name: its last two parts, with only letters, digits, dots, underscores and dashes."""
    return re.sub(r"[^\w.-]+", "-", "-".join(Path(name).parts[-2:])).strip("-.")[:60]
