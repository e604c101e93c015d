"""What was measured on this machine for a pair of models: in memory, and in one file of the user's
cache folder.

The file may be deleted at any time. If it is damaged, it is ignored and written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from specgen.base.files import cache_folder, write_whole
from specgen.base.machine import is_busy, machine, thread_settings, versions
from specgen.base.measuring import PassCheck, Sample
from specgen.decoding.costs import Curve
from specgen.engine.devices import ThreadChoice, pick_threads
from specgen.engine.draft_model import DraftModel
from specgen.engine.kernels import library
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.weights import weights_fingerprint

if TYPE_CHECKING:
    from specgen.base.types import Round
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.run import Run, Schedule

T = TypeVar("T")
Key = tuple[Any, ...]
_MOST = 500  # values of a kind in the file; the oldest ones leave first
_IN_DOUBT = "in_doubt"  # in an entry of the file: it is to be measured again
_PATIENCE = 5.0  # seconds to wait for another process that writes the file

THREADS = "threads"  # the kind of measurements that are numbers of CPU threads
# tokens of a context, up to which passes are compared with those after a short one
LONGEST_COMPARED = 512


class Measurements:
    """What was measured on this machine for a target and its `draft` model, None if there is none.

    `kind` names a type of measurement, such as `skips`; `key`, a tuple of JSON values, says what
    the value depends on apart from the models and the machine. `threads` is the number of CPU
    threads that was chosen, None before `Pair.warm_up` and without a model on a CPU. A profile (the
    result of `specgen tune`) sets `tuned_costs`, the costs of rounds by what drafts (the
    `cost_kind` of a method).
    """

    def __init__(self, target: LoadedModel, draft: DraftModel | None) -> None:
        self.threads: ThreadChoice | None = None
        self.tuned_costs: Mapping[str, RoundCosts] = {}
        self._target = target
        self._draft = draft
        self._known: dict[tuple[str, Key], Any] = {}
        self._doubted: set[tuple[str, Key]] = set()
        self._watched: dict[tuple[str, Key], Curve] = {}
        self._default_threads: int | None = None  # torch's number before it was chosen

    def get(
        self,
        kind: str,
        key: Key,
        measure: Callable[[], Sample[Any]],
        read: Callable[[Any], T],
        *,
        with_draft: bool = True,
    ) -> T:
        """Returns the measured value of `kind` under `key`: the one in memory, or else the one in
        the user's cache file, or else what `measure` returns.

        `measure` returns a sample of a JSON value, which the file holds, and `read` converts the
        value to what this function returns. A sample whose times scatter is used by this process,
        and not stored. A stored value that `read` refuses (TypeError, ValueError, KeyError) is
        measured again, and so is one in doubt (see `doubt`), unless the machine is busy now: a
        sample whose times scatter does not replace it. Without `with_draft` the value does not
        depend on the draft model.
        """
        name = (kind, key)
        value: T | None = self._known.get(name)
        if value is None:
            value = self.stored(kind, key, read, with_draft=with_draft)
            if value is not None and self._entry(kind, key, with_draft=with_draft).get(_IN_DOUBT):
                self._doubted.add(name)
        is_doubted = name in self._doubted and not is_busy()
        if value is None or is_doubted:
            sample = measure()
            self._doubted.discard(name)
            if sample.is_steady:
                self.put(kind, key, sample, with_draft=with_draft)
            if sample.is_steady or value is None:
                value = read(sample.value)
        self._known[name] = value
        return value

    def doubt(self, kind: str, key: Key, *, with_draft: bool = True) -> None:
        """Has `get` measure the value of `kind` under `key` again when it is next asked for, in
        this process or in a later one.

        To be called when what a run has seen is far from the value.
        """
        self._doubted.add((kind, key))
        entry = self._entry(kind, key, with_draft=with_draft)
        if entry:
            self._write(kind, key, {**entry, _IN_DOUBT: True}, with_draft=with_draft)

    def stored(
        self, kind: str, key: Key, read: Callable[[Any], T], *, with_draft: bool = True
    ) -> T | None:
        """Returns the value of `kind` under `key` in the user's cache file, converted by `read`.
        None if there is none, or if `read` refuses it (see `get`)."""
        with suppress(TypeError, ValueError, KeyError):
            return read(self._entry(kind, key, with_draft=with_draft)["value"])
        return None

    def put(self, kind: str, key: Key, sample: Sample[Any], *, with_draft: bool = True) -> None:
        """Stores a sample of a JSON value of `kind` under `key` in the user's cache file, unless
        its times scatter.

        Does nothing if a number in it is not finite, or if the file cannot be written.
        """
        if sample.is_steady:
            self._write(kind, key, asdict(sample), with_draft=with_draft)

    def _entry(self, kind: str, key: Key, *, with_draft: bool) -> dict[str, Any]:
        """Returns what the user's cache file holds of `kind` under `key`: the fields of a `Sample`.
        Empty if it holds nothing."""
        entry = _stored().get(kind, {}).get(self._digest(kind, key, with_draft=with_draft))
        return entry if isinstance(entry, dict) else {}

    def _write(self, kind: str, key: Key, value: dict[str, Any], *, with_draft: bool) -> None:
        from filelock import FileLock, Timeout  # imports asyncio; most runs write nothing

        digest = self._digest(kind, key, with_draft=with_draft)
        with suppress(OSError, Timeout, ValueError):
            json.dumps(value, allow_nan=False)
            _path().parent.mkdir(parents=True, exist_ok=True)
            with FileLock(_path().with_suffix(".lock"), timeout=_PATIENCE):
                stored = _stored()
                values = stored.get(kind, {})
                values.pop(digest, None)
                stored[kind] = dict([*values.items(), (digest, value)][-_MOST:])
                write_whole(_path(), json.dumps(stored, indent=1))

    def watch(self, kind: str, key: Key, passes: Mapping[int, float]) -> None:
        """Has runs compare their passes with the target's `passes` (seconds by number of tokens),
        which were timed together with the value of `kind` under `key`. It is put in doubt by passes
        that are far from these."""
        if passes:
            self._watched[kind, key] = Curve(passes)

    def checked(self, schedule: Schedule) -> Schedule:
        """Returns a schedule of plain rounds with the comparisons of `watch`."""
        watched = dict(self._watched)
        if not watched:
            return schedule

        def rounds(run: Run) -> Iterator[Round]:
            checks = [
                (PassCheck(partial(self.doubt, *name)), passes) for name, passes in watched.items()
            ]
            with closing(cast("Generator[Round]", schedule(run))) as made:
                try:
                    for round_ in made:
                        for check, passes in checks:
                            _compare(check, passes, round_, len(run.context))
                        yield round_
                finally:
                    for check, _ in checks:
                        check.end()

        return rounds

    def set_threads(self, work: Callable[[], Mapping[int, float]], *, remembered: bool) -> None:
        """Sets torch's number of CPU threads for the whole process: the one that `get` finds, or
        else the one that `pick_threads` chooses. Unless `remembered`, it is chosen anew if the
        machine is not busy.

        `work` is a round of decoding with these models, and returns the seconds of the target's
        passes by their number of tokens. Runs compare theirs with them: with a number that was
        chosen on a busy machine, they are faster on a quiet one.
        """
        if self._default_threads is None:
            self._default_threads = torch.get_num_threads()
        if not remembered:
            self._doubted.add((THREADS, ()))
        chosen, passes = self.get(THREADS, (), partial(_pick_threads, work), _thread_choice)
        torch.set_num_threads(chosen.threads)
        self.threads = chosen
        self.watch(THREADS, (), passes)

    def _digest(self, kind: str, key: Key, *, with_draft: bool) -> str:
        """Returns a hash of the key and of what changes how long passes take: the machine, the
        versions and the models (the draft model only `with_draft`)."""
        threads = torch.get_num_threads()
        if kind == THREADS and self._default_threads is not None:
            threads = self._default_threads  # the value is this process's number by now
        models = [self._target]
        translations = []
        if self._draft is not None and with_draft:
            models.append(self._draft)
            if self._draft.translation is not None:
                translations.append(self._draft.translation.digest)
        conditions = {
            "key": key,
            "translations": translations,
            "models": [weights_fingerprint(model.folder) for model in models],
            "devices": [model.device_label for model in models],
            "dtypes": [model.dtype_name for model in models],
            "backends": [model.files.backend for model in models],
            "exact": self._target.files.source.exact,
            "threads": [threads, thread_settings()],
            "versions": versions(),
            "machine": machine() | {"kernels": library.kind()},
        }
        return sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:24]


def _pick_threads(work: Callable[[], Mapping[int, float]]) -> Sample[dict[str, Any]]:
    """Returns the chosen number of CPU threads as a JSON value, with the seconds of the target's
    passes with this number."""
    timed: list[tuple[int, Mapping[int, float]]] = []
    sample = pick_threads(lambda: timed.append((torch.get_num_threads(), work())))
    passes: dict[int, float] = {}
    for threads, seconds in timed:
        if threads == sample.value.threads:
            passes = {
                width: min(taken, passes.get(width, taken)) for width, taken in seconds.items()
            }
    return sample.holding(asdict(sample.value) | {"passes": passes})


def _thread_choice(stored: Any) -> tuple[ThreadChoice, dict[int, float]]:
    seconds = {int(threads): float(taken) for threads, taken in stored["seconds"].items()}
    choice = ThreadChoice(int(stored["threads"]), str(stored["reason"]), seconds)
    return choice, pass_times(stored["passes"])


def pass_times(stored: Mapping[Any, Any]) -> dict[int, float]:
    """Returns the seconds of passes by their number of tokens from the JSON value in the file.
    Raises ValueError if one of them is not positive."""
    passes = {int(width): float(seconds) for width, seconds in stored.items()}
    if not all(seconds > 0 for seconds in passes.values()):
        raise ValueError("a pass takes some time")
    return passes


def _compare(check: PassCheck, passes: Curve, round_: Round, context_length: int) -> None:
    """Has a round's pass checked, if it is one that can be compared: of a width between those of
    `passes`, and after a context so short that attention to it takes no time."""
    width = round_.pass_tokens
    is_usual = round_.mode == "sequential" and context_length <= LONGEST_COMPARED
    if is_usual and min(passes.points) <= width <= max(passes.points):
        check.add("target", round_.seconds["verify"], passes.at(width))


def _path() -> Path:
    return cache_folder() / "measurements.json"


def _stored() -> dict[str, dict[str, Any]]:
    """Returns the values in the file by kind and digest; nothing if the file cannot be read."""
    with suppress(OSError, ValueError):
        stored = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(stored, dict) and all(isinstance(kind, dict) for kind in stored.values()):
            return stored
    return {}
