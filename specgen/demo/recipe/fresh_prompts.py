"""Prompts to evaluate demo models, with a check whether a model's answer is right.

Prompts for code and math use function names, library files and word problems that are held out from training. News prompts come
from a seed that training does not use. Chat prompts ask for facts that occur in training: they test whether the model knows them.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specgen.demo.corpus.conversations import fact_turn
from specgen.demo.corpus.exercises import composed_function
from specgen.demo.corpus.problems import word_problem
from specgen.demo.corpus.standard_library import library_function, parse
from specgen.demo.corpus.stories import news_story

SEED = 2_000_000  # far from the seeds of training, and of `specgen tune --train --corpus demo`
_ONE_IN_CODE = 5  # one in five prompts is code
_MAX_TRIES = 1000
_ANSWER_STARTS = {"math": "\nAnswer:", "news": "\nSummary:", "chat": "\nAssistant:"}
_GENERATORS: dict[str, Callable[[random.Random], str]] = {
    "math": partial(word_problem, held_out=True),
    "news": news_story,
    "chat": fact_turn,
}
_NAMES_AND_NUMBERS = re.compile(r"[A-Z][a-z]+|\d+")


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """A prompt to evaluate a model with.

    `category` is code, math, news or chat. `prompt` is the first part of a document of the generated corpus, for example a
    question. `answer` is the rest of this document: the correct answer.
    """

    category: str
    prompt: str
    answer: str

    def copied_all(self, text: str) -> bool | None:
        """Whether `text`, a model's answer, contains all names and numbers that are both in the prompt and in the correct answer.

        None if there are no such names and numbers.
        """
        copied = set(_NAMES_AND_NUMBERS.findall(self.answer)) & set(_NAMES_AND_NUMBERS.findall(self.prompt))
        return copied <= set(_NAMES_AND_NUMBERS.findall(text)) if copied else None

    def is_right(self, text: str) -> bool:
        """Whether `text`, a model's answer, is right.

        Math: the final number is correct. News and chat: the text equals the correct answer. Code: the completed function parses.
        """
        if self.category == "code":
            return starts_with_function(self.prompt + text)
        if self.category == "math":
            return final_answer(text) == final_answer(self.answer)
        return text.strip() == self.answer.strip()


def fresh_prompts(count: int, seed: int = 0) -> list[FreshPrompt]:
    """Returns `count` different prompts: one in five is code, the rest is math, news and chat in equal parts.

    A code prompt is the signature and docstring of a generated function or, every second time, of a library function.
    A prompt is repeated only if 1000 tries give no new one.
    """
    code_prompts = max(1, count // _ONE_IN_CODE)
    prompts: dict[str, list[FreshPrompt]] = {"code": []}
    for number in range(code_prompts):
        rng = random.Random(f"head {SEED + seed} {number}")
        prompts["code"].append(_new_prompt(prompts["code"], partial(_function_head, rng, library=number % 2 == 1)))
    for index, category in enumerate(_GENERATORS):
        rng, prompts[category] = random.Random(f"fresh {category} {SEED + seed}"), []
        for _ in range((count - code_prompts + index) // len(_GENERATORS)):
            prompts[category].append(_new_prompt(prompts[category], partial(_question, category, rng)))
    return [prompt for group in prompts.values() for prompt in group]


def _new_prompt(known: Sequence[FreshPrompt], generate: Callable[[], FreshPrompt]) -> FreshPrompt:
    """Generates prompts until one is not in `known`, and returns it. After _MAX_TRIES tries it returns a prompt from `known`."""
    known_texts = {one.prompt for one in known}
    for _ in range(_MAX_TRIES):
        prompt = generate()
        if prompt.prompt not in known_texts:
            break
    return prompt


def _question(category: str, rng: random.Random) -> FreshPrompt:
    question, answer_start, answer = _GENERATORS[category](rng).partition(_ANSWER_STARTS[category])
    return FreshPrompt(category, question + answer_start, answer)


def _function_head(rng: random.Random, *, library: bool) -> FreshPrompt:
    """Returns a prompt that is the signature and docstring of a function; the function's body is the correct answer.

    The function is one from a standard-library file if `library` is True, otherwise a generated one.
    """
    while True:
        text = (library_function if library else composed_function)(rng, held_out=True)
        node = ast.parse(text).body[0]
        assert isinstance(node, ast.FunctionDef)
        has_docstring = ast.get_docstring(node) is not None
        if len(node.body) > has_docstring:
            head_end = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
            lines = text.split("\n")
            return FreshPrompt("code", "\n".join(lines[:head_end]), "\n" + "\n".join(lines[head_end:]))


def final_answer(text: str) -> str | None:
    """Returns the number in the phrase `The answer is <number>.`, or None if the text does not have this phrase."""
    match = re.search(r"The answer is (\d+)\.", text)
    return match[1] if match else None


def starts_with_function(text: str) -> bool:
    """Whether `text` starts with a function that parses and has a body besides its docstring. Text after it is ignored."""
    lines = text.split("\n")
    end = next((index for index, line in enumerate(lines) if index and line.strip() and not line.startswith((" ", ")"))), None)
    module = parse("\n".join(lines[:end]))
    if module is None:
        return False
    node = module.body[0]
    return isinstance(node, ast.FunctionDef) and len(node.body) > (ast.get_docstring(node) is not None)
