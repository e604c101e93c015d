"""What is said about a draft model with another tokenizer: how much of the target's text it can draft, and whether it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.decoding.costs.speedup import SpeedupModel
    from specgen.engine.text.token_overlap import TokenOverlap

UNTRANSLATED = "sd with translation=text (drafts text), lookup or suffix (no draft model), a draft of the target's family"
_UNLESS = ", unless the draft was trained on the target's tokens"
ALTERNATIVES = f"{UNTRANSLATED}, or train this one: tune --train --methods sd"


def common_tokens(overlap: TokenOverlap) -> str:
    """Returns how many of the target's tokens the draft model has."""
    return f"{overlap.common:,} of the target's {overlap.vocabulary:,} tokens are the draft's, too"


def covered_share(overlap: TokenOverlap) -> str:
    """Returns which share of a text's tokens both tokenizers have in common, and how long drafts can be therefore."""
    if overlap.kappa is None:
        return "there is too little text to say how much of an output they cover (kappa)"
    text = "the target's output" if overlap.is_output else "example text"
    run = "" if overlap.expected_run is None else f", about {overlap.expected_run:.1f} in a row"
    return f"{overlap.kappa:.0%} of the tokens of {text} are one token in both (kappa){run}"


def best_speedup(overlap: TokenOverlap, model: SpeedupModel) -> tuple[bool, str] | None:
    """Returns whether drafts in common tokens are likely to pay, and the text that says so; None if kappa is not known.

    The text is about a draft model that splits text as it was trained to. One that `tune --train` taught the target's tokens may
    have more of its drafts accepted than kappa.
    """
    if overlap.kappa is None or not model.draft_lengths:
        return None
    length, speedup = model.best(overlap.kappa)
    if speedup > 1:
        return True, f"about {speedup:.2f}× at best, with drafts of {length}{_UNLESS}"
    return False, f"about {speedup:.2f}× at best, so drafts in common tokens are slower{_UNLESS}"


def advice(overlap: TokenOverlap, *, pays: bool = True) -> str | None:
    """Returns what to use instead, where drafts in common tokens are unlikely to pay or kappa is low; otherwise None."""
    return f"use {ALTERNATIVES}" if not pays or overlap.is_low else None


def notice(overlap: TokenOverlap) -> str:
    """Returns one line for a run that is about to begin."""
    line = f"note: the tokenizers differ: {common_tokens(overlap)}, and {covered_share(overlap)}"
    return f"{line}. Faster may be {ALTERNATIVES}" if overlap.is_low else line
