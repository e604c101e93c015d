"""Fresh prompts for the demo pair, with what a right answer is: exercises, library files and word problems that training never
draws (apart.py), and news from a seed that it never has. The questions in chat are about facts that it was told, in all their
forms: what is asked there is whether they are known."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specgen.demo.corpus.conversations import fact_turn
from specgen.demo.corpus.exercises import composed
from specgen.demo.corpus.problems import word_problem
from specgen.demo.corpus.standard_library import library_function, parses
from specgen.demo.corpus.stories import news_story

SEED = 2_000_000  # far from the seeds of the models' training, and of what is trained behind them
_CODE = 5  # of so many prompts one is the head of a function
_TRIES = 1000
_MARKS = {"math": "\nAnswer:", "news": "\nSummary:", "chat": "\nAssistant:"}
_SOURCES: dict[str, Callable[[random.Random], str]] = {
    "math": partial(word_problem, held_out=True),
    "news": news_story,
    "chat": fact_turn,
}
_COPIED = re.compile(r"[A-Z][a-z]+|\d+")


@dataclass(frozen=True, slots=True)
class Fresh:
    """A prompt and what the corpus would say to it."""

    category: str
    prompt: str
    answer: str

    def copies(self, text: str) -> bool | None:
        """Whether the names and numbers that the answer takes from the prompt are all in `text`; None where it takes none."""
        taken = set(_COPIED.findall(self.answer)) & set(_COPIED.findall(self.prompt))
        return taken <= set(_COPIED.findall(text)) if taken else None

    def is_right(self, text: str) -> bool:
        """Math: the final answer. News and chat: every word. Code: whether the function parses, once it is ended."""
        if self.category == "code":
            return is_function(self.prompt + text)
        if self.category == "math":
            return final_answer(text) == final_answer(self.answer)
        return text.strip() == self.answer.strip()


def fresh_prompts(count: int, seed: int = 0) -> list[Fresh]:
    """A fifth of them heads of functions (half exercises, no classics; half the library's), the others math, news and chat. None
    comes twice, unless there are no more."""
    heads = max(1, count // _CODE)
    found: dict[str, list[Fresh]] = {"code": []}
    for number in range(heads):
        rng = random.Random(f"head {SEED + seed} {number}")
        found["code"].append(_another(found["code"], partial(_head, rng, library=number % 2 == 1)))
    for place, category in enumerate(_SOURCES):
        rng, found[category] = random.Random(f"fresh {category} {SEED + seed}"), []
        for _ in range((count - heads + place) // len(_SOURCES)):
            found[category].append(_another(found[category], partial(_question, category, rng)))
    return [one for some in found.values() for one in some]


def _another(known: Sequence[Fresh], draw: Callable[[], Fresh]) -> Fresh:
    """One that is not known, as far as some tries go."""
    prompts = {one.prompt for one in known}
    tried = [draw()]
    while tried[-1].prompt in prompts and len(tried) < _TRIES:
        tried.append(draw())
    return tried[-1]


def _question(category: str, rng: random.Random) -> Fresh:
    prompt, mark, answer = _SOURCES[category](rng).partition(_MARKS[category])
    return Fresh(category, prompt + mark, answer)


def final_answer(text: str) -> str | None:
    """The number behind `The answer is`."""
    match = re.search(r"The answer is (\d+)\.", text)
    return match[1] if match else None


def is_function(text: str) -> bool:
    """Whether `text` begins with a function that parses and does something. What stands behind the function has no say."""
    lines = text.split("\n")
    end = next((place for place, line in enumerate(lines) if place and line.strip() and not line.startswith((" ", ")"))), None)
    source = "\n".join(lines[:end])
    if not parses(source):
        return False
    node = ast.parse(source).body[0]
    return isinstance(node, ast.FunctionDef) and len(node.body) > (ast.get_docstring(node) is not None)


def _head(rng: random.Random, *, library: bool) -> Fresh:
    """A function, cut behind its docstring, or behind its signature where it has none."""
    while True:
        text = (library_function if library else composed)(rng, held_out=True)
        node = ast.parse(text).body[0]
        assert isinstance(node, ast.FunctionDef)
        documented = ast.get_docstring(node) is not None
        if len(node.body) > documented:
            last = node.body[0].end_lineno if documented else node.body[0].lineno - 1
            lines = text.split("\n")
            return Fresh("code", "\n".join(lines[:last]), "\n" + "\n".join(lines[last:]))
