"""What the length policy `adaptive` learns about a drafter, from run to run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.methods.acceptance_calibration import AcceptanceCalibration, Prior
from specgen.methods.drafting_guard import DraftingGuard
from specgen.methods.first_acceptance import FirstAcceptance
from specgen.methods.lookup_gain import LearnedLookup

OPTION = 1.1  # a further token also shows whether those after it are worth drafting, which its own worth does not count
_EDGES = (-2.0, -1.2, -0.6, -0.2, 0.2, 0.6, 1.0, 1.5, 2.0, 2.7, 3.5, 4.5)
_FOLLOWING_EDGES = (1.2, 1.6, 2.0, 2.4)
_MODEL_RATE, _LOOKUP_RATE = 0.8, 0.5  # acceptance rates from which the first worth of a token is computed
_FADING = 0.97  # of all sums over rounds but `gains`, for each round
_GAIN_FADING = 0.9
_COST_TOKENS = 10.0  # tokens that the first worth counts as
_DRAFTS = 5.0  # drafts that the first `later`, `waste` and `gains` count as

# Fitted to the drafts of the bundled draft model, of the exit layer and of a near copy of the target, on half of the prompts that
# `compare` takes from `examples.yaml` and on those for tuning: scores of a drafted token, and of the token after it.
_GREEDY = (
    Prior(-0.06, (0.74, 0.08, 0.37, 0.83), _EDGES, 5, 5, 5),
    Prior(1.27, (0.50, -0.19, 0.30, 0.31), _FOLLOWING_EDGES, 10, 20),
)
_SAMPLING = (
    Prior(-0.64, (-0.25, 0.62, -0.04, 0.26), _EDGES, 5, 5, 5),
    Prior(2.09, (-0.16, -0.15, -0.83, 0.11), _FOLLOWING_EDGES, 10, 20),
)


@dataclass(slots=True)
class Learned:
    """What `adaptive` has learned about a drafter of a pair. Kept from run to run, and saved in a profile.

    `token` predicts the acceptance of a drafted token, `following` that of the token after it, both given that the tokens before
    were accepted; `first` that of a draft's first token. `cost` and `tokens` are sums over rounds, from which the worth of a
    token is computed. `later` and `waste` are about all tokens of a draft but the first, each a sum and the number of drafts:
    what they gained where the first one was accepted, and what they cost where it was rejected. `gains` are the same for whole
    drafts of a model, to be compared with prompt lookup's. All sums fade. Costs and gains are in units of a target pass over one
    token. `lookup` is about drafts of prompt lookup.
    """

    token: AcceptanceCalibration
    following: AcceptanceCalibration
    first: FirstAcceptance
    cost: float
    tokens: float
    later: list[float] = field(default_factory=lambda: [0.0, _DRAFTS])
    waste: list[float] = field(default_factory=lambda: [0.0, _DRAFTS])
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    guard: DraftingGuard = field(default_factory=DraftingGuard)
    lookup: LearnedLookup = field(default_factory=LearnedLookup)

    @classmethod
    def prior(cls, costs: DraftingCosts, temperature: float, *, has_model: bool = True) -> Learned:
        """Returns what is assumed before anything is learned, for decoding at these costs and this temperature (0: greedily).

        `has_model`: the drafter, or one of two, runs a model.
        """
        share = min(temperature, 1.0)
        pairs = zip(_GREEDY, _SAMPLING, strict=True)
        token, following = (AcceptanceCalibration(greedy.mixed(sampling, share)) for greedy, sampling in pairs)
        worth = costs.time_per_token(_MODEL_RATE if has_model else _LOOKUP_RATE)
        return cls(token, following, FirstAcceptance(), _COST_TOKENS * worth, _COST_TOKENS)

    @property
    def worth(self) -> float:
        """What an output token is worth: the cost per output token so far, at most 1, the cost with plain decoding."""
        return min(1.0, self.cost / self.tokens)

    @property
    def start_gain(self) -> float:
        """The expected gain of drafting at all, without the cost of the first token."""
        accepted = self.first.mean
        later, waste = max(0.0, self.later[0] / self.later[1]), self.waste[0] / self.waste[1]
        return accepted * (self.worth * OPTION + later) - (1 - accepted) * waste

    @property
    def mean_gain(self) -> float:
        """The mean gain of the model's last drafts, taken as 1 - `worth`, what rounds gain, before it has drafted."""
        gain, count = self.gains
        return (gain + _DRAFTS * (1 - self.worth)) / (count + _DRAFTS)

    def add_round(self, cost: float, tokens: int) -> None:
        """Adds a round, with or without a draft: its cost, and the number of output tokens that it gave."""
        self.cost = _FADING * self.cost + cost
        self.tokens = _FADING * self.tokens + tokens

    def add_draft(self, accepted: int, cost: float, cost_of_first: float) -> None:
        """Adds a model's draft: the number of accepted tokens, its cost of drafting and verification, and its first token's."""
        if accepted:
            gain = self.worth * (accepted - 1) - cost + cost_of_first
            self.later = [_FADING * self.later[0] + gain, _FADING * self.later[1] + 1]
        else:
            self.waste = [_FADING * self.waste[0] + cost - cost_of_first, _FADING * self.waste[1] + 1]
        self.gains = [_GAIN_FADING * self.gains[0] + accepted * self.worth - cost, _GAIN_FADING * self.gains[1] + 1]

    def fade_gains(self) -> None:
        """Lets the gains of the model's drafts fade in a round that prompt lookup drafted, so that the model is tried again."""
        self.gains = [_GAIN_FADING * number for number in self.gains]

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the numbers to be saved in a profile, by name. The guards are not saved: they are about the latest rounds."""
        saved = {"first": self.first.as_list(), "worth": [self.cost, self.tokens]}
        saved |= {"later": self.later, "waste": self.waste, "gains": self.gains}
        for name, calibration in self._calibrations().items():
            saved |= {f"{name}_{numbers}": values for numbers, values in calibration.as_dict().items()}
        return saved

    @classmethod
    def of_dict(cls, saved: Mapping[str, Sequence[float]], temperature: float) -> Learned:
        """Returns what `as_dict` returned. Raises ValueError if numbers are missing, if there are others, or if they cannot be.

        `temperature`: at which it was learned.
        """
        learned = cls.prior(DraftingCosts.linear(0.0, 0.0), temperature)
        expected = learned.as_dict()
        for name in {**expected, **saved}:
            if name not in saved or name not in expected:
                raise ValueError(f"{name} is {'missing' if name in expected else 'unknown'}")
            if len(saved[name]) != len(expected[name]):
                raise ValueError(f"{name} has {len(saved[name])} numbers instead of {len(expected[name])}")
            if not all(map(math.isfinite, saved[name])):
                raise ValueError(f"{name} has an infinite number")
        learned.first = FirstAcceptance.of_list(saved["first"])
        learned.cost, learned.tokens = saved["worth"]
        learned.later, learned.waste, learned.gains = (list(saved[name]) for name in ("later", "waste", "gains"))
        if min(learned.cost, learned.tokens, learned.later[1], learned.waste[1]) <= 0 or learned.gains[1] < 0:
            raise ValueError("worth, later, waste or gains counts no tokens or drafts")
        for name, calibration in learned._calibrations().items():
            own = {key.removeprefix(f"{name}_"): values for key, values in saved.items() if key.startswith(f"{name}_")}
            found = AcceptanceCalibration.of_dict(calibration.prior, own)
            if name == "lookup":
                learned.lookup.acceptance = found
            else:
                setattr(learned, name, found)
        return learned

    def _calibrations(self) -> dict[str, AcceptanceCalibration]:
        return {"token": self.token, "following": self.following, "lookup": self.lookup.acceptance}

    def copy(self) -> Learned:
        parts = {name: getattr(self, name).copy() for name in ("token", "following", "first", "guard", "lookup")}
        return replace(self, **parts, later=list(self.later), waste=list(self.waste), gains=list(self.gains))
