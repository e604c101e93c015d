"""The states of recurrent layers, which can be rolled back: a state, and a record of what each
later token adds to it.

Layers with the gated delta rule (Qwen3-Next, Kimi Linear) and with Mamba2 have a state S [key size,
value size] for each head: that before cache entry `base`. Each later entry i has a key k_i, an
update u_i, and the logarithm c_i of the decay on its path since `base`. With D_ij = exp(c_i - c_j)
where j is i or an ancestor of it, else 0, a query q_i reads

    o_i = exp(c_i) q_i S + sum_j D_ij (q_i k_j) u_j

In Mamba2 u_i is given. With the delta rule u_i = b_i (v_i - exp(c_i) k_i S - sum_{j != i} D_ij (k_i
k_j) u_j), a triangular system for the new tokens (arXiv:2412.06464, section 3.3, with a tree's
ancestors in place of earlier tokens).

A rollback only sets a length. The entries of an accepted path of a tree are moved next to each
other, because k, u and c depend on the path alone. At times committed entries are folded into the
state: S <- exp(c_m) S + sum_i exp(c_m - c_i) k_i u_i^T.

Short convolutions keep their inputs, and read those of a token and of its nearest ancestors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass
from specgen.engine.native.attention_mask import ancestry, unpacked

BLOCK = 64  # tokens of a pass that are run at once
# committed entries that are not folded: a longer rollback (drafts, PEARL's unverified tokens) runs
# the text again
KEPT = 64
_MOST = 128  # entries beyond which committed ones are folded
_ROOM = _MOST + BLOCK  # entries that buffers have room for, if there are no more


class Block(NamedTuple):
    """Tokens of a pass, those of the cache entries `first` to `last` - 1. Entries before
    `committed` are the context's.

    Each token sees all entries before `base`. Of the later ones it sees itself and its ancestors,
    where `seen` [n, last - `base`] is true; None: a token alone, which sees all. `nearest` is the
    entry of the last ancestor before `first`: one for all tokens, or [n] with one for each.
    """

    first: int
    last: int
    committed: int
    base: int
    seen: Tensor | None
    nearest: int | Tensor


class Steps:
    """The tokens of a forward pass, in blocks."""

    def __init__(self, forward_pass: ForwardPass, device: torch.device) -> None:
        self._pass = forward_pass
        self._device = device
        self.first = forward_pass.first
        self.last = forward_pass.last
        self.committed = len(forward_pass.context)
        self.prompt_length = forward_pass.context.prompt_length
        self.blocks = [
            self._block(at, min(at + BLOCK, self.last))
            for at in range(self.first, self.last, BLOCK)
        ]
        self._tables: dict[int, Tensor] = {}

    def _block(self, first: int, last: int) -> Block:
        count = last - first
        device = self._device
        if self._pass.is_chain or last <= self.committed:
            seen = (
                None
                if count == 1
                else torch.ones(count, count, dtype=torch.bool, device=device).tril_()
            )
            return Block(first, last, self.committed, first, seen, first - 1)
        base, _, bits = ancestry(self._pass._replace(first=first, last=last))
        seen = unpacked(bits, last - base, device)
        entries = torch.arange(base - 1, first, device=device)
        old = seen[:, : first - base]
        nearest = torch.where(old, entries[1:], entries[0]).amax(1) if base < first else first - 1
        return Block(first, last, self.committed, base, seen, nearest)

    def ancestors(self, size: int) -> Tensor | None:
        """Returns the entries [n, `size`] of each token's nearest ancestors, its own last; None for
        a chain.

        Entries before the text's beginning are negative.
        """
        if self._pass.is_chain:
            return None
        if size not in self._tables:
            parents = self._pass.draft.parents
            table = []
            for entry in range(self.first, self.last):
                row = [entry]
                for _ in range(size - 1):
                    node = row[0] - self.committed
                    row.insert(0, row[0] - 1 if node < 0 else self.committed + parents[node])
                table.append(row)
            self._tables[size] = upload(torch.tensor(table), self._device)
        return self._tables[size]


class ConvInputs(NamedTuple):
    """The inputs `rows` [room, channels] of a convolution from cache entry `begin` on. Entries
    below 0 are zeros that stand before the text.

    `base` is the smallest length to which it can be rolled back.
    """

    base: int
    begin: int
    rows: Tensor


class State(NamedTuple):
    """A state and its records. H value heads share Hk key heads.

    `state` [Hk, key size, H / Hk, value size] is that before entry `base`, the smallest length to
    which it can be rolled back. Of the entries from there on: `keys` [Hk, room, key size],
    `updates` [H, room, value size], and `decays` [H, 1 + room, channels], the logarithms of the
    decays since `base`. The first is that of the state itself, 0. There is one for all channels of
    the key, or one for each.
    """

    base: int
    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


class Records:
    """What a layer keeps. Only entries after those that count as cached are changed in place; all
    else is replaced in one statement, so that an interruption leaves valid records.

    `_earlier` are the records before they were replaced, with which the end of the prompt can be
    restored for another run, and the length up to which they hold.
    """

    def __init__(self) -> None:
        self._held: Any = None
        self._earlier: tuple[Any, int] | None = None

    def restorable(self, length: int) -> int:
        """Returns the largest length, at most `length`, to which the layer can be rolled back."""
        if self._held is None:
            return 0
        if self._held.base <= length:
            return length
        return (
            min(length, self._earlier[1])
            if self._earlier is not None and self._earlier[0].base <= length
            else 0
        )

    def _at(self, length: int) -> Any:
        """Returns the records, rolled back to a length that `restorable` has returned; None: there
        are none."""
        if self._earlier is not None and length < self._earlier[1]:
            self._earlier = (self._earlier[0], length) if self._earlier[0].base <= length else None
        if self._held is not None and length < self._held.base:
            self._held = None if self._earlier is None else self._earlier[0]
        return self._held

    def _replace(self, old: Any, new: Any, first: int, prompt_length: int) -> None:
        if old is not None and old.base < prompt_length <= first:
            self._earlier = old, first
        self._held = new


class ConvRecords(Records):
    """The inputs of a short convolution that may still be read."""

    def __call__(
        self, steps: Steps, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Returns the output [n, channels] for inputs [n, channels], in float32 or in their wider
        dtype. `weight` is [channels, kernel size], `bias` [channels]."""
        size = weight.shape[1]
        count = x.shape[0]
        rows, begin = self._written(steps, x, size - 1)
        table = steps.ancestors(size)
        start = steps.first - begin - size + 1
        dtype = torch.promote_types(x.dtype, torch.float32)
        total = (
            torch.zeros_like(x, dtype=dtype) if bias is None else bias.to(dtype).expand(count, -1)
        )
        for number, factors in enumerate(weight.to(dtype).t()):
            if table is None:
                part = rows[start + number : start + number + count]
            else:
                part = rows.index_select(0, table[:, number].to(rows.device) - begin)
            total = torch.addcmul(total, part.to(dtype), factors)
        return total

    def _written(self, steps: Steps, x: Tensor, before: int) -> tuple[Tensor, int]:
        """Writes the inputs. Returns rows that hold them and the `before` ones before them, and the
        entry of the first row."""
        first = steps.first
        last = steps.last
        held = self._at(first)
        if held is not None and last - held.begin <= held.rows.shape[0]:
            held.rows[first - held.begin : last - held.begin] = x
            return held.rows, held.begin
        begin = -before if held is None else held.begin
        old = x.new_zeros(before, x.shape[1]) if held is None else held.rows[: first - begin]
        joined = torch.cat((old, x))
        base = max(begin + before, min(last, steps.committed) - KEPT)
        kept = joined[base - before - begin :]
        rows = _zeros(x, max(before + _ROOM, kept.shape[0] + BLOCK), x.shape[1])
        rows[: kept.shape[0]] = kept
        self._replace(held, ConvInputs(base, base - before, rows), first, steps.prompt_length)
        return joined, begin

    def gather(self, indices: Sequence[int], start: int) -> None:
        rows = self._held.rows
        begin = self._held.begin
        rows[start - begin : start - begin + len(indices)] = rows[_moved(indices, begin, rows)]


class StateRecords(Records):
    """A state and what later tokens add to it."""

    def __call__(
        self,
        steps: Steps,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Returns what queries read, [n, H, value size]. All is in float32, or in float64.

        `query` and `key` are [n, Hk, key size], `value` [n, H, value size], `decay` [n, H,
        channels] is the logarithm of the decay. With `beta` [n, H] updates follow from the delta
        rule, otherwise they are the values.
        """
        # [Hk, 1 or 2, n, key size]
        rows = torch.stack((query,) if beta is None else (query, key)).permute(2, 0, 1, 3)
        key = key.transpose(0, 1)
        value = value.transpose(0, 1)
        decay = decay.transpose(0, 1)
        outputs = []
        for block in steps.blocks:
            part = slice(block.first - steps.first, block.last - steps.first)
            held = self._with_room(block, steps.prompt_length, key, value, decay)
            own_beta = None if beta is None else beta[part].t()[..., None]
            outputs.append(
                _read(
                    held,
                    block,
                    rows[:, :, part],
                    key[:, part],
                    value[:, part],
                    decay[:, part],
                    own_beta,
                )
            )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).transpose(0, 1)

    def _with_room(
        self, block: Block, prompt_length: int, key: Tensor, value: Tensor, decay: Tensor
    ) -> State:
        """Returns the records with room for a block. Folds committed entries into the state, if
        there are many."""
        held: State | None = self._at(block.first)
        if held is None:
            heads = key.shape[0]
            state = _zeros(key, heads, key.shape[2], value.shape[0] // heads, value.shape[2])
            held = State(
                0, state, key[:, :0], value[:, :0], _zeros(decay, decay.shape[0], 1, decay.shape[2])
            )
        used = block.first - held.base
        room = held.keys.shape[1]
        count = block.last - block.first
        folded = max(0, min(block.first, block.committed) - KEPT - held.base)
        if used + count <= room and (used <= _MOST or folded < BLOCK):
            return held
        kept = slice(folded, used)
        room = max(_ROOM, used - folded + count + BLOCK)
        new = State(
            held.base + folded,
            _folded(held, folded),
            _zeros(key, key.shape[0], room, key.shape[2]),
            _zeros(value, value.shape[0], room, value.shape[2]),
            _zeros(decay, decay.shape[0], 1 + room, decay.shape[2]),
        )
        new.keys[:, : used - folded] = held.keys[:, kept]
        new.updates[:, : used - folded] = held.updates[:, kept]
        new.decays[:, : used - folded + 1] = (
            held.decays[:, folded : used + 1] - held.decays[:, folded : folded + 1]
        )
        self._replace(held, new, block.first, prompt_length)
        return new

    def gather(self, indices: Sequence[int], start: int) -> None:
        _, _, keys, updates, decays = self._held
        moved = _moved(indices, self._held.base, keys)
        at = start - self._held.base
        keys[:, at : at + len(indices)] = keys[:, moved]
        updates[:, at : at + len(indices)] = updates[:, moved]
        decays[:, at + 1 : at + 1 + len(indices)] = decays[:, moved + 1]


def _read(
    held: State,
    block: Block,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """Writes the records of a block, and returns what its queries read, [H, n, value size].

    `rows` [Hk, 1 or 2, n, key size] are queries, and with the delta rule keys. The others are as in
    `StateRecords`, heads first.
    """
    (key_heads, sorts, count, size), heads = rows.shape, value.shape[0]
    old = block.first - held.base
    end = block.last - held.base
    nearest = block.nearest - held.base + 1
    seen = block.seen
    before = (
        held.decays[:, nearest : nearest + 1]
        if isinstance(nearest, int)
        else held.decays[:, nearest.to(key.device)]
    )
    total = before + (
        decay if seen is None else seen[:, block.first - block.base :].to(decay) @ decay
    )
    held.keys[:, old:end] = key
    held.decays[:, old + 1 : end + 1] = total
    logs = total[:, :, None] - held.decays[:, None, 1 : end + 1]  # [H, n, entries, channels]
    if seen is not None:
        logs[:, :, block.base - held.base :].masked_fill_(
            ~seen[:, :, None].to(key.device), -torch.inf
        )
    pairs = logs.exp_()
    keys = held.keys[:, :end]
    state = held.state.flatten(2)
    if decay.shape[2] == 1:
        flat = rows.reshape(key_heads, sorts * count, size)
        dots = (flat @ keys.transpose(1, 2)).view(key_heads, 1, sorts, count, end)
        weights = (dots * pairs.view(key_heads, -1, 1, count, end)).view(heads, sorts, count, end)
        read = (
            (flat @ state).view(key_heads, sorts, count, -1, value.shape[2]).permute(0, 3, 1, 2, 4)
        )
        from_past = read.reshape(heads, sorts, count, -1) * total.exp()[:, None]
    else:
        weights = torch.einsum("hsnd,hmd,hnmd->hsnm", rows, keys, pairs)
        from_past = (rows * total.exp()[:, None]) @ state[:, None]
    # a product of four dimensions would copy the updates
    of_old = weights[..., :old].reshape(heads, sorts * count, old)
    from_past = from_past + torch.bmm(of_old, held.updates[:, :old]).view_as(from_past)
    update = value
    own = weights[..., old:]
    if beta is not None:
        update = beta * (value - from_past[:, 1])
        if count > 1:
            update = torch.linalg.solve_triangular(
                beta * own[:, 1], update, upper=False, unitriangular=True
            )
    held.updates[:, old:end] = update
    return from_past[:, 0] + own[:, 0] @ update


def _folded(held: State, count: int) -> Tensor:
    """Returns the state after the first `count` entries. (Without any, it is the same tensor.)"""
    if count == 0:
        return held.state
    keys = held.keys[:, :count]
    updates = held.updates[:, :count]
    key_heads, _, group, size = held.state.shape
    after = held.decays[:, count]
    factors = (after[:, None] - held.decays[:, 1 : count + 1]).exp()  # [H, count, channels]
    if factors.shape[2] == 1:
        updates = updates * factors
    else:
        keys = keys * factors
    state = held.state * after.exp().view(key_heads, group, -1).transpose(1, 2)[..., None]
    added = updates.view(key_heads, group, count, size).transpose(1, 2).flatten(2)
    state.flatten(2).baddbmm_(keys.transpose(1, 2), added)  # in place: `state` is contiguous
    return state


def unit_length(vectors: Tensor) -> Tensor:
    """Returns queries or keys [..., key size] divided by their length, as the delta rule takes
    them."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _moved(indices: Sequence[int], base: int, like: Tensor) -> Tensor:
    return upload(torch.tensor(indices), like.device) - base


def _zeros(like: Tensor, *shape: int) -> Tensor:
    # tensors made in inference mode could not be written outside it
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


class RecurrentStates:
    """The records of all recurrent layers of a model, by layer: part of a KV cache."""

    def __init__(self) -> None:
        self.convs: defaultdict[Hashable, ConvRecords] = defaultdict(ConvRecords)
        self.states: defaultdict[Hashable, StateRecords] = defaultdict(StateRecords)

    @property
    def _all(self) -> list[ConvRecords | StateRecords]:
        return [*self.convs.values(), *self.states.values()]

    def restorable(self, length: int) -> int:
        """Returns the largest length, at most `length`, to which all layers can be rolled back; see
        `forward_pass.Cache`."""
        records = self._all
        while True:  # after an interruption, layers may have other earlier records
            shortest = min((record.restorable(length) for record in records), default=length)
            if shortest >= length:
                return length
            length = shortest

    def gather(self, indices: Sequence[int], start: int) -> None:
        for records in self._all:
            records.gather(indices, start)
