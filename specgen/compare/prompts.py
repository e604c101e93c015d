"""Reads the prompts of a comparison from a file. Any mistake in the file raises a SpecgenError with a one-line message.

A file has one of three forms: YAML as in `examples.yaml`, JSON lines with the key `prompt`, or Spec-Bench's `question.jsonl` with
the key `turns`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError, nearest
from specgen.base.files import examples_file, load_yaml

LARGEST_JSONL = 64 << 20  # bytes
LARGEST_YAML = 4 << 20  # bytes; YAML is parsed much more slowly
UNCATEGORISED = "other"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, or one turn of a question with several turns. `index` is the turn's number in the whole file, from 0.
    `previous_turns` are the user's texts in the earlier turns of the same question. `for_tuning`: the file gives the prompt to
    `specgen tune`, so that comparisons leave it out."""

    index: int
    text: str
    category: str = UNCATEGORISED
    name: str = ""
    previous_turns: tuple[str, ...] = ()
    for_tuning: bool = False

    @property
    def fingerprint(self) -> str:
        """A hash of the prompt's text and of the turns before it."""
        return blake2b("\0".join((*self.previous_turns, self.text)).encode(), digest_size=8).hexdigest()

    @property
    def label(self) -> str:
        """What messages call the prompt: its index and, if it has one, its name."""
        return f"prompt {self.index}" + (f" ({self.name})" if self.name else "")


def load_prompts(
    path: Path | None,
    *,
    category: str | None = None,
    limit: int | None = None,
    all_turns: bool = False,
    for_tuning: bool = False,
) -> list[Prompt]:
    """Returns the prompts in the file `path` (None: `examples.yaml`), only those of `category` if it is not None. `limit` keeps
    at most so many questions, picked from the categories in turn.

    With `all_turns` each turn of a question becomes a prompt, otherwise only the first turn. Questions with `tuning: true` are
    for `specgen tune`, the others for comparisons: returns the former if `for_tuning` and there are any, otherwise the latter.
    Raises SpecgenError, for a mistake in the file with the file's name and the position.
    """
    if limit is not None and limit < 1:
        raise SpecgenError(f"--limit is {limit}", "It has to be a whole number of at least 1")
    path = examples_file() if path is None else path
    questions = list(_questions(path))
    if not questions:
        raise SpecgenError(f"{path} holds no prompts", "Write some: the top of examples.yaml shows how")
    if category is not None:
        known = list(dict.fromkeys(turns[0].category for turns in questions))
        if category not in known:
            raise SpecgenError(
                f"{path} has no category {category!r}{nearest(category, known)}", f"It has {', '.join(known[:20])}"
            )
        questions = [turns for turns in questions if turns[0].category == category]
    own = [turns for turns in questions if turns[0].for_tuning == for_tuning]
    if not own and not for_tuning:
        chosen = str(path) if category is None else f"{path}, category {category!r},"
        raise SpecgenError(f"{chosen} has only prompts for tuning", "Write some without `tuning: true`")
    questions = own or questions
    kept = questions if limit is None else _in_turn(questions, limit)
    return [prompt for turns in kept for prompt in (turns if all_turns else turns[:1])]


def _in_turn(questions: Sequence[Sequence[Prompt]], limit: int) -> list[Sequence[Prompt]]:
    """Picks `limit` questions, each a list of turns: the first question of each category, then the second of each category, and
    so on. Returns them in the file's order."""
    by_category: dict[str, list[Sequence[Prompt]]] = defaultdict(list)
    for turns in questions:
        by_category[turns[0].category].append(turns)
    taken = [turns for turns in chain.from_iterable(zip_longest(*by_category.values())) if turns is not None]
    return sorted(taken[:limit], key=lambda turns: turns[0].index)


def _questions(path: Path) -> Iterator[list[Prompt]]:
    """Yields each question in the file as the list of its turns."""
    first = 0
    for position, entry in _entries(path):
        where = f"{path}, {position}"
        texts = _turns(entry, where)
        category = _word(entry, "category", where) or UNCATEGORISED
        name = _word(entry, "id", where) or _word(entry, "question_id", where)
        for_tuning = entry.get("tuning") or False
        if not isinstance(for_tuning, bool):
            raise SpecgenError(f"{where}: `tuning` is {_shown(for_tuning)}", "It has to be true or false")
        yield [Prompt(first + turn, text, category, name, texts[:turn], for_tuning) for turn, text in enumerate(texts)]
        first += len(texts)


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each prompt of the file unchecked, as a mapping, after its position in words (`line 3` or `prompt 3`) for error
    messages."""
    suffix = path.suffix.lower()
    text = _read(path, LARGEST_YAML if suffix in (".yaml", ".yml") else LARGEST_JSONL)
    is_lines = suffix in (".jsonl", ".json", ".ndjson") or (suffix not in (".yaml", ".yml") and text.lstrip()[:1] == "{")
    if not is_lines and len(text) > LARGEST_YAML:
        raise _too_large(path, LARGEST_YAML)
    for position, entry in _json_lines(path, text) if is_lines else _yaml_entries(path, text):
        if not isinstance(entry, dict):
            raise SpecgenError(
                f"{path}, {position}: {_shown(entry)} is not a prompt", 'Write {"prompt": "…"} or, in YAML, prompt: …'
            )
        yield position, entry


def _read(path: Path, largest: int) -> str:
    try:
        if path.is_dir():
            raise SpecgenError(f"cannot read the prompts {path}: it is a folder", "Name a file in it")
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except (OSError, ValueError) as error:  # open raises ValueError for a name that contains NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecgenError(f"cannot read the prompts {path}: {reason}", "Name a YAML or JSONL file") from error
    if len(data) > largest:
        raise _too_large(path, largest)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecgenError(
            f"the prompts {path} are not UTF-8 (at byte {error.start:,})", "Convert the file first, for instance with iconv"
        ) from error


def _too_large(path: Path, largest: int) -> SpecgenError:
    return SpecgenError(f"the prompts {path} are larger than {largest >> 20} MB", "Name a smaller file: a part of it will do")


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # raised also for very long numbers and for deep nesting
            problem = "cannot be read as JSON"
            if isinstance(error, json.JSONDecodeError):
                problem = f"is not JSON: {error.msg} at column {error.colno}"
            raise SpecgenError(f"{path}, line {number} {problem}", "Write one JSON object a line") from error
        yield f"line {number}", entry


def _yaml_entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    import yaml

    try:
        document = load_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecgenError(f"{path}{where} is not YAML: {problem}", "examples.yaml shows the form") from error
    except (ValueError, RecursionError) as error:  # for instance for a date that does not exist
        raise SpecgenError(f"{path} cannot be read as YAML: {error}", "examples.yaml shows the form") from error
    entries = document.get("prompts") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        found = "no list of prompts" if document is None or entries is None else f"{_shown(entries)} where prompts should be"
        raise SpecgenError(f"{path} holds {found}", "Write a list under `prompts:`, as examples.yaml does")
    for number, entry in enumerate(entries, start=1):
        yield f"prompt {number}", {"prompt": entry} if isinstance(entry, str) else entry


def _turns(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if "prompt" not in entry and "turns" not in entry:
        raise SpecgenError(f"{where} has neither `prompt` nor `turns`", "Give it a prompt")
    key = "prompt" if "prompt" in entry else "turns"
    turns = [entry[key]] if key == "prompt" else entry[key]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        wanted = "text" if key == "prompt" else "a list of texts"
        raise SpecgenError(f"{where}: `{key}` is {_shown(entry[key])}", f"It has to be {wanted}")
    for turn in turns:
        if not turn.strip():
            raise SpecgenError(f"{where}: the prompt is empty", "Write a prompt that the model can continue")
        if any("\ud800" <= character <= "\udfff" for character in turn):
            raise SpecgenError(f"{where}: the prompt holds half of a surrogate pair", "Write the character itself")
    return tuple(turns)


def _word(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise SpecgenError(f"{where}: `{key}` is {_shown(value)}", "It has to be a word")
    return str(value)


def _shown(value: object) -> str:
    """A short text for any value, to be quoted in an error message."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value):,}"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
