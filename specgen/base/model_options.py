"""What users name of the models to load. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specgen.base.errors import SpecgenError
from specgen.base.files import EXIT_WEIGHTS
from specgen.base.settings import Setting
from specgen.base.types import BACKENDS, DRAFT_DTYPES

Finding = Literal["untried", "unloaded", "heads"]
NO_PROFILE = "none"  # instead of a profile's folder


@dataclass(frozen=True)
class ModelOptions:
    """Which models to load, onto which devices, how they compute, and what drafts for the target:
    see `specgen.load`.

    Without a `target`, the bundled pair is meant. If no `exit_layer` is named, one in the folder of
    the `profile` is taken. `threads` (None: as many as are fast) is the number of CPU
    threads; only a command can set it, before torch is imported.

    Raises SpecgenError for the first mistake: an unknown `backend` or `draft_dtype`, a
    `repetition_penalty` out of bounds, and an option without the model that it belongs to, such as
    `revision` without `target`.
    """

    target: str | None = None
    draft: str | None = None
    device: str = "auto"
    draft_device: str | None = None
    dtype: str = "auto"
    draft_dtype: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    exit_layer: Path | None = None
    head: Path | None = None
    backend: str = "auto"
    context: int | None = None
    threads: int | None = None
    exact: bool = False
    repetition_penalty: float | None = None
    profile: Path | None = None
    find: bool | Finding = False

    def __post_init__(self) -> None:
        _check_known("backend", self.backend, BACKENDS)
        if self.draft_dtype is not None:
            _check_known("draft dtype", self.draft_dtype, DRAFT_DTYPES)

        self._check_needs("draft", "target")
        self._check_needs("revision", "target")
        self._check_needs("draft_revision", "draft")
        if self.target is not None:
            self._check_needs("draft_dtype", "draft")

        if self.repetition_penalty is not None:
            penalty = Setting(1.0, "", 0.01, 100).parse(
                "repetition_penalty", self.repetition_penalty
            )
            object.__setattr__(self, "repetition_penalty", float(penalty))
        if (
            self.uses_profile
            and self.profile is not None
            and self.exit_layer is None
            and (self.profile / EXIT_WEIGHTS).is_file()
        ):
            object.__setattr__(self, "exit_layer", self.profile)

    @property
    def uses_profile(self) -> bool:
        """Whether a profile may be used: not with `--profile none`."""
        return str(self.profile) != NO_PROFILE

    def _check_needs(self, option: str, needed: str) -> None:
        value = getattr(self, option)
        if value is None or getattr(self, needed) is not None:
            return
        written = f"--{option.replace('_', '-')} {value}"
        raise SpecgenError(
            f"{written} is given without --{needed}", f"Name the {needed} too: --{needed} MODEL"
        )


def _check_known(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise SpecgenError(
            f"there is no {what} {name!r}", f"Take {', '.join(known[:-1])} or {known[-1]}"
        )
