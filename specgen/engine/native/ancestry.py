"""Which tokens the tokens of a forward pass see, as bits: the same for chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specgen.engine.forward_pass import ForwardPass


class Ancestry(NamedTuple):
    """Which tokens those of a forward pass see. A token is known by its cache index.

    Each token of the pass sees all tokens before `base`. Bit j of `bits[i]` is 1 if the pass's i-th token sees token `base` + j:
    an ancestor or itself. `depths` are the positions of the tokens from `base` on, up to the pass's last one, minus `base`.
    """

    base: int
    depths: Sequence[int]
    bits: Sequence[int]


def base_of(forward_pass: ForwardPass) -> int:
    """Returns `Ancestry.base` of a forward pass."""
    return forward_pass.first if forward_pass.is_chain else min(forward_pass.first, len(forward_pass.context))


def ancestry(forward_pass: ForwardPass) -> Ancestry:
    context, draft, first, last = forward_pass[:4]
    base = base_of(forward_pass)
    chain = last - base if forward_pass.is_chain else min(last, len(context)) - base
    depths = list(range(chain))
    bits = [(2 << index) - 1 for index in range(chain)]
    if forward_pass.is_chain:
        return Ancestry(base, depths, bits)
    committed = (1 << chain) - 1
    for parent in draft.parents[: last - base - chain]:
        own = 1 << len(bits)
        depths.append(chain if parent < 0 else depths[chain + parent] + 1)
        bits.append((committed if parent < 0 else bits[chain + parent]) | own)
    return Ancestry(base, depths, bits[first - base :])
