"""What a method needs to know of the loaded models: the interface `Models`. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from specgen.base.types import Constraint, SamplingParams
    from specgen.decoding.drafting import Setup
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.decoding.run import Schedule, Turns
    from specgen.engine.draft_model import DraftModel
    from specgen.engine.loaded_model import LoadedModel
    from specgen.engine.model_runner import Runners
    from specgen.engine.text.tokenizer import Tokenizer
    from specgen.models.measurements import Measurements


class Kept(Protocol):
    """What a kind of method keeps with the models between its runs. Made by `Models.kept` at its
    first use."""

    def __init__(self, models: Models) -> None: ...

    def forget(self) -> None:
        """Forgets the outputs of earlier runs, so that the next run computes everything."""

    def save(self) -> None:
        """Stores what later processes can use. Called when the models are closed."""


K = TypeVar("K", bound=Kept)


class Worker(Protocol):
    """Runs the draft model while the target's passes run (PEARL): see `workers.worker.DraftWorker`.

    `is_process`: it does so in a process of its own. `threads` is the number of CPU threads left to
    the target; None if it keeps all of them.
    """

    is_process: bool
    threads: int | None

    def ready(self) -> object:
        """Waits until the draft model is loaded. Raises SpecgenError if it cannot be."""

    def drafter(self, policy: LengthPolicy, setup: Setup, window: int) -> ParallelDrafter:
        """Returns a drafter for one run, with drafts of at most `window` tokens, which `policy`
        ends."""
        ...


class Models(Protocol):
    """A target and what can draft for it, ready for runs. The models of one pair, or those of a
    simulation.

    `draft` is None without a draft model. `lock` is held while a round is made.
    """

    @property
    def target(self) -> LoadedModel: ...

    @property
    def draft(self) -> DraftModel | None: ...

    @property
    def measurements(self) -> Measurements: ...

    @property
    def lock(self) -> Turns: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def plain(self) -> Runners:
        """Returns the target's runner alone."""
        ...

    def with_draft_model(self) -> Runners | None:
        """Returns the runners of the target and of the draft model, whose weights are loaded at the
        first call.

        None if there is no draft model. Raises SpecgenError if its weights cannot be loaded.
        """
        ...

    def has_part(self, kind: str) -> bool:
        """Whether the default trained part of this kind can be run. Loads it, and raises nothing if
        it is damaged."""
        ...

    def with_part(self, kind: str, name: str) -> Runners | None:
        """Returns the runners of the target and of its trained part of this kind; `name` is the
        part's path, or `auto`.

        None if there is no such part. Raises SpecgenError if it cannot be used.
        """
        ...

    def without_layers(self, skip: str) -> Runners:
        """Returns the target's runner, and one that drafts with the target without the layers in
        `skip`, such as `3+5a+7m`.

        Raises SpecgenError if `skip` names no layers of the target, or if they cannot be run one by
        one.
        """
        ...

    def worker(self) -> Worker | None:
        """Returns what runs the draft model during the target's passes (PEARL). None if there is no
        draft model. Raises SpecgenError if the models are closed."""
        ...

    def kept(self, kind: type[K]) -> K:
        """Returns what runs have kept of this kind; makes it at the first call."""
        ...

    def capacity(self, tokens: int) -> int:
        """Returns how many tokens to allocate KV caches for, in a run of so many tokens."""
        ...

    def eos_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end the output; none if the sampling parameters ignore them."""
        ...

    def constraint(self, sampling: SamplingParams) -> Constraint | None:
        """Returns what keeps one output to the grammar in the sampling parameters; None without a
        grammar.

        Raises SpecgenError for a grammar that cannot be used, or not with the target's tokenizer.
        """
        ...

    def checked(self, schedule: Schedule) -> Schedule:
        """Returns the schedule of plain rounds with comparisons of its passes with measured ones:
        see `Measurements.checked`."""
        ...
