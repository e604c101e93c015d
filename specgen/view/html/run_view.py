"""One recorded generation on an HTML page, for the macros of `templates/run.html.j2`.

It consists of the main numbers (tokens, speed, acceptance), the text as tokens with tooltips, and the list of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from specgen.base.text import inline
from specgen.base.types import TokenStatus
from specgen.pair.figures import Summary
from specgen.traces.reader import TracedRound, TracedRun
from specgen.view.generation import MODES, parts, reason
from specgen.view.html.charts import time_bar
from specgen.view.theme import counted
from specgen.view.trace_report import main_figures

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a token shows that holds only some bytes of a character
_EOS = "⟨eos⟩"
_CLASSES = {"accepted": "acc", "rejected": "rej", "discarded": "dis"}


def run_view(run: TracedRun, summary: Summary, name: str) -> dict[str, Any]:
    """Returns a recorded generation as values for the macros of `run.html.j2`.

    `summary` has its totals. `name` is the HTML id, unique on the page, of the checkbox that shows rejected and discarded tokens.
    """
    return {
        "name": name,
        "facts": main_figures(summary),
        "time_bar": time_bar(summary.phase_seconds),
        "has_drafts": any(traced.round.draft.tokens for traced in run.rounds),
        "tokens": _tokens(run),
        "rounds": _rounds(run),
        "round_count": counted(len(run.rounds), "round"),
    }


def committed_texts(run: TracedRun) -> list[str]:
    """Returns the text of each committed token (a token of the answer: accepted, or chosen by the target).

    Where several tokens make up one character, the last of these tokens has the character and the ones before it are empty.
    """
    texts: list[str] = []
    for traced in run.rounds:
        texts += [traced.draft_texts[node] for node in traced.round.verdict.path]
        texts += [traced.token_text or ""] if traced.round.verdict.token is not None else []
    whole = run.summary["text"] if run.summary is not None else ""
    if whole and any(_REPLACEMENT in text for text in texts):
        _restore_characters(texts, whole)
    return texts


def _restore_characters(texts: list[str], whole: str) -> None:
    """Replaces, in `texts`, tokens that hold only some bytes of a character by that character, taken from the full text `whole`.

    Tokens whose place in `whole` cannot be found stay as they are.
    """
    start = position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and _REPLACEMENT in texts[end]:
            end += 1
        if end == position:
            text = texts[position]
            if not start and not whole.startswith(" "):  # a tokenizer may drop the first token's space
                text = text.removeprefix(" ")
            start += len(text) if whole.startswith(text, start) else 0
            position += 1
            continue
        found = len(whole) if end == len(texts) else whole.find(texts[end], start + 1)
        if start < found <= start + 2 * (end - position):
            texts[position:end] = [*[""] * (end - 1 - position), whole[start:found]]
            start = found
        position = end


def _tokens(run: TracedRun) -> Iterator[tuple[str, str, str]]:
    """Yields (CSS classes, text, tooltip) of each token, round by round.

    Within a round the accepted tokens come first, then the rejected and discarded tokens, then the token that the target chose.
    Of a draft that is a tree, discarded tokens are left out.
    """
    texts = iter(committed_texts(run))
    for traced in run.rounds:
        verdict, statuses = traced.round.verdict, traced.round.statuses
        is_end = run.finish_reason == "eos" and traced is run.rounds[-1]
        for node in verdict.path:
            text = next(texts)
            is_eos = is_end and verdict.token is None and node == verdict.path[-1]
            yield "acc eos" if is_eos else "acc", _EOS if is_eos else text, _drafted_details(traced, node, statuses[node])
        is_chain = isinstance(traced.round.draft.parents, range)
        for node, status in enumerate(statuses):
            if status is TokenStatus.REJECTED or (status is TokenStatus.DISCARDED and is_chain):
                text = inline(traced.draft_texts[node])
                yield f"gone {_CLASSES[status.value]}", text, _drafted_details(traced, node, status)
        if verdict.token is not None:
            text = next(texts)
            yield "own eos" if is_end else "own", _EOS if is_end else text, _target_details(traced, text)


def _drafted_details(traced: TracedRound, node: int, status: TokenStatus) -> str:
    draft = traced.round.draft
    signals = (
        ("entropy", draft.entropies, ".2f"),
        ("top probability", draft.top_probs, ".0%"),
        ("overlap", traced.overlap, ".2f"),
        ("divergence", traced.kl, ".2f"),
    )
    figures = ", ".join(
        f"{name} {values[node]:{form}}" for name, values, form in signals if values and not math.isnan(values[node])
    )
    return (
        f"“{inline(traced.draft_texts[node])}”, id {draft.tokens[node]}: drafted, {status.value}. "
        f"Round {traced.round.index}, {node + 1} of {len(draft.tokens)}."
        + (f" {figures[0].upper()}{figures[1:]}." if figures else "")
    )


def _target_details(traced: TracedRound, text: str) -> str:
    """Returns the tooltip of the token that the target chose itself in a round."""
    round_, what = traced.round, "chosen by the target"
    statuses = zip(traced.draft_texts, round_.statuses, strict=True)
    rejected = [f"“{inline(draft)}”" for draft, status in statuses if status is TokenStatus.REJECTED]
    if round_.verdict.source == "bonus":
        what = "bonus token after a completely accepted draft"
    elif round_.mode == "prefill":
        what = "chosen by the target after the prompt"
    elif rejected:
        what = f"correction of the draft's {' or '.join(rejected[:4])}"
    return f"“{inline(text)}”, id {round_.verdict.token}: {what}. Round {round_.index}."


def _rounds(run: TracedRun) -> Iterator[dict[str, Any]]:
    """Yields the values of one line per round, with the same content as the lines of `--rounds` in the terminal."""
    texts = run.texts()

    def text_of(ids: Sequence[int]) -> str:
        return inline("".join(texts[token] for token in ids))

    for traced in run.rounds:
        round_, drafted = traced.round, len(traced.round.draft.tokens)
        mode = f"{MODES[round_.mode]}, " if round_.mode in MODES else ""  # PEARL's
        yield {
            "index": round_.index,
            "kept": f"{len(round_.verdict.path)}/{drafted}" if drafted else "",
            "pieces": [(_CLASSES.get(part.kind, part.kind), part.text) for part in parts(round_, text_of)],
            "reason": mode + reason(round_, len(run.start["prompt_ids"])),
        }
