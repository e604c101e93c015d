"""Runs as JSON lines, the same for `--json` and `--trace`. The keys are a promise (README, "JSON lines")."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import RunError, SpecgenError
from specgen.types import Round

if TYPE_CHECKING:
    from specgen.pair import Pair, Plan


def start_line(pair: Pair, plan: Plan) -> dict[str, Any]:
    sampling = asdict(plan.sampling) | {"seed": plan.seed, "stop": list(plan.sampling.stop)}
    return {
        "type": "start",
        "method": plan.method.name,
        "settings": plan.settings.as_dict(with_policy=plan.method.any_policy),
        "lossless": plan.method.lossless,
        "target": pair.target.name,
        "draft": pair.draft.name if pair.draft is not None and plan.method.needs_draft_model else None,
        "device": str(pair.target.device),
        "dtype": pair.target.dtype_name,
        "prompt_ids": plan.prompt_ids,
        "sampling": sampling,
        "versions": versions(),
        **({} if plan.costs is None else {"costs": plan.costs.as_dict()}),
    }


def versions() -> dict[str, str]:
    named = {name: version(name) for name in ("torch", "transformers")}
    import specgen

    return {"specgen": specgen.__version__, "python": platform.python_version(), **named}


def round_line(round_: Round, text_of: Callable[[Sequence[int]], str], *, record: bool = False) -> dict[str, Any]:
    """`record` adds how far draft and target agree at each drafted token, null where nobody can tell."""
    draft, verdict = round_.draft, round_.verdict
    line = {
        "type": "round",
        "index": round_.index,
        "mode": round_.mode,
        "draft_ids": list(draft.tokens),
        "draft_texts": [text_of([token]) for token in draft.tokens],
        "parents": list(draft.parents),
        "accepted_ids": round_.accepted_ids,
        "token_id": verdict.token,
        "token_text": None if verdict.token is None else text_of([verdict.token]),
        "source": verdict.source,
        "stop_reason": draft.stop_reason,
        "entropies": list(draft.entropies),
        "top_probs": list(draft.top_probs),
        "policy": round_.policy_state,
        "seconds": dict(round_.seconds),
    }
    if record:
        told: dict[str, Any] = {"overlap": (), "kl": ()} if verdict.agreement is None else asdict(verdict.agreement)
        for name, figures in told.items():  # what PEARL drafted ahead is not judged yet
            line[name] = [*figures, *[None] * (len(draft.tokens) - len(figures))]
    return line


def summary_line(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "summary", **summary}


def dumps(line: Mapping[str, Any]) -> str:
    """One line of JSON, text kept legible. NaN would be no JSON: it raises ValueError."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def check_writable(path: Path, what: str = "trace") -> None:
    """Refuse a file that cannot be written before anything is loaded. Raises SpecgenError; an old file is left as it is."""
    folder = path.parent
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise SpecgenError(f"cannot write the {what}: {error.strerror}", "Name another file") from error
    if is_folder:
        raise SpecgenError(f"cannot write the {what} {path}: it is a folder", "Name a file in it")
    if not folder.is_dir():
        raise SpecgenError(f"cannot write the {what} {path}: there is no folder {folder}", "Make it first, or name another")
    if not os.access(path if is_there else folder, os.W_OK):
        raise SpecgenError(f"cannot write the {what} {path}: permission denied", "Name another file")


class TraceWriter:
    """JSON lines on disk, each written whole as it comes: what an interruption leaves is complete lines.

    `keep` writes on behind so many bytes of a file that is there.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self._path = path
        try:
            self._file = path.open("wb" if keep is None else "r+b", buffering=0)
            if keep is not None:
                self._file.truncate(keep)
                self._file.seek(keep)
        except OSError as error:
            raise SpecgenError(f"cannot write the trace {path}: {error.strerror}", "Name another file") from error

    def write(self, line: Mapping[str, Any]) -> None:
        data = (dumps(line) + "\n").encode("utf-8", "surrogatepass")
        try:
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"cannot write the trace {self._path}: {error.strerror}") from error
        if written != len(data):
            raise RunError(f"cannot write the trace {self._path}: the disk is full")

    def close(self) -> None:
        self._file.close()
