"""Length policies: when does drafting stop? Any of them works on any drafter that can feed it (EESD Table 5, SVIP Tables 3, 4).

A policy is asked after each drafted token, which is kept whatever it says: only so does a policy that looks at the token itself
leave the output's distribution alone. After verification it learns how many were drafted and accepted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

Feeds = frozenset[str]


@dataclass(slots=True)
class Step:
    """One drafted token as a policy sees it. `place` counts from 1; what the drafter was not asked to feed is NaN.

    `entropy` (nats) is that of the unwarped distribution; `prob` the token's own probability, in the distribution that it was
    drawn from or, in greedy decoding, the unwarped one.
    """

    place: int
    entropy: float = math.nan
    prob: float = math.nan


class LengthPolicy(Protocol):
    """What stops a draft. `reason` says in a few words why the last one ended."""

    needs: ClassVar[Feeds]
    reason: str

    def keep_drafting(self, step: Step) -> bool: ...

    def observe(self, drafted: int, accepted: int) -> None: ...

    def state(self) -> Mapping[str, float] | None:
        """What it has learned so far, for a trace."""
        ...


class Fixed:
    """Always k tokens (Leviathan et al. 2023)."""

    needs: ClassVar[Feeds] = frozenset()

    def __init__(self, k: int) -> None:
        self.k = k
        self.reason = f"limit {k}"

    def keep_drafting(self, step: Step) -> bool:
        return step.place < self.k

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class Always:
    """Never ends a draft: its limit stands elsewhere, as PEARL's window does."""

    needs: ClassVar[Feeds] = frozenset()
    reason = ""

    def keep_drafting(self, step: Step) -> bool:
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class Heuristic:
    """Transformers' schedule: two more after a draft that was accepted whole, one less otherwise, never below one."""

    needs: ClassVar[Feeds] = frozenset()

    def __init__(self, k: int, max_draft: int) -> None:
        self.k, self.max_draft = min(k, max_draft), max_draft
        self.reason = f"limit {self.k}"

    def keep_drafting(self, step: Step) -> bool:
        self.reason = f"limit {self.k}"
        return step.place < self.k

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.max_draft) if accepted == drafted else max(self.k - 1, 1)

    def state(self) -> Mapping[str, float]:
        return {"k": self.k}


class Confidence:
    """Stop after a token that the draft itself gave a probability below the threshold (transformers' dynamic length)."""

    needs: ClassVar[Feeds] = frozenset({"prob"})

    def __init__(self, threshold: float, max_draft: int) -> None:
        self.threshold, self.max_draft = threshold, max_draft
        self.reason = ""

    def keep_drafting(self, step: Step) -> bool:
        if step.prob < self.threshold:
            self.reason = f"prob {step.prob:.2f} < {self.threshold:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.place < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class SVIP:
    """Stop where the draft's entropy says that acceptance is doubtful: sqrt(c * H) > threshold (SVIP section 3.2).

    With the authors' constant c, for which their printed thresholds hold. H is taken at temperature 1, in greedy decoding too.
    """

    needs: ClassVar[Feeds] = frozenset({"entropy"})

    def __init__(self, threshold: float, c: float, max_draft: int) -> None:
        self.threshold, self.c, self.max_draft = threshold, c, max_draft
        self.reason = ""

    def keep_drafting(self, step: Step) -> bool:
        doubt = math.sqrt(self.c * step.entropy)
        if doubt > self.threshold:
            self.reason = f"√cH {doubt:.2f} > {self.threshold:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.place < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class BetaTS:
    """Thompson sampling of the acceptance rate: go on with probability theta ~ Beta(alpha, beta) (EESD Algorithm 2, mended).

    The update counts the tokens that the target really judged: `accepted` successes in `min(accepted + 1, drafted)` trials. The
    printed one has no fixed point for an acceptance rate below 1.
    """

    needs: ClassVar[Feeds] = frozenset()

    def __init__(self, alpha: float, beta: float, max_draft: int, seed: int) -> None:
        self.alpha, self.beta, self.max_draft = alpha, beta, max_draft
        self.reason = ""
        self._rng = random.Random(seed)

    def keep_drafting(self, step: Step) -> bool:
        theta = self._rng.betavariate(self.alpha, self.beta)
        if self._rng.random() >= theta:
            self.reason = f"bandit θ {theta:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.place < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        judged = min(accepted + 1, drafted)
        self.alpha += accepted
        self.beta += judged - accepted

    def state(self) -> Mapping[str, float]:
        return {"alpha": self.alpha, "beta": self.beta}
