"""A table of the log-probabilities of an answer's tokens, and of the likeliest tokens at each
place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from specgen.base.text import inline, shown
from specgen.base.types import TokenLogProbs
from specgen.view.theme import one_line_text

_TEXT = 16  # cells of a token's text


def show_log_probs(
    console: Console,
    scores: Sequence[tuple[int, TokenLogProbs]],
    text_of: Callable[[Sequence[int]], str],
) -> None:
    """Prints one line for each token of an answer, by its id: its text, its log-probability (nats),
    and the likeliest tokens at its place with theirs. `text_of` returns the text of token ids."""
    console.print()
    titles = f"{'token':<{_TEXT}} {'log p':>8}"
    if any(entry.top for _, entry in scores):
        titles += "  likeliest"
    console.print(Text(titles, "quiet"))
    for token, entry in scores:
        line = Text(f"{_shown(token, text_of):<{_TEXT}} {entry.log_prob:>8.3f}")
        for other, log_prob in zip(entry.top, entry.top_log_probs, strict=True):
            style = "token.accepted" if other == token else "quiet"
            line.append(f"  {_shown(other, text_of)} {log_prob:.3f}", style)
        console.print(one_line_text(line), soft_wrap=True)


def _shown(token: int, text_of: Callable[[Sequence[int]], str]) -> str:
    return shown(inline(text_of([token])), _TEXT)
