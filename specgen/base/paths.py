"""The user's folders for data (tuning profiles, trained parts of models) and for cached measurements, and the files that are
installed with the package."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

EXIT_WEIGHTS = "exit.safetensors"
HEAD_DESCRIPTION = "head.yaml"


def examples_file() -> Path:
    """The path of `examples.yaml`, the prompts for the bundled pair of demo models: in the installed package, or at the top of a
    source checkout."""
    package = Path(__file__).parent.parent
    inside = package / "examples.yaml"
    return inside if inside.is_file() else package.parent / "examples.yaml"


def data_folder() -> Path:
    """The folder for tuning profiles and trained parts of models: the environment variable `SPECGEN_DATA`, or if it is not set a
    folder in the user's data folder."""
    return _user_folder("SPECGEN_DATA", "Application Support/specgen", "specgen/Data", "XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """The folder for cached measurements, which can be deleted and measured again: the environment variable `SPECGEN_CACHE`, or
    if it is not set a folder in the user's cache folder."""
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
    """The folder for what belongs to a pair of models, such as tuning profiles. Its name contains the models' names and the
    fingerprint of the target's weights. `draft` is None if there is no draft model."""
    names = "+".join(readable(name) for name in (target, draft) if name is not None)
    return data_folder() / "pairs" / f"{names}-{target_fingerprint}"


def exit_folder(target: str, target_fingerprint: str) -> Path:
    """The folder for a target's exit layer: a trained layer after the target's first layers, so that they can draft. It does not
    depend on the draft model."""
    return pair_folder(target, target_fingerprint, None)


def kept_exit(target: str, target_fingerprint: str) -> Path | None:
    """The folder with the exit layer that was trained on this machine for a target with these weights. None if there is none."""
    return _kept(exit_folder(target, target_fingerprint), target_fingerprint, EXIT_WEIGHTS)


def head_folder(kind: str, target: str, target_fingerprint: str) -> Path:
    """The folder for a target's trained head of a kind: `medusa`, `eagle` or `glide`. It does not depend on the draft model."""
    return pair_folder(target, target_fingerprint, None) / "heads" / kind


def kept_head(kind: str, target: str, target_fingerprint: str) -> Path | None:
    """The folder with the head that was trained on this machine for a target with these weights. None if there is none."""
    return _kept(pair_folder(target, target_fingerprint, None), target_fingerprint, f"heads/{kind}/{HEAD_DESCRIPTION}")


def _kept(own: Path, target_fingerprint: str, name: str) -> Path | None:
    """The folder with the file `name` of a target: in its folder `own`, or in that of the same weights under another name."""
    if (own / name).is_file():
        return (own / name).parent
    others = own.parent.glob(f"*-{target_fingerprint}/{name}")  # such as another path
    return next((path.parent for path in sorted(others)), None)


def readable(name: str) -> str:
    """A model's name as part of a file name: the last two parts of its path, with only letters, digits, dots, underscores and
    dashes."""
    return re.sub(r"[^\w.-]+", "-", "-".join(Path(name).parts[-2:])).strip("-.")[:60]
