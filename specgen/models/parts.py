"""The trained parts of one loaded target (exit layers and heads): those used by default, and those
that runs name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.files import kept_part
from specgen.base.part_kinds import DEFAULT_PART, EXIT, MTP
from specgen.base.part_verdict import PartVerdict
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.parts.trained_part import TrainedPart, open_part, own_layers, part_digest
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.weights import weights_fingerprint

_MODULES = {  # by kind: the one with `make_runners`
    EXIT: "own_layers",
    "medusa": "medusa",
    "eagle": "eagle",
    "glide": "glide",
    "block": "block",
    MTP: "eagle",
}


class PartStore:
    """The trained parts (exit layers and heads) of one target. Opens and loads each once; each has
    KV caches of its own.

    Kinds are `exit` and those of heads (`base.part_kinds`). A part is named as in the settings
    `exit` and `head`: by its path, or by `auto` for the default part of the method's kind, which is
    the one that the user named with --exit-layer or --head, otherwise the one found for this
    target.

    `runner` is the target's own runner, which parts share if they need no hidden states but those
    that it keeps. `penalties` makes a logits processor (None: no penalties). `is_bundled`: the
    target is the small model that comes with specgen, with trained parts.
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
        # by kind: the folders of heads that were found on this machine
        self.beside: dict[str, Path] = {}
        self._target = target
        self._runner = runner
        self._penalties = penalties
        # by kind; an error says why it cannot be used
        self._found: dict[str, TrainedPart | SpecgenError | None] = {}
        self._opened: dict[Path, TrainedPart] = {}
        self._runners: dict[TrainedPart, Runners] = {}

    def name(self, path: Path, *, is_exit: bool) -> None:
        """Makes the trained part at `path` the default one of its kind. `is_exit`: it is an exit
        layer, not a head.

        Raises SpecgenError if it cannot be used with this target.
        """
        part = self._open(path, is_exit=is_exit)
        part.load()
        self.named[part.kind] = part

    def find(self, kind: str) -> TrainedPart | None:
        """Returns the default trained part of a kind, such as `exit` or `eagle`: the one that the
        user named, or the one found for the target. None if there is none, or if it cannot be used;
        `refusal` then says why."""
        part = self._default(kind)
        return part if isinstance(part, TrainedPart) else None

    def refusal(self, kind: str) -> SpecgenError | None:
        """Returns why the trained part of this kind that was found for the target cannot be used.
        None if it can be used, or if none was found."""
        error = self._default(kind)
        return error if isinstance(error, SpecgenError) else None

    def not_chosen(self, kind: str) -> str | None:
        """Returns why the part of this kind that was found for the target is not chosen where the
        user names no method: its training measured that others are faster. None if it may be, or if
        the user named it."""
        part = self.find(kind)
        if part is None or part.description is None or kind in self.named:
            return None
        verdict = PartVerdict.read(part.description.figures)
        return None if verdict is None else verdict.refusal(self._target.device.type)

    def load(self, kind: str, name: str = DEFAULT_PART) -> TrainedPart | None:
        """Returns the trained part of this kind that `name` names, with its weights read and
        checked.

        `name` is a path, or `auto` for the default part. None if no default part was found, or if
        the one that was found cannot be used (see `refusal`). Raises SpecgenError if a part that
        the user named cannot be used or is of another kind.
        """
        is_default = name == DEFAULT_PART
        part = (
            self.find(kind)
            if is_default
            else self._open(Path(name).expanduser(), is_exit=kind == "exit")
        )
        if part is None:
            return None
        if part.kind != kind:
            raise _wrong_kind(part, kind)
        try:
            if part not in self._runners:
                part.load()
        except SpecgenError as error:
            if not is_default or kind in self.named:
                raise
            self._found[kind] = error
        return self.find(kind) if is_default else part

    def has_predictor(self, name: str = DEFAULT_PART) -> bool:
        """Whether the exit layer `name` exists and has a predictor of whether a drafted token is
        accepted. Raises SpecgenError as `load` does."""
        part = self.load("exit", name)
        return part is not None and part.has_predictor

    def digests(self) -> dict[str, str]:
        """Returns a hash of the files of each default trained part (exit layer or head), by kind.

        Opens none. Without the drafting layers in the target's own files, which have its hash, and
        without files that cannot be read.
        """
        digests = {}
        for kind in _MODULES:
            path = self._path(kind)
            if path is not None:
                with suppress(SpecgenError, OSError):
                    digests[kind] = part_digest(path, is_exit=kind == EXIT)
        return digests

    def runners(self, kind: str, name: str = DEFAULT_PART) -> Runners | None:
        """Returns the model runners of the target and of the trained part of this kind. `name` is
        the part's path, or `auto`.

        None if there is no such part. Raises SpecgenError if there is one that cannot be used, or
        if the user named one of another kind.
        """
        part = self.load(kind, name)
        if part is None:
            self._check_missing(kind)
            return None
        if part not in self._runners:
            make = import_module(f"specgen.engine.parts.{_MODULES[part.kind]}").make_runners
            self._runners[part] = make(
                part.load(), self._target.model, self._runner, self._penalties
            )
            part.release()
        return self._runners[part]

    def can_run(self, kind: str) -> bool:
        """Whether the default part of this kind can be run. Loads it. `refusal` then has the error
        of one that cannot."""
        if self.find(kind) is None:
            return False
        try:
            self.runners(kind)
        except SpecgenError as error:
            self._found[kind] = error
        return self.refusal(kind) is None

    def unused(self, method: str, kind: str) -> str | None:
        """Returns a line for the user if `method`, which drafts with heads of this `kind`, does not
        use the head named with --head. None if it does, or without --head."""
        head = self._named_head
        if head is None or kind == head.kind:
            return None
        return f"--head is not used by {method}: for {head.path} take -m {head.kind}"

    @property
    def _named_head(self) -> TrainedPart | None:
        return next((part for kind, part in self.named.items() if kind != "exit"), None)

    def clear_caches(self) -> None:
        for runners in self._runners.values():
            runners.clear_cache()

    def _open(self, path: Path, *, is_exit: bool) -> TrainedPart:
        key = path.resolve()
        if key not in self._opened:
            self._opened[key] = open_part(path, self._target, is_exit=is_exit)
        return self._opened[key]

    def _default(self, kind: str) -> TrainedPart | SpecgenError | None:
        """Returns the default part of a kind: the one that the user named, else the one trained on
        this machine for the target's weights (preferably under the target's name), else the bundled
        one; `MTP`: the target's own. None if there is none; the error if it cannot be opened or
        loaded."""
        if kind in self.named:
            return self.named[kind]
        if kind not in self._found:
            try:
                self._found[kind] = self._find(kind)
            except SpecgenError as error:
                self._found[kind] = error
        return self._found[kind]

    def _find(self, kind: str) -> TrainedPart | None:
        if kind == MTP:
            own = own_layers(self._target)
            if own is not None:
                return own
        path = self._path(kind)
        return None if path is None else open_part(path, self._target, is_exit=kind == EXIT)

    def _path(self, kind: str) -> Path | None:
        """Returns where the default part of a kind is; None if there is none in files of its
        own."""
        if kind in self.named:
            return self.named[kind].path
        path = kept_part(kind, self._target.name, weights_fingerprint(self._target.folder))
        if path is None and self.is_bundled:
            bundled = demo.exit_folder() if kind == EXIT else demo.head_folder(kind)
            if bundled.is_dir():
                return bundled
        return path or self.beside.get(kind)

    def _check_missing(self, kind: str) -> None:
        """Raises SpecgenError if there is a reason why there is no part of this kind."""
        if kind == EXIT:
            self._target.model.check_layers("early exit")
        elif self._named_head is not None:
            raise _wrong_kind(self._named_head, kind)
        refusal = self.refusal(kind)
        if refusal is not None:
            raise refusal


def _wrong_kind(part: TrainedPart, kind: str) -> SpecgenError:
    return SpecgenError(
        f"{part.name} is for {part.kind}, not for {kind}",
        f"Use -m {part.kind}, or name another folder",
    )
