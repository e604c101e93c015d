"""The trained parts of one loaded target (exit layers and heads): those used by default, and those that runs name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.feature_runner import PartRunners
from specgen.engine.parts.trained_part import TrainedPart, find_part, open_part
from specgen.engine.parts.weights import KINDS, Kind
from specgen.methods.method import DRAFT_MODEL, NOTHING, SKIPPED_LAYERS, Method

_ALL: tuple[Kind, ...] = ("exit", *KINDS)
_MODULES = {"exit": "exit_layers", "medusa": "medusa", "eagle": "eagle", "glide": "glide"}


def kind_for(method: Method) -> str:
    """Returns the kind of trained part that the method needs; empty if it needs none."""
    return "" if method.needs in (NOTHING, DRAFT_MODEL, SKIPPED_LAYERS) else method.needs


def name_in(values: Mapping[str, object]) -> str:
    """Returns the name of a method's part by its settings."""
    return str(values.get("exit", values.get("head", methods.DEFAULT_HEAD)))


class PartStore:
    """Opens and loads each trained part once. Each has caches of its own.

    A part is named as in the settings `exit` and `head`: by its path, or `auto` for the one that the user named with
    --exit-layer or --head if it is of the method's kind, otherwise for the one found for this target. `runner` is the target's
    own, which parts that need no other hidden states share. `penalties` makes a logits processor (None: no penalties).
    `is_bundled`: the target is the small model that comes with specgen, with trained parts.
    """

    def __init__(
        self,
        target: LoadedModel,
        runner: ModelRunner | None = None,
        penalties: Callable[[], PenaltyProcessor | None] = lambda: None,
        *,
        is_bundled: bool = False,
    ) -> None:
        self.is_bundled = is_bundled
        self.named: dict[str, TrainedPart] = {}  # by kind
        self._target, self._runner, self._penalties = target, runner, penalties
        self._found: dict[str, TrainedPart | None] = {}
        self._refusals: dict[str, SpecgenError] = {}
        self._opened: dict[tuple[Path, bool], TrainedPart] = {}
        self._runners: dict[TrainedPart, PartRunners] = {}

    def name(self, path: Path, *, is_exit: bool) -> None:
        """Makes the part at `path` the default one of its kind. Raises SpecgenError if it cannot be used with this target."""
        part = self._open(path, is_exit=is_exit)
        part.load()
        self.named[part.kind] = part

    def find(self, kind: str) -> TrainedPart | None:
        """Returns the default part of a kind, or None: `refusal` then says why one that was found cannot be used."""
        if kind in self.named:
            return self.named[kind]
        if kind not in self._found:
            known = next(each for each in _ALL if each == kind)
            self._found[kind] = None
            try:
                self._found[kind] = find_part(known, self._target, is_bundled=self.is_bundled)
            except SpecgenError as error:
                self._refusals[kind] = error
        return self._found[kind]

    def refusal(self, kind: str) -> SpecgenError | None:
        """Returns why the part of this kind that was found for the target cannot be used; None if it can, or none was found."""
        self.find(kind)
        return self._refusals.get(kind)

    def load(self, kind: str, name: str = methods.DEFAULT_HEAD) -> TrainedPart | None:
        """Returns a part whose weights were read, or None if there is no default one that can be used.

        Raises SpecgenError for a path, as --exit-layer and --head do.
        """
        if name != methods.DEFAULT_HEAD:
            part = self._open(Path(name).expanduser(), is_exit=kind == "exit")
            if part.kind != kind:
                raise SpecgenError(f"the head {name} is for {part.kind}, not for {kind}", "Name another folder")
            if part not in self._runners:
                part.load()
            return part
        found = self.find(kind)
        if found is not None and found not in self._runners:
            try:
                found.load()
            except SpecgenError as error:
                if kind in self.named:
                    raise
                self._found[kind], self._refusals[kind] = None, error
        return self.find(kind)

    def has_predictor(self, name: str = methods.DEFAULT_EXIT) -> bool:
        """Whether there is this exit layer, with a predictor of whether a drafted token is accepted."""
        found = self.load("exit", name)
        return found is not None and found.has_predictor

    def digest(self, method: Method, name: str = methods.DEFAULT_HEAD) -> str | None:
        """Returns what identifies the method's part; None if it needs none, and if there is none."""
        found = self.load(kind, name) if (kind := kind_for(method)) else None
        return None if found is None else found.digest

    def digests(self) -> dict[str, str]:
        """Returns what identifies the default part of each kind for which there is one. Loads none."""
        found = {kind: self.find(kind) for kind in _ALL}
        return {kind: part.digest for kind, part in found.items() if part is not None}

    def runners(self, method: Method, name: str = methods.DEFAULT_HEAD) -> PartRunners:
        """Returns the target's runner and that of the method's part. Raises SpecgenError if there is no such part."""
        part = self.load(kind_for(method), name)
        if part is None:
            raise self._missing(method)
        if part not in self._runners:
            weights = part.load()
            self._check_that_it_can_draft(part)
            make = import_module(f"specgen.engine.parts.{_MODULES[part.kind]}").make_runners
            made: PartRunners = make(weights, self._target.model, self._runner, self._penalties)
            self._runners[part] = made
            part.release()
        return self._runners[part]

    def unused(self, method: Method) -> str | None:
        """Says in a line that the method does not use the head that the user named with --head; None if it does, or none was."""
        head = self._named_head
        if head is None or method.head == head.kind:
            return None
        return f"--head is not used by {method.name}: for {head.path} take -m {head.kind}"

    @property
    def _named_head(self) -> TrainedPart | None:
        return next((part for kind, part in self.named.items() if kind != "exit"), None)

    def clear_caches(self) -> None:
        for runners in self._runners.values():
            runners.clear_cache()

    def _open(self, path: Path, *, is_exit: bool) -> TrainedPart:
        key = path.resolve(), is_exit
        if key not in self._opened:
            part = open_part(path, self._target, is_exit=is_exit)
            self._opened[key] = self._opened.setdefault((part.path.resolve(), is_exit), part)
        return self._opened[key]

    def _missing(self, method: Method) -> SpecgenError:
        """Returns the error for a method without its part."""
        kind, location = kind_for(method), None if self._target.name.startswith("demo/") else self._target.name
        if kind == "exit":
            self._target.model.check_layers("early exit")
            return self.refusal(kind) or method.without_part(location)
        error, head = self.refusal(kind) or method.without_part(location), self._named_head
        if head is None:
            return error
        given, hint = f"the head {head.path} is for {head.kind}, not for {method.name}", error.hint
        return SpecgenError(f"{given}: {error.message}", f"Use -m {head.kind}. Or: {hint[0].lower()}{hint[1:]}")

    def _check_that_it_can_draft(self, part: TrainedPart) -> None:
        """Raises SpecgenError if the target's generation config suppresses every token of a head's reduced vocabulary."""
        vocabulary = getattr(part.load(), "vocabulary", None)
        if vocabulary is None or (penalties := self._penalties()) is None:
            return
        if penalties.forbids_all(vocabulary.tolist()):
            raise SpecgenError(
                f"the target's generation config suppresses all {len(vocabulary):,} tokens that the head {part.path} can draft",
                "Name another head, or use a method without one: -m lookup",
            )
