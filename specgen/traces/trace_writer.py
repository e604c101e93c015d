"""Makes the JSON lines that record a run (one generation), for `--json` and for trace files. Their keys are documented in the
README and do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specgen.cost_model.pearl_window import ParallelCosts
from specgen.environment import versions
from specgen.errors import RunError, SpecgenError
from specgen.json_lines import json_line
from specgen.types import Round, SamplingParams


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What the start line of a trace says about a run (one generation). `draft` is None if no draft model was used. `sampling`
    contains the seed that was really used. `costs` are the measured pass times that determined PEARL's window, None if no window
    was computed from them."""

    method: str
    settings: Mapping[str, Any]
    lossless: bool
    target: str
    draft: str | None
    device: str
    dtype: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    costs: ParallelCosts | None = None


def start_line(run: RunInfo) -> dict[str, Any]:
    """The first line of a recorded run: method, models, prompt, settings and the installed versions."""
    line = {"type": "start", **asdict(run), "sampling": asdict(run.sampling) | {"stop": list(run.sampling.stop)}}
    del line["costs"]
    return line | {"versions": versions()} | ({} if run.costs is None else {"costs": run.costs.as_dict()})


def round_line(round_: Round, text_of: Callable[[Sequence[int]], str], *, record: bool = False) -> dict[str, Any]:
    """The line of a trace for one round, that is one target pass with the draft that it verified. `text_of` turns token ids into
    text.

    With `record` it also contains, for each drafted token, sum(min(p, q)) as `overlap` and KL(q||p) as `kl`, where p is the
    target's distribution and q the draft's. Both are null for tokens without known distributions.
    """
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
        "target_passes": round_.target_passes,
        "seconds": dict(round_.seconds),
    }
    if record:
        figures: dict[str, Any] = {"overlap": (), "kl": ()} if verdict.agreement is None else asdict(verdict.agreement)
        for name, values in figures.items():  # PEARL drafts ahead: its last tokens have no values yet
            line[name] = [*values, *[None] * (len(draft.tokens) - len(values))]
    return line


def summary_line(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The last line of a recorded run, with the given results."""
    return {"type": "summary", **summary}


class TraceWriter:
    """Writes JSON lines to a trace file. Each line is one unbuffered write, so that an interruption leaves only complete lines.

    `keep` is None to start a new file. Otherwise it is the number of bytes to keep of an existing file; lines are written after
    them.
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
        """Writes one line. Raises RunError if the line cannot be written."""
        data = json_line(line)
        try:
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"cannot write the trace {self._path}: {error.strerror}") from error
        if written != len(data):
            raise RunError(f"cannot write the trace {self._path}: the disk is full")

    def close(self) -> None:
        self._file.close()
