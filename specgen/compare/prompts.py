"""Reads the prompts of a comparison from a file: YAML as in `examples.yaml`, JSON lines with the
key `prompt`, or Spec-Bench's `question.jsonl` with the key `turns`. Any mistake in the file raises
a SpecgenError with a one-line message."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, zip_longest
from pathlib import Path

from specgen.base import schema
from specgen.base.errors import SpecgenError, nearest
from specgen.base.files import examples_file

LARGEST_JSONL = 256 << 20  # bytes; SPEED-Bench's throughput_32k has 110 MB
LARGEST_YAML = 4 << 20  # bytes; YAML is parsed much more slowly
UNCATEGORISED = "other"
# in SPEED-Bench's published files, for texts whose licence asks for a download from the source
_PLACEHOLDERS = ("FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE", "{article}")


@dataclass(frozen=True, slots=True)
class ListedPrompt:
    """A prompt of a file, or one turn of a question with several turns.

    `index` is its number in the whole file, from 0, each turn counted. `previous_turns` are the
    user's texts in the earlier turns of the question. `for_tuning`: it is for `specgen tune`, so
    that comparisons leave it out.
    """

    index: int
    text: str
    category: str = UNCATEGORISED
    name: str = ""
    previous_turns: tuple[str, ...] = ()
    for_tuning: bool = False

    @property
    def fingerprint(self) -> str:
        """A hash of the prompt's text and of the turns before it."""
        return blake2b(
            "\0".join((*self.previous_turns, self.text)).encode(), digest_size=8
        ).hexdigest()

    @property
    def label(self) -> str:
        """What messages call the prompt: its index and, if it has one, its name."""
        return f"prompt {self.index}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a file. Other keys are ignored."""

    prompt: str | None = None
    turns: list[str] | None = None
    category: str | int | None = None
    id: str | int | None = None
    question_id: str | int | None = None
    tuning: bool | None = None


def load_prompts(
    path: Path | None,
    *,
    category: str | None = None,
    limit: int | None = None,
    all_turns: bool = False,
    for_tuning: bool | None = False,
) -> list[ListedPrompt]:
    """Returns the prompts in the file `path` (None: `examples.yaml`).

    `category` keeps only its questions, `limit` at most so many, picked from the categories in
    turn. With `all_turns` each turn of a question becomes a prompt, otherwise only the first turn.
    Questions with `tuning: true` are for `specgen tune`, the others for comparisons: returns the
    former if `for_tuning` and there are any, otherwise the latter; all of them if `for_tuning` is
    None. Raises SpecgenError if no prompt is left, and for a mistake in the file, which the message
    names with its position.
    """
    path = examples_file() if path is None else path
    questions = list(_questions(path))
    if not questions:
        raise SpecgenError(
            f"{path} holds no prompts", f"Write some: the top of {examples_file()} shows how"
        )
    if category is not None:
        categories = list(dict.fromkeys(turns[0].category for turns in questions))
        if category not in categories:
            raise SpecgenError(
                f"{path} has no category {category!r}{nearest(category, categories)}",
                f"It has {', '.join(categories[:20])}",
            )
        questions = [turns for turns in questions if turns[0].category == category]
    own = [turns for turns in questions if for_tuning in (None, turns[0].for_tuning)]
    if not own and not for_tuning:
        chosen = str(path) if category is None else f"{path}, category {category!r},"
        raise SpecgenError(
            f"{chosen} has only prompts for tuning", "Write some without `tuning: true`"
        )
    prompts = list[ListedPrompt]()
    for turns in own or questions:
        prompts += turns if all_turns else turns[:1]
    return prompts if limit is None else picked(prompts, limit)


def _forms() -> str:
    """Returns a hint: how to write prompts."""
    return f'Write {{"prompt": "…"}} on each line or, in YAML, prompt: … as {examples_file()} does'


def picked(prompts: Sequence[ListedPrompt], limit: int) -> list[ListedPrompt]:
    """Picks the prompts of `limit` questions: the first of each category, then the second of each,
    and so on. Returns them in the file's order."""
    by_category: dict[str, list[list[ListedPrompt]]] = defaultdict(list)
    for prompt in prompts:
        questions = by_category[prompt.category]
        if prompt.previous_turns and questions:
            questions[-1].append(prompt)
        else:
            questions.append([prompt])
    taken = [
        turns
        for turns in chain.from_iterable(zip_longest(*by_category.values()))
        if turns is not None
    ]
    return sorted(chain.from_iterable(taken[:limit]), key=lambda prompt: prompt.index)


def _questions(path: Path) -> Iterator[list[ListedPrompt]]:
    """Yields each question in the file as the list of its turns."""
    first = 0
    for where, entry in _entries(path):
        question = schema.check(entry, _Entry, where, _forms())
        texts = tuple(question.turns or []) if question.prompt is None else (question.prompt,)
        if not texts:
            raise SpecgenError(f"{where} has neither `prompt` nor `turns`", _forms())
        if not all(text.strip() for text in texts):
            raise SpecgenError(
                f"{where}: the prompt is empty", "Write a prompt that the model can continue"
            )
        if any(placeholder in text for text in texts[:1] for placeholder in _PLACEHOLDERS):
            hint = (
                "Fill the file with NVIDIA's prepare_data.py (Model-Optimizer, "
                "examples/specdec_bench)"
            )
            raise SpecgenError(f"{where}: the prompt is a placeholder of SPEED-Bench", hint)
        category = UNCATEGORISED if question.category in (None, "") else str(question.category)
        number = question.question_id if question.id is None else question.id
        name = "" if number is None else str(number)
        for_tuning = bool(question.tuning)
        yield [
            ListedPrompt(first + turn, text, category, name, texts[:turn], for_tuning)
            for turn, text in enumerate(texts)
        ]
        first += len(texts)


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yields for each entry of the file its position, such as `FILE, line 3` or `FILE, prompt 3`,
    and the entry as JSON, unchecked."""
    is_lines = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    text = schema.read_text(
        path, "prompts", "Name a YAML or JSONL file", LARGEST_JSONL if is_lines else LARGEST_YAML
    )
    if not text.strip():
        raise SpecgenError(f"{path} is empty", _forms())
    if is_lines or (path.suffix.lower() not in (".yaml", ".yml") and text.lstrip()[:1] == "{"):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}, line {number}", line
        return
    document = schema.parse_yaml(text, str(path), _forms())
    entries = document.get("prompts") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise SpecgenError(
            f"{path} holds no list of prompts",
            f"Write a list under `prompts:`, as {examples_file()} does",
        )
    for number, entry in enumerate(entries, start=1):
        question = {"prompt": entry} if isinstance(entry, str) else entry
        yield f"{path}, prompt {number}", json.dumps(question, default=str)
