"""The trained heads (Medusa, EAGLE, GliDe) of one loaded target: those used by default, and those that runs name by folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.head_files import FoundHead, Head, load_head
from specgen.engine.parts.head_runners import HeadRunners
from specgen.engine.parts.weights import KINDS, EagleWeights, HeadKind, HeadWeights, without_tensors
from specgen.methods.method import Method


class Heads:
    """Loads each head once. Each has caches of its own.

    A head is named as in the setting `head`: by its folder, or `auto` for the one that the user named with --head if it is of the
    method's kind, otherwise for the one found for this target. `penalties` makes a logits processor (None: no penalties), and
    `runner` is the target's runner, which heads that need no hidden states of other layers share. `is_bundled`: the target is the
    small model that comes with specgen, with heads.
    """

    def __init__(self, target: LoadedModel, runner: ModelRunner, penalties: Callable[[], PenaltyProcessor | None]) -> None:
        self.is_bundled = False
        self._target, self._runner, self._penalties = target, runner, penalties
        self._named: Head | None = None
        self._found: dict[str, FoundHead] = {}
        self._loaded: dict[Path, Head] = {}
        self._defaults: dict[str, Head | None] = {}
        self._runners: dict[Path, HeadRunners] = {}

    def name(self, folder: Path) -> Head:
        """Loads the head that the user named with --head. Raises SpecgenError if it cannot be used with this target."""
        self._named = self._load(folder)
        return self._named

    @property
    def warning(self) -> str | None:
        """What is doubtful about the head that the user named; None if nothing is."""
        return None if self._named is None or self._named.warning is None else f"{self._named.path}: {self._named.warning}"

    def has(self, kind: str) -> bool:
        """Whether there is a default head of this kind, as far as is known without reading weights."""
        return self._is_named(kind) or self.found(kind).description is not None

    def found(self, kind: str) -> FoundHead:
        """Returns what was found for this target, if the user named no head of this kind."""
        if kind not in self._found:
            known: HeadKind = next(each for each in KINDS if each == kind)
            self._found[kind] = FoundHead(known, self._target, is_bundled=self.is_bundled)
        return self._found[kind]

    def get(self, method: Method, name: str = methods.DEFAULT_HEAD) -> Head | None:
        """Returns a head for the method, or None if there is no default one. Raises SpecgenError for one that cannot be used."""
        if name == methods.DEFAULT_HEAD:
            if self._is_named(method.head):
                return self._named
            if method.head not in self._defaults:
                self._defaults[method.head] = self.found(method.head).load()
            return self._defaults[method.head]
        head = self._load(Path(name).expanduser())
        if head.weights.kind != method.head:
            raise SpecgenError(f"the head {name} is for {head.weights.kind}, not for {method.name}", "Name another folder")
        return head

    def digest(self, method: Method, name: object) -> str | None:
        """Returns what identifies the weights of the method's head; None for the name None, and if there is no such head."""
        head = None if name is None or not method.head else self.get(method, str(name))
        return None if head is None else weights_fingerprint(head.path)

    def digests(self) -> dict[str, str]:
        """Returns what identifies the default head of each kind for which there is one, without reading its weights."""
        digests: dict[str, str] = {}
        for kind in KINDS:
            if self._named is not None and self._is_named(kind):
                digests[kind] = weights_fingerprint(self._named.path)
            elif (description := self.found(kind).description) is not None:
                digests[kind] = description.weights
        return digests

    def named_elsewhere(self) -> dict[str, tuple[Path, str]]:
        """Returns the folder of each kind's default head, and its method's name in other engines, such as `eagle3`."""
        defaults = {kind: self.get(method) for kind in KINDS if self.has((method := methods.find(kind)).head)}
        loaded = {kind: head for kind, head in defaults.items() if head is not None}
        return {kind: (head.path, _name_elsewhere(head.weights)) for kind, head in loaded.items()}

    def runners(self, method: Method, name: str = methods.DEFAULT_HEAD) -> HeadRunners:
        """Returns the target's runner and the head's for the method. Raises SpecgenError if there is no such head."""
        head = self.get(method, name)
        if head is None:
            bundled = self._target.name.startswith("demo/")
            error = self.found(method.head).refusal or method.without_part(None if bundled else self._target.name)
            if self._named is not None:
                kind = self._named.weights.kind
                given = f"the head {self._named.path} is for {kind}, not for {method.name}"
                raise SpecgenError(f"{given}: {error.message}", f"Use -m {kind}. Or: {error.hint[0].lower()}{error.hint[1:]}")
            raise error
        if head.path not in self._runners:
            make = import_module(f"specgen.engine.parts.{head.weights.kind}_runner").make_runners
            self._check_that_it_can_draft(head)
            made: HeadRunners = make(head.weights, self._target.model, self._runner, self._penalties)
            self._runners[head.path] = made
            self._forget_weights(head)
        return self._runners[head.path]

    def _check_that_it_can_draft(self, head: Head) -> None:
        """Raises SpecgenError if the target's generation config suppresses every token of the head's reduced vocabulary."""
        vocabulary = getattr(head.weights, "vocabulary", None)
        if vocabulary is None or (penalties := self._penalties()) is None:
            return
        if penalties.forbids_all(vocabulary.tolist()):
            raise SpecgenError(
                f"the target's generation config suppresses all {len(vocabulary):,} tokens that the head {head.path} can draft",
                "Name another head, or use a method without one: -m lookup",
            )

    def unused(self, method: Method) -> str | None:
        """Says in a line that the method does not use the head that the user named with --head; None if it does, or none was."""
        if self._named is None or method.head == self._named.weights.kind:
            return None
        return f"--head is not used by {method.name}: for {self._named.path} take -m {self._named.weights.kind}"

    def clear_caches(self) -> None:
        for runners in self._runners.values():
            runners.clear_cache()

    def _forget_weights(self, head: Head) -> None:
        """Frees the memory of the weights as they were read: the runner has its own, fused or converted."""
        light = replace(head, weights=without_tensors(head.weights))
        self._loaded = {path: light if each is head else each for path, each in self._loaded.items()}
        self._defaults = {kind: light if each is head else each for kind, each in self._defaults.items()}
        self._named = light if self._named is head else self._named

    def _is_named(self, kind: str) -> bool:
        return self._named is not None and self._named.weights.kind == kind

    def _load(self, folder: Path) -> Head:
        key = folder.resolve()
        if key not in self._loaded:
            self._loaded[key] = load_head(folder, self._target)
        return self._loaded[key]


def _name_elsewhere(weights: HeadWeights) -> str:
    """Returns what vLLM and SGLang call the method that runs a head."""
    return "eagle3" if isinstance(weights, EagleWeights) and weights.version == 3 else weights.kind
