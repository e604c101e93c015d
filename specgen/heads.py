"""The trained heads (Medusa, EAGLE, GliDe) of one loaded target: those used by default, and those that runs name by folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from specgen import methods
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.heads.head_files import Head, find_head, load_head
from specgen.engine.heads.head_runners import HeadRunners
from specgen.engine.heads.weights import KINDS
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.methods import Method
from specgen.missing_parts import no_head


class Heads:
    """Loads each head once. Each has caches of its own.

    A head is named as in the setting `head`: by its folder, or `auto` for the one that the user named with --head if it is of the
    method's kind, otherwise for the one found for this target. `penalties` makes a logits processor (None: no penalties), and
    `runner` is the target's runner, which heads that need no hidden states of other layers share. `is_bundled`: the target is the
    small model that comes with specgen, for which heads come with it too.
    """

    def __init__(self, target: LoadedModel, runner: ModelRunner, penalties: Callable[[], PenaltyProcessor | None]) -> None:
        self.refusals: dict[str, SpecgenError] = {}
        self.is_bundled = False
        self._target, self._runner, self._penalties = target, runner, penalties
        self._named: Head | None = None
        self._found: dict[str, Path | None] = {}
        self._loaded: dict[Path, Head] = {}
        self._runners: dict[Path, HeadRunners] = {}

    def name(self, folder: Path) -> None:
        """Loads the head that the user named with --head. Raises SpecgenError if it cannot be used with this target."""
        self._named = self._load(folder)

    def folder(self, kind: str) -> Path | None:
        """Returns the folder of the default head of this kind, or None if there is none. Reads no weights.

        `refusals` has the reason for each kind of which a head was found that cannot be used.
        """
        if self._named is not None and self._named.weights.kind == kind:
            return self._named.path
        if kind not in self._found:
            self._found[kind] = None
            try:
                self._found[kind] = find_head(kind, self._target.name, self._target.folder, is_bundled=self.is_bundled)
            except SpecgenError as error:
                self.refusals[kind] = error
        return self._found[kind]

    def get(self, method: Method, name: str = methods.DEFAULT_HEAD) -> Head | None:
        """Returns a head for the method, or None if there is no default one. Raises SpecgenError for one that cannot be used."""
        if name != methods.DEFAULT_HEAD:
            head = self._load(Path(name).expanduser())
            if head.weights.kind != method.head:
                raise SpecgenError(f"the head {name} is for {head.weights.kind}, not for {method.name}", "Name another folder")
            return head
        folder = self.folder(method.head)
        return None if folder is None else self._load(folder)

    def digests(self) -> Mapping[str, str]:
        """Returns what identifies the default head of each kind for which there is one."""
        folders = {kind: self.folder(kind) for kind in KINDS}
        return {kind: weights_fingerprint(folder) for kind, folder in folders.items() if folder is not None}

    def digest(self, method: Method, name: object) -> str | None:
        """Returns what identifies the method's head; None for the name None, and if there is no such head."""
        if name is None:
            return None
        folder = self.folder(method.head) if name == methods.DEFAULT_HEAD else Path(str(name)).expanduser()
        return None if folder is None else weights_fingerprint(folder)

    def runners(self, method: Method, name: str = methods.DEFAULT_HEAD) -> HeadRunners:
        """Returns the target's runner and the head's for the method. Raises SpecgenError if there is no such head."""
        head = self.get(method, name)
        if head is None:
            bundled = self._target.name.startswith("demo/")
            raise self.refusals.get(method.head) or no_head(method, None if bundled else self._target.name)
        if head.path not in self._runners:
            module = import_module(f"specgen.engine.heads.{head.weights.kind}_runner")
            made: HeadRunners = module.make_runners(head.weights, self._target.model, self._runner, self._penalties)
            self._runners[head.path] = made
        return self._runners[head.path]

    def clear_caches(self) -> None:
        for runners in self._runners.values():
            runners.clear_cache()

    def _load(self, folder: Path) -> Head:
        key = folder.resolve()
        if key not in self._loaded:
            try:
                self._loaded[key] = load_head(folder, self._target)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise RunError(f"the head {folder} does not fit into the memory of {self._target.device}") from error
        return self._loaded[key]
