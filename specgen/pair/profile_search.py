"""Finds the profile that fits a pair, for commands and for calls in Python. Imports pydantic and
PyYAML only if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.files import EXIT_WEIGHTS
from specgen.pair.profile_place import FILE, LoadedPair, default_folder, profile_key_of

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.pair.profile import Profile


def find(
    pair: LoadedPair,
    sampling: SamplingParams,
    folder: Path | None = None,
    *,
    any_draft_dtype: bool = False,
) -> tuple[Profile | None, str]:
    """Returns the profile for this pair and sampling, None if none can be used, and the reason why
    not: empty if one can be used, or if there is none at all.

    The profile is read from `folder`. If `folder` is None, it is read from the folder where
    `specgen tune` saves it by default; where that has none, the reason names the latest one that
    was made for the same models on another device, dtype or machine, or for other sampling. With
    `any_draft_dtype`, a profile that was made with rounded draft weights also fits a pair whose
    draft is as it is stored. Raises SpecgenError where `folder` is given and its profile cannot be
    read.
    """
    key = profile_key_of(pair)
    found_in = folder or default_folder(key, sampling)
    path = found_in / FILE
    if not path.is_file() and folder is None:
        others = [path for path in found_in.parent.glob(f"*/{FILE}") if path.is_file()]
        if not others:
            return None, ""
        path = max(others, key=lambda each: each.stat().st_mtime)
    elif not path.is_file() and (found_in / EXIT_WEIGHTS).is_file():
        return None, ""

    from specgen.pair import profile as profiles

    try:
        profile = profiles.load(path.parent)
    except SpecgenError as error:
        if folder is not None:
            raise
        return None, f"{error.message}; it is not used. {error.hint}"
    chosen = profile.chosen.method
    if not methods.is_known(chosen):
        return (
            None,
            f"the profile {path} chose {chosen}, which runs only where it is named: -m {chosen}",
        )
    why = profile.mismatch_with(key, sampling, any_draft_dtype=any_draft_dtype)
    if why is None:
        return profile, ""
    kind = "stale" if path.parent == found_in else "for another run"
    return (
        None,
        (
            f"the profile {path} is {kind}: {why}; it is not used. {profiles.TUNE_AGAIN}, "
            "with the same options"
        ),
    )
