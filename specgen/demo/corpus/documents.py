"""Generated training documents: the same seed gives the same documents, and nothing is downloaded.

There are four domains, modelled on the data sets on which papers about speculative decoding evaluate:

    code   exercises (a function with its docstring), classes, and short functions of Python's standard library (HumanEval)
    math   word problems with worked answers, and sums (GSM8K)
    news   a short article and its one-sentence summary (XSum)
    chat   one to three turns of questions and answers (MT-Bench)

In all of them tokens that are easy to predict (boilerplate, the rest of a phrase) alternate with hard ones (names, digits,
facts), so that a policy that adapts the draft length can be better than a fixed length. All text was written for this project,
except the functions of the standard library (PSF licence), which differ between Python versions.

About one in 16 library files, generated function names and word problems is held out: never used in training (held_out.py). In
news and chat nothing is held out, but a seed that training does not use gives other documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from specgen.demo.corpus.conversations import chat_turns
from specgen.demo.corpus.exercises import module
from specgen.demo.corpus.problems import math_problem
from specgen.demo.corpus.standard_library import library_function
from specgen.demo.corpus.stories import news_story

DOMAIN_SHARES = {"code": 0.30, "math": 0.30, "news": 0.25, "chat": 0.15}
"""Each domain's share of the training text, in characters to train the tokenizer and in tokens to train the models."""
DOMAINS = tuple(DOMAIN_SHARES)

_Encoded = TypeVar("_Encoded", bound=Sequence[object])
_LIBRARY_SHARE = 0.15  # of the code documents


def sample(size: int, seed: int, encode: Callable[[str], _Encoded]) -> Iterator[_Encoded]:
    """Yields encoded training documents of about `size` in total, one domain after the other, by DOMAIN_SHARES.

    The size of a document is the length of what `encode` returns for its text: for example its number of tokens.
    """
    for domain, share in DOMAIN_SHARES.items():
        left = int(size * share)
        for text in documents(domain, seed):
            encoded = encode(text)
            left -= len(encoded)
            yield encoded
            if left <= 0:
                break


def documents(domain: str, seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Yields documents of one of DOMAINS without end.

    With `held_out` the documents use only held-out library files, function names and word problems. Classic functions, classes
    and sheets of sums are never held out, so they also appear there.
    """
    rng = document_rng(domain, seed)
    while True:
        yield document(domain, rng, held_out=held_out)


def document_rng(domain: str, seed: int) -> random.Random:
    """Returns the random generator that decides the documents of one domain for a seed."""
    return random.Random(f"{domain}-{seed}")


def document(domain: str, rng: random.Random, *, held_out: bool = False) -> str:
    """Returns a random document of a domain; `held_out` as in documents()."""
    if domain == "news":
        return news_story(rng)
    if domain == "chat":
        return chat_turns(rng)
    if domain == "math":
        return math_problem(rng, held_out=held_out)
    return (library_function if rng.random() < _LIBRARY_SHARE else module)(rng, held_out=held_out)
