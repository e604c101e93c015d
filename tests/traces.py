"""Traces made by hand, for the tests of what reads and shows them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen.base.types import PHASES

Line = dict[str, Any]
WORDS = [
    "<eos>",
    " starts",
    " with",
    " 24",
    " pencils",
    ".",
    " 3",
    " packs",
    " of",
    " baskets",
    "Hello",
    "\n    ",
    " wor",
    "ld",
]


def start_line(method: str = "svip", **changes: Any) -> Line:
    sampling = {
        "max_new_tokens": 128,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 3,
        "stop": [],
        "ignore_eos": False,
    }
    return {
        "type": "start",
        "method": method,
        "settings": {"threshold": 0.4, "c": 0.15, "max_draft": 40} if method == "svip" else {},
        "lossless": True,
        "target": "demo/target",
        "draft": "demo/draft",
        "device": "cpu",
        "dtype": "float32",
        "prompt_ids": [1, 2, 3],
        "sampling": sampling,
        "versions": {
            "specgen": "0.1.0",
            "python": "3.11.2",
            "torch": "2.13.0",
            "transformers": "5.23.0",
        },
        **changes,
    }


def round_line(
    index: int,
    draft: Sequence[int] = (),
    accepted: int = 0,
    token: int | None = 10,
    source: str | None = None,
    **changes: Any,
) -> Line:
    """The line of a round whose draft is a chain of the tokens `draft`, of which the first
    `accepted` are accepted."""
    return {
        "type": "round",
        "index": index,
        "mode": "sequential" if index else "prefill",
        "draft_ids": list(draft),
        "draft_texts": [WORDS[token] for token in draft],
        "parents": list(range(-1, len(draft) - 1)),
        "accepted_ids": list(draft[:accepted]),
        "token_id": token,
        "token_text": None if token is None else WORDS[token],
        "source": source,
        "stop_reason": "√cH 0.43 > 0.40" if draft else None,
        "entropies": [0.5] * len(draft),
        "top_probs": [0.75] * len(draft),
        "policy": None,
        "seconds": dict.fromkeys(PHASES, 0.0)
        | ({"draft": 0.25, "verify": 0.5} if index else {"prefill": 0.125}),
        **changes,
    }


def summary_line(rounds: Sequence[Line], finish_reason: str = "length") -> Line:
    """The summary line of a run with these round lines."""
    own = [[line["token_id"]] if line["token_id"] is not None else [] for line in rounds]
    token_ids = [
        token
        for line, last in zip(rounds, own, strict=True)
        for token in (*line["accepted_ids"], *last)
    ]
    text = "".join(WORDS[token] for token in token_ids).removesuffix(WORDS[0])
    return {
        "type": "summary",
        "method": "svip",
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
    }


def a_run(method: str = "svip", **changes: Any) -> list[Line]:
    """The lines of a run with six rounds: a whole draft, corrections, a discarded tail, an
    end-of-sequence inside the draft."""
    rounds = [
        round_line(0, token=10),
        round_line(1, (1, 2, 3), 3, 4, "bonus"),
        round_line(2, (4, 5, 6, 7, 8), 3, 9, "correction"),
        round_line(3, (7,), 0, 9, "correction"),
        round_line(4, (), 0, 11, None),
        round_line(5, (12, 13, 5, 0), 4, None, None, stop_reason="eos"),
    ]
    return [start_line(method, **changes), *rounds, summary_line(rounds, "eos")]


def write(path: Path, *lines: Line) -> Path:
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    return path


def a_recorded_run(
    rounds: int, seed: int = 0, method: str = "beta-ts", **changes: Any
) -> list[Line]:
    """The lines of a run of random rounds with all that a trace can have: entropies, `overlap` and
    `kl`, the bandit's state."""
    rng = random.Random(seed)
    alpha = 1.0
    beta = 1.0
    made = [round_line(0, token=10)]
    for index in range(1, rounds):
        draft = [rng.randrange(1, len(WORDS)) for _ in range(rng.choice((1, 2, 3, 4, 5, 8)))]
        entropies = [rng.expovariate(1.2) for _ in draft]
        kl = [entropy * rng.uniform(0.1, 0.9) for entropy in entropies]
        overlap = [1 - rng.uniform(0.4, 1.0) * math.sqrt(1 - math.exp(-figure)) for figure in kl]
        accepted = next(
            (position for position, chance in enumerate(overlap) if rng.random() > chance),
            len(draft),
        )
        alpha = alpha + accepted
        beta = beta + min(accepted + 1, len(draft)) - accepted
        source = "bonus" if accepted == len(draft) else "correction"
        line = round_line(index, draft, accepted, rng.randrange(1, len(WORDS)), source)
        top_probs = [math.exp(-entropy) for entropy in entropies]
        seconds = {
            "prefill": 0.0,
            "draft": 0.002 * len(draft),
            "verify": 0.006,
            "sample": 0.0003,
            "other": 0.0001,
        }
        line |= {
            "entropies": entropies,
            "top_probs": top_probs,
            "overlap": overlap,
            "kl": kl,
            "seconds": seconds,
        }
        line["predicted"] = [*top_probs[:-1], None]
        made.append(
            line | {"policy": {"alpha": alpha, "beta": beta}, "stop_reason": "bandit θ 0.71"}
        )
    return [start_line(method, **changes), *made, summary_line(made)]
