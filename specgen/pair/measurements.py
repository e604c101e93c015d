"""What was measured on this machine for a pair of models: in memory, and in one file of the user's cache folder.

The file may be deleted at any time. If it is damaged, it is ignored and written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from filelock import FileLock, Timeout

from specgen.base.files import cache_folder, write_whole
from specgen.base.machine import machine, thread_settings, versions
from specgen.engine.model_loading import LoadedModel
from specgen.engine.weights import weights_fingerprint

if TYPE_CHECKING:
    from specgen.decoding.costs import RoundCosts
    from specgen.engine.devices import ThreadChoice

T = TypeVar("T")
Key = tuple[Any, ...]
_MOST = 500  # values of a kind in the file; the oldest ones leave first
_PATIENCE = 5.0  # seconds to wait for another process that writes the file


class Measurements:
    """What was measured for these models. `draft` is None if there is none.

    `kind` names a type of measurement; `key`, a tuple of JSON values, says what it depends on apart from the models and the
    machine. A value in memory stays the same until the process ends, so that equal runs stay equal. `threads` is the number of
    CPU threads that was chosen, None before `Pair.warm_up` and without a model on a CPU. A profile (the result of `specgen tune`)
    sets `tuned_costs`, seconds of rounds by `Method.cost_kind`.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None) -> None:
        self.threads: ThreadChoice | None = None
        self.tuned_costs: Mapping[str, RoundCosts] = {}
        self._target, self._draft = target, draft
        self._known: dict[tuple[str, Key], Any] = {}

    def find(self, kind: str, key: Key) -> Any:
        """Returns the value in memory, None if `get` was not called with this kind and key."""
        return self._known.get((kind, key))

    def get(
        self,
        kind: str,
        key: Key,
        measure: Callable[[], T],
        read: Callable[[Any], T],
        write: Callable[[T], Any],
        *,
        with_draft: bool = True,
        about: object = None,
    ) -> T:
        """Returns the value in memory, or else the one in the file, or else what `measure` returns, which is then stored.

        `write` converts a value to JSON, `read` converts it back; a stored value that `read` refuses (TypeError, ValueError,
        KeyError) is measured again, and one that is not finite stays in memory only. Without `with_draft` the value does not
        depend on the draft model. `about` identifies what the key names, such as the weights of a trained part.
        """
        if (kind, key) not in self._known:
            digest = self._digest((*key, about), with_draft=with_draft)
            try:
                value = read(_stored()[kind][digest])
            except (TypeError, ValueError, KeyError):
                value = measure()
                with suppress(ValueError):
                    _change(kind, digest, json.dumps(write(value), allow_nan=False))
            self._known[kind, key] = value
        found: T = self._known[kind, key]
        return found

    def stored(self, kind: str, key: Key) -> Any:
        """Returns the JSON value in the file; None if there is none."""
        return _stored().get(kind, {}).get(self._digest((*key, None), with_draft=True))

    def put(self, kind: str, key: Key, value: Any) -> None:
        """Stores a JSON value in the file, in place of an earlier one. Values that are not finite are left out."""
        with suppress(ValueError):
            _change(kind, self._digest((*key, None), with_draft=True), json.dumps(value, allow_nan=False))

    def _digest(self, key: Key, *, with_draft: bool) -> str:
        """Returns a hash of the key and of all about the models and the machine that changes how long passes take."""
        models = [self._target, *([self._draft] if self._draft is not None and with_draft else [])]
        conditions = {
            "key": key,
            "translations": [model.translation.digest for model in models if model.translation is not None],
            "models": [weights_fingerprint(model.folder) for model in models],
            "devices": [model.device_label for model in models],
            "dtypes": [model.dtype_name for model in models],
            "backends": [model.backend for model in models],
            "exact": self._target.exact,
            "threads": [torch.get_num_threads(), thread_settings()],
            "versions": versions(),
            "machine": machine(),
        }
        return sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:24]


def _path() -> Path:
    return cache_folder() / "measurements.json"


def _stored() -> dict[str, dict[str, Any]]:
    """Returns the values in the file by kind and digest; nothing if the file cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(values, dict) for values in found.values()):
            return found
    return {}


def _change(kind: str, digest: str, value: str) -> None:
    """Stores a value (JSON text). Does nothing if the file cannot be written."""
    with suppress(OSError, Timeout):
        _path().parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_path().with_suffix(".lock"), timeout=_PATIENCE):
            stored = _stored()
            values = stored.setdefault(kind, {})
            values.pop(digest, None)
            values[digest] = json.loads(value)
            stored[kind] = dict(list(values.items())[-_MOST:])
            write_whole(_path(), json.dumps(stored, indent=1))
