"""Calls of transformers without its warnings, and with its errors as messages of one line."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from transformers.utils import logging as transformers_logging

from specgen.base.errors import SpecgenError

# transformers imports what it finds of these packages; some warn when they are imported, some at every forward pass
for _package in (
    "auto_round",
    "bitsandbytes",
    "compressed_tensors",
    "gptqmodel",
    "hqq",
    "optimum",
    "torchao",
    "torch.utils._pytree",
):
    logging.getLogger(_package).setLevel(logging.ERROR)
_PYTHON_NAMES = re.compile(r"\b[A-Z]\w*Error: |<class '(?P<type>[\w.]+)'>")  # in texts of errors


@contextmanager
def reading(part: str, name: str) -> Iterator[None]:
    """Turns any exception that transformers raises in the `with` block into a SpecgenError with a message of one line.

    `part` says what of the model is read there, for the message.
    """
    try:
        with quiet_transformers():
            yield
    except SpecgenError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise SpecgenError(
                f"{name} contains Python code", "If you trust its authors with your machine, add --trust-remote-code"
            ) from error
        if "Unrecognized configuration class" in text:
            raise SpecgenError(f"{name} is no causal language model", "Take a decoder-only language model") from error
        if "does not recognize this architecture" in text:
            raise SpecgenError(
                f"{name} has a model_type that transformers does not know", "Install a newer transformers"
            ) from error
        if isinstance(error, KeyError):  # its text is the key alone
            text = f"{text} is unknown"
        plain = _PYTHON_NAMES.sub(lambda found: found["type"] or "", text)
        reason = shorten(plain, 160, placeholder=" …") or "its values contradict each other"
        hint = "Install what is missing" if isinstance(error, ImportError) else "Download or save it again"
        raise SpecgenError(f"cannot read the {part} of {name}: {reason.rstrip('.')}", hint) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switches off transformers' warnings and progress bars, and all of Python's warnings, in the `with` block."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
