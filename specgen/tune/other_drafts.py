"""The drafts that `specgen tune` tries besides that of the pair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.base.types import QUANTISED
from specgen.engine.kernels.operators import kernels_for
from specgen.pair.finding import Found, other_drafts
from specgen.pair.loading import with_draft_dtype, with_found
from specgen.tune.tuner import worth_rounding

if TYPE_CHECKING:
    from specgen.base.model_options import ModelOptions
    from specgen.pair.pair import Pair


def with_other_drafts(
    pair: Pair, options: ModelOptions, opened: ExitStack
) -> tuple[Pair, list[Callable[[Pair], Pair | None]]]:
    """Returns the pair, with the first draft model that was found if it has none, and functions
    that make a pair with another draft from the best pair so far; None: it cannot gain.

    The other drafts are the further ones that were found, and the best pair's with weights rounded
    to 8 and to 4 bits, unless `options` name its dtype. `opened` closes all pairs that are made.
    Raises as `with_found`, and so do the functions.
    """

    def with_draft(draft: Found, best: Pair) -> Pair:
        return opened.enter_context(with_found(best, draft, options))

    def with_rounded_draft(dtype: str, best: Pair) -> Pair | None:
        other = rounded(best, dtype)
        return None if other is None else opened.enter_context(other)

    drafts = other_drafts(pair.found, pair.draft)
    if pair.draft is None and drafts:  # little is expected of it
        pair = with_draft(drafts.pop(0), pair)
    others: list[Callable[[Pair], Pair | None]] = [partial(with_draft, draft) for draft in drafts]
    if options.draft_dtype is None:
        others += [partial(with_rounded_draft, dtype) for dtype in QUANTISED]
    return pair, others


def rounded(pair: Pair, dtype: str) -> Pair | None:
    """Returns the pair with its draft's weights rounded to `dtype`, `int8` or `int4`; None if that
    cannot gain, or cannot be done here.

    Weights in 4 bits take less memory, and less time, only where our own kernels read them:
    elsewhere they become float32.
    """
    draft = pair.draft
    if draft is None or not worth_rounding(pair):
        return None
    if dtype == "int4" and kernels_for(draft.device, draft.precision.dtype) is None:
        return None
    try:
        return with_draft_dtype(pair, dtype)
    except SpecgenError:  # transformers runs it, or this machine has no such linear layers
        return None
