"""Gives a loaded pair the draft model that `specgen tune` chose for it. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.pair.finding import other_drafts
from specgen.pair.loading import as_tuned, with_found
from specgen.pair.profile_place import FILE, default_folder, profile_key_of

if TYPE_CHECKING:
    from specgen.base.model_options import ModelOptions
    from specgen.base.types import SamplingParams
    from specgen.pair.finding import Found
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile
    from specgen.workers.process import DraftProcess


def with_tuned_draft(
    pair: Pair,
    sampling: SamplingParams,
    folder: Path | None,
    options: ModelOptions,
    process: DraftProcess | None = None,
) -> Pair:
    """Returns the pair with the draft model that was tuned, if it is one of the others that were
    found for the target; else the pair as it is.

    It is that of the profile in `folder`; None: that of the target's latest profile for this
    sampling. `options` say in which dtype it is loaded, `process` is as for `with_profile`. Raises
    SpecgenError if the profile in `folder` cannot be read, or the draft model cannot be used.
    """
    drafts = other_drafts(pair.found, pair.draft)
    if not drafts:
        return pair
    tuned = _latest_tuned(pair, drafts, sampling) if folder is None else _tuned_in(folder, drafts)
    return pair if tuned is None else with_found(pair, tuned, options, process=process)


def _tuned_in(folder: Path, drafts: Sequence[Found]) -> Found | None:
    """Returns the one of the draft models that the profile in the folder is for; None if it is for
    none of them."""
    from specgen.pair import profile as profiles  # imports pydantic

    if not (folder / FILE).is_file():
        return None
    tuned = profiles.load(folder).fits["draft"]
    if not isinstance(tuned, dict):
        return None
    by_name = {draft.name: draft for draft in drafts}
    return by_name.get(tuned["name"])


def _latest_tuned(pair: Pair, drafts: Sequence[Found], sampling: SamplingParams) -> Found | None:
    """Returns the one of the draft models that the target's latest profile is for; None if it is
    for the pair's own draft, or if there is no profile."""
    key = profile_key_of(pair)
    tuned = None
    latest = 0.0
    for draft in (None, *drafts):  # the pair's own first
        if draft is not None:
            key["draft"] = {"name": draft.name, "device": pair.target.device_label}
        path = default_folder(key, sampling) / FILE
        if path.is_file() and path.stat().st_mtime > latest:
            tuned = draft
            latest = path.stat().st_mtime
    return tuned


def with_profile(
    pair: Pair, profile: Profile, process: DraftProcess | None, note: Callable[[str], None]
) -> tuple[Pair, Profile | None]:
    """Returns the pair with its draft's weights rounded as the profile says, and the profile.

    If they cannot be rounded here, returns the pair as it is, and None, and tells `note` why.
    `process` was started to run PEARL's draft model; it then runs the rounded one.
    """
    try:
        return as_tuned(pair, profile, process), profile
    except SpecgenError as error:
        note(
            f"the profile is stale: its draft was {profile.draft_dtype}; it is not used. "
            f"{error.message}"
        )
        return pair, None
