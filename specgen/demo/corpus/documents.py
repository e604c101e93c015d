"""Text for the demo pair, made on the spot: no download, and the same documents for the same seed.

Four domains, the ones that speculative-decoding papers evaluate on:

    code   function exercises, and short functions of the standard library (PSF licence), as HumanEval is code
    math   word problems with worked answers, as GSM8K
    news   a short article and its one-sentence summary, as XSum
    chat   one to three turns of questions and answers, as MT-Bench

Easy tokens (boilerplate, a phrase begun) and hard ones (a name, a digit, a fact) alternate, which is what a
draft-length policy has to tell apart. Everything but the library's functions is this project's own text and depends on
the seed alone; another version of Python has other library functions.

Held out are a sixteenth of the library's files, of the names of exercises and of word problems (apart.py), for good; news and
chat are kept apart by a seed of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from specgen.demo.corpus.conversations import chat_turns
from specgen.demo.corpus.exercises import module
from specgen.demo.corpus.problems import math_problem
from specgen.demo.corpus.standard_library import library_function
from specgen.demo.corpus.stories import news_story

MIX = {"code": 0.30, "math": 0.30, "news": 0.25, "chat": 0.15}
"""The share of each domain, in the tokenizer's characters and in the models' tokens alike."""
DOMAINS = tuple(MIX)
LIBRARY = 0.15
"""The share of code documents that come from the standard library."""

_TEMPLATES: dict[str, Callable[[random.Random], str]] = {"news": news_story, "chat": chat_turns}


def documents(domain: str, seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Endless documents of one domain of DOMAINS; with `held_out` of what is kept apart from training, as far as
    that is kept apart: classics, sheets of sums and chat are not."""
    rng = source(domain, seed)
    while True:
        yield document(domain, rng, held_out=held_out)


def source(domain: str, seed: int) -> random.Random:
    """What decides the documents of a domain."""
    return random.Random(f"{domain}-{seed}")


def document(domain: str, rng: random.Random, *, held_out: bool = False) -> str:
    """The next document of a domain."""
    if domain == "math":
        return math_problem(rng, held_out=held_out)
    if domain != "code":
        return _TEMPLATES[domain](rng)
    return (library_function if rng.random() < LIBRARY else module)(rng, held_out=held_out)
