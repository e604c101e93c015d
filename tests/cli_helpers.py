"""What tests of the command line share: running `specgen` in this process or in a new one, and
reading its JSON lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.app import main

POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="needs signals, pseudo-terminals and pipes of POSIX"
)
FULL = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)

# characters that would change the terminal, reorder text or hide in it
UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\U000e0000-\U000e007f]"
)
# the keys of a summary's line, as documented
SUMMARY = (
    "type method text token_ids new_tokens finish_reason seconds tokens_per_second "
    "decode_tokens_per_second prompt_tokens_per_second rounds target_passes "
    "drafted accepted acceptance_rate draft_share copied copied_accepted "
    "harmonic_mean block_efficiency "
    "mean_accepted_run perplexity joules_per_token "
    "gross_joules_per_token ties "
    "energy phase_seconds"
)

Lines = list[dict[str, Any]]


def parsed(text: str) -> Lines:
    """The objects in the JSON lines `text`. NaN and infinity fail the test."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def run_main(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run `specgen` in this process: its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["specgen", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, *capfd.readouterr()


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `specgen` in a new process, with pipes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **options.pop("environment", {})}
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **options,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "specgen", *arguments], env=environment, **streams
    )


def run(*arguments: str, **options: Any) -> tuple[int, bytes, bytes]:
    """Run `specgen` in a new process: its exit code, stdout and stderr."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out or b"", err
