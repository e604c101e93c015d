"""Runs a model's chat template in a process of its own, because a template is a stranger's program that may never end or take all
memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 10.0  # a rendering takes a tenth of a second


class TemplateError(Exception):
    """The template refused its messages, or was cut off. The message says why."""


def rendered(template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]) -> str:
    """Returns what `chat_template.render` does for these arguments. Raises TemplateError if it raises an exception, and for a
    template that takes more than `SECONDS`, or more memory or text than `chat_template` allows."""
    program = Path(__file__).with_name("chat_template.py")
    request = json.dumps([template, messages, special_tokens], default=str)
    try:
        ended = subprocess.run(  # noqa: S603  this Python
            [sys.executable, "-P", str(program)],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateError(f"it takes more than {SECONDS:g} seconds") from error
    try:
        answer = json.loads(ended.stdout)
    except ValueError as error:
        raise TemplateError(f"its process ended with code {ended.returncode}") from error
    if "text" not in answer:
        raise TemplateError(answer["error"])
    text: str = answer["text"]
    return text
