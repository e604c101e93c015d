"""Seeds of random numbers."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(seed: int, role: str) -> int:
    """Returns a seed that depends on `seed` and `role` alone. Seeds for different roles are
    independent of each other.

    A role names one use of random numbers: `draft`, `target` or `policy` in a run, or a prompt and
    its repeat in a comparison.
    """
    return int.from_bytes(blake2b(f"{role} {seed}".encode(), digest_size=7).digest(), "big")
