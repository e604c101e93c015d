"""A short trial of a draft model that was found for a target: how much of what it drafts does the
target accept?

The trial counts tokens and reads no clock, so that the same models give the same choice on a busy
machine too: sampled text depends on what drafts. It takes about a tenth of an answer's time, and
its result is stored (`Pair.learn`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from specgen.base.types import SamplingParams
from specgen.pair.figures import Figures
from specgen.pair.finding import Found
from specgen.pair.pair import Pair

# of drafts after each text, and their tokens
ROUNDS = 3
LENGTH = 3
TEXTS = "The history of the city", "def fibonacci(n):"


def tried(pair: Pair, found: Found) -> Found:
    """Returns `found`, which is the pair's draft model, with the `acceptance` that a few rounds
    show.

    Loads the target and the draft model. Raises whatever running them raises.
    """
    sampling = SamplingParams(max_new_tokens=ROUNDS * (LENGTH + 1), ignore_eos=True)
    counts = Figures("sd")
    for text in TEXTS:
        # the first one is the prompt's
        for round_ in islice(pair.rounds(text, "sd", sampling, k=LENGTH), 1 + ROUNDS):
            counts.add(round_)
    pair.forget()

    judged = counts.accepted + counts.rejections
    # Laplace's estimate: so few tokens were judged
    acceptance = (counts.accepted + 1) / (judged + 2)
    why = f"{found.why}, {counts.accepted} of {judged} tokens accepted in a short trial"
    return replace(found, acceptance=acceptance, why=why, is_assumed=False)
