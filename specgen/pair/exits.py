"""The exit layers (EESD) of one loaded target: the one that is used by default, and those that runs name by their path."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.early_exit import EarlyExit
from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS, Description, Exit, FoundExit, load_exit
from specgen.methods.method import Method


class Exits:
    """Loads each exit layer once. Each has KV caches of its own.

    An exit is named as in the setting `exit`: by its file or folder, or `auto` for the default one. `found` finds the default one
    if the user named none; None: there is none to be found. `penalties` makes a logits processor (None: no penalties).
    """

    def __init__(self, target: LoadedModel, penalties: Callable[[], PenaltyProcessor | None]) -> None:
        self.found: FoundExit | None = None
        self._target, self._penalties = target, penalties
        self._loaded: dict[Path, Exit] = {}
        self._runners: dict[int, tuple[Exit, EarlyExit]] = {}

    @cached_property
    def default(self) -> Exit | None:
        """The exit layer for the setting `auto`, or None. If the user named none, the first use loads the one that was found."""
        return None if self.found is None else self.found.load()

    @property
    def refusal(self) -> SpecgenError | None:
        """Why the exit layer found for this target cannot be used. None if it can, none was found, or the user named one."""
        return None if self.found is None else self.found.refusal

    @property
    def description(self) -> Description | None:
        """The contents of the default exit's `exit.yaml`, without reading the weights; None if there is no exit layer."""
        if self.found is not None:
            return self.found.description
        return None if self.default is None else self.default.description

    def get(self, name: str = methods.DEFAULT_EXIT) -> Exit | None:
        """Returns an exit layer, or None if there is no default one. Raises SpecgenError for a path as `--exit-layer` does."""
        if name == methods.DEFAULT_EXIT:
            return self.default
        path = Path(name).expanduser()
        is_description = path.name.endswith(Path(DESCRIPTION).suffix)
        key = (path / WEIGHTS if path.is_dir() else path.with_suffix(Path(WEIGHTS).suffix) if is_description else path).resolve()
        if key not in self._loaded:
            self._loaded[key] = load_exit(path, self._target)
        return self._loaded[key]

    def digest(self, name: object) -> str | None:
        """Returns what identifies an exit layer's training; None for the name None, and if there is no such exit layer."""
        found = None if name is None else self.get(str(name))
        return None if found is None else found.description.digest

    def has_predictor(self, name: str = methods.DEFAULT_EXIT) -> bool:
        """Whether there is this exit layer, with a predictor of whether a drafted token is accepted."""
        return (found := self.get(name)) is not None and found.predictor is not None

    def runners(self, method: Method, name: str = methods.DEFAULT_EXIT) -> EarlyExit:
        """Returns the target split after layer N into two runners: one drafts with this exit layer, the other one verifies.

        Raises SpecgenError for `method` if there is no such exit layer, or if the target's layers cannot be run one by one.
        """
        found = self.get(name)
        if found is None:
            self._target.model.check_layers("early exit")
            bundled = self._target.name.startswith("demo/")
            raise self.refusal or method.without_part(None if bundled else self._target.name)
        if id(found) not in self._runners:
            both = (self._penalties(), self._penalties())
            early = EarlyExit(self._target.model, found.layer, found.description.after, found.predictor, penalties=both)
            self._runners[id(found)] = found, early
        return self._runners[id(found)][1]

    def clear_caches(self) -> None:
        for _, early in self._runners.values():
            early.clear_cache()
