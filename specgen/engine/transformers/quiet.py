"""Calls of transformers without its warnings, and with its errors as messages of one line."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from textwrap import shorten

from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging as transformers_logging

from specgen.base.errors import SpecgenError, is_out_of_memory

# transformers imports what it finds of these packages; some warn when they are imported, some at
# every forward pass
_TALKATIVE = (
    "auto_round",
    "bitsandbytes",
    "compressed_tensors",
    "gptqmodel",
    "hqq",
    "optimum",
    "torchao",
    "torch.utils._pytree",
)
for _package in _TALKATIVE:
    logging.getLogger(_package).setLevel(logging.ERROR)
_PYTHON_NAMES = re.compile(r"\b[A-Z]\w*Error: |<class '(?P<type>[\w.]+)'>")  # in texts of errors
_KNOWN = {  # parts of transformers' messages: what to say after the model's name, and the hint
    "trust_remote_code": (
        "contains Python code",
        "If you trust its authors with your machine, add --trust-remote-code",
    ),
    "Unrecognized configuration class": (
        "is no causal language model",
        "Take a decoder-only language model",
    ),
    "does not recognize this architecture": (
        "has a model_type that transformers does not know",
        "Install a newer transformers",
    ),
}


@contextmanager
def reading(part: str, name: str) -> Iterator[None]:
    """Turns exceptions that transformers raises in the `with` block into a SpecgenError with a
    message of one line.

    Errors for lack of memory are passed on as they are. `part` says in the message what is read
    (such as "weights"), `name` of which model.
    """
    try:
        with quiet_transformers():
            yield
    except Exception as error:
        if isinstance(error, SpecgenError) or is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        for known, (problem, hint) in _KNOWN.items():
            if known in text:
                raise SpecgenError(f"{name} {problem}", hint) from error
        if isinstance(error, KeyError):  # its text is the key alone
            text = f"{text} is unknown"
        plain = _PYTHON_NAMES.sub(lambda match: match["type"] or "", text)
        reason = shorten(plain, 160, placeholder=" …") or "its values contradict each other"
        hint = (
            "Install what is missing"
            if isinstance(error, ImportError)
            else "Download or save it again"
        )
        raise SpecgenError(
            f"cannot read the {part} of {name}: {reason.rstrip('.')}", hint
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switches off warnings, log messages and progress bars in the `with` block, of transformers
    and of the packages that it uses."""
    disabled = logging.root.manager.disable
    bars = tqdm.__init__
    has_bars = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.ERROR)
    transformers_logging.disable_progress_bar()
    tqdm.__init__ = partialmethod(bars, disable=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        tqdm.__init__ = bars
        if has_bars:
            transformers_logging.enable_progress_bar()
