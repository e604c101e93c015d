"""Says, before a long run, how much of the target's text a draft model with another tokenizer can draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.pair.pair import Pair


def show(pair: Pair, err: Console, *, quiet: bool) -> None:
    """Prints one line if the draft model's tokenizer differs from the target's, unless `quiet`."""
    if quiet or pair.draft is None or pair.draft.translation is None:
        return
    from rich.text import Text

    from specgen.engine.text.translation import overlap_of_examples
    from specgen.view import pair_report as words

    err.print(Text(words.notice(overlap_of_examples(pair.tokenizer, pair.draft.tokenizer))), soft_wrap=True)
