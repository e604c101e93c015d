"""Whether a method can run with two models, as far as their files show. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specgen.base.errors import SpecgenError


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a method can run with a target and its draft model (`ready`). If so, `why` may be a
    remark; if not, `why` is the reason and `cure` the way out."""

    ready: bool
    why: str = ""
    cure: str = ""

    @classmethod
    def of(cls, error: SpecgenError) -> Readiness:
        return cls(False, error.message, error.hint)


@dataclass(frozen=True, slots=True)
class KnownModels:
    """What is known of a target and what can draft for it before any weights are loaded.

    `draft` is None without a draft model; `draft_refusal` says why its drafts cannot
    be translated token by token, None if they can or need not be. `unlike_llama` is the target's
    family if its layers cannot be run one by one, None if they can or if that is not known.
    `missing_parts` has, for each kind of trained part that cannot be used, the reason and what to
    do. `names_head`: the user named a head.
    """

    draft: str | None = None
    draft_refusal: str | None = None
    unlike_llama: str | None = None
    missing_parts: Mapping[str, Readiness] = field(default_factory=dict)
    names_head: bool = False
