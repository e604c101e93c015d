"""Generated training documents: the same seed gives the same documents, and nothing is downloaded.

There are four domains, modelled on the data sets on which papers about speculative decoding evaluate:

    code   exercises (a function with its docstring), classes, and short functions of Python's standard library (HumanEval)
    math   word problems with worked answers, and sums (GSM8K)
    news   a short article and its one-sentence summary (XSum)
    chat   one to three turns of questions and answers (MT-Bench)

In all of them easy tokens (boilerplate, the rest of a phrase) alternate with hard ones (names, digits, facts): draft-length
policies have something to tell apart. All text was written for this project, except the standard library's functions (PSF
licence), which differ between Python versions.

One in 16 of the library's files, of the generated function names and of the word problems is held out from training
(held_out.py). News and chat have no held-out names: a seed that training does not use gives other documents.
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
"""The share of each domain: of the characters for the tokenizer, of the tokens for the models."""
DOMAINS = tuple(DOMAIN_SHARES)

_Encoded = TypeVar("_Encoded", bound=Sequence[object])
_LIBRARY_SHARE = 0.15  # of the code documents


def sample(size: int, seed: int, encode: Callable[[str], _Encoded]) -> Iterator[_Encoded]:
    """Encoded training documents, one domain after the other, until each domain has its share of `size` in total.

    A document's size is the length of what `encode` returns for it: its number of characters or of tokens.
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
    """Documents of one of DOMAINS, without end.

    With `held_out` they use only held-out library files, function names and word problems. Classic functions, classes and
    sheets of sums are never held out, so they also appear there.
    """
    rng = document_rng(domain, seed)
    while True:
        yield document(domain, rng, held_out=held_out)


def document_rng(domain: str, seed: int) -> random.Random:
    """The random generator for the documents of one domain."""
    return random.Random(f"{domain}-{seed}")


def document(domain: str, rng: random.Random, *, held_out: bool = False) -> str:
    """The next document of a domain; `held_out` as in documents()."""
    if domain == "news":
        return news_story(rng)
    if domain == "chat":
        return chat_turns(rng)
    if domain == "math":
        return math_problem(rng, held_out=held_out)
    return (library_function if rng.random() < _LIBRARY_SHARE else module)(rng, held_out=held_out)
