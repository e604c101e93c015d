"""Makes the JSON lines that record a run (one generation), for `--json` and for trace files. Their keys are documented in the
README and do not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import own_stream, take_lock
from specgen.base.machine import versions
from specgen.base.text import json_line
from specgen.base.types import Round

if TYPE_CHECKING:
    from filelock import FileLock

    from specgen.decoding.run import Run
    from specgen.pair.pair import Pair
    from specgen.pair.request import Request


def start_line(pair: Pair, request: Request, run: Run) -> dict[str, Any]:
    """The first line of a recorded run: method, models, prompt, settings and the installed versions.

    `sampling` contains the seed that was really used. `draft` is null if no draft model was used; `draft_dtype` is left out if it
    is `dtype`. `costs` are the pass times that PEARL's window was computed from, left out if there are none.
    """
    method, target = request.method, pair.target
    draft = pair.draft if method.uses_draft_model else None
    line = {
        "type": "start",
        "method": method.name,
        "settings": run.settings.as_dict(with_policy=method.any_policy),
        "lossless": method.lossless,
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "device": str(target.device),
        "dtype": target.dtype_name,
        "prompt_ids": request.prompt_ids,
        "sampling": asdict(request.sampling) | {"seed": run.seed, "stop": list(request.sampling.stop)},
    }
    if draft is not None and draft.dtype_name != target.dtype_name:
        line["draft_dtype"] = draft.dtype_name
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
        "predicted": [None if math.isnan(share) else share for share in draft.predicted],
        "policy": round_.policy_state,
        "target_passes": round_.target_passes,
        "seconds": dict(round_.seconds),
    }
    if round_.unjudged:
        line["unjudged"] = round_.unjudged
    if record:
        figures: dict[str, Any] = {"overlap": (), "kl": ()} if verdict.agreement is None else asdict(verdict.agreement)
        for name, values in figures.items():  # PEARL drafts ahead: its last tokens have no values yet
            line[name] = [*values, *[None] * (len(draft.tokens) - len(values))]
    return line


class TraceWriter:
    """Writes JSON lines to a trace file. Each line is one unbuffered write, so that an interruption leaves only complete lines.

    The file is locked at once, and opened with the first line. With `resumes`, lines are added to an existing file
    after its first `keep` bytes (set `keep` before the first line); a line feed that is missing there is added. Raises
    SpecgenError if another process of this user writes to it.
    """

    def __init__(self, path: Path, *, resumes: bool = False) -> None:
        self.keep = 0
        self._path, self._resumes = path, resumes
        self._file: FileIO | None = None
        self._lock: FileLock | None = None
        is_file = path.is_file()
        if resumes and not is_file:
            raise SpecgenError(f"cannot continue the trace {path}: it is not a file", "Name one that --trace wrote")
        if is_file or not path.exists():  # several processes may write to a device
            self._lock = take_lock(path)
            if self._lock is None:
                raise SpecgenError(f"another process writes the trace {path}", "Wait for its end, or name another file")

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes one line. Raises RunError if the line cannot be written."""
        data = json_line(line)
        try:
            if self._file is None:
                self._file = self._opened()
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"cannot write the trace {self._path}: {error.strerror}") from error
        if written != len(data):
            raise RunError(f"cannot write the trace {self._path}: the disk is full")

    def _opened(self) -> FileIO:
        if not self._resumes:
            return own_stream(self._path) or FileIO(self._path, "w")
        file = FileIO(self._path, "r+")
        file.truncate(self.keep)
        if self.keep:
            file.seek(self.keep - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()
