"""Makes the JSON lines that record a run (one generation), for `--json` and for trace files. Their
keys are documented in the README and do not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specgen.base.machine import versions
from specgen.base.types import Round, TokenLogProbs

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.pair.pair import Pair


def start_line(pair: Pair, request: Request, run: Run) -> dict[str, Any]:
    """The first line of a recorded run: method, models, prompt, settings and the installed
    versions.

    `sampling` contains the seed that was really used. `draft` is null if no draft model was used;
    `draft_dtype` is left out if it is `dtype`. `costs` are the pass times that PEARL's window was
    computed from, left out if there are none.
    """
    method = request.method
    target = pair.target
    draft = method.draft_of(pair.models)
    line = {
        "type": "start",
        "method": method.name,
        "settings": method.as_dict(run.settings),
        "lossless": method.lossless,
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "device": str(target.device),
        "dtype": target.dtype_name,
        "prompt_ids": request.prompt_ids,
        "prompt_text": pair.tokenizer.text_of(request.prompt_ids),
        "sampling": asdict(request.sampling)
        | {"seed": run.seed, "stop": list(request.sampling.stop)},
    }
    if draft is not None and draft.dtype_name != target.dtype_name:
        line["draft_dtype"] = draft.dtype_name
    return (
        line
        | {"versions": versions()}
        | ({} if run.costs is None else {"costs": run.costs.as_dict()})
    )


def round_line(
    round_: Round, text_of: Callable[[Sequence[int]], str], *, record: bool = False
) -> dict[str, Any]:
    """The line of a trace for one round, that is one target pass with the draft that it verified.
    `text_of` turns token ids into text.

    With `record` it also contains, for each drafted token, sum(min(p, q)) as `overlap` and KL(q||p)
    as `kl`, where p is the target's distribution and q the draft's. `overlap` and `kl` are null for
    tokens without known distributions.

    With log-probabilities in the verdict, `log_probs` has that of each token that the round added
    to the output, and `top_ids`, `top_texts` and `top_log_probs` have a list of the likeliest
    tokens at its position.
    """
    draft = round_.draft
    verdict = round_.verdict
    line = {
        "type": "round",
        "index": round_.index,
        "mode": round_.mode,
        "draft_ids": list(draft.tokens),
        "draft_texts": [text_of([token]) for token in draft.tokens],
        "parents": list(draft.parents),
        "accepted_ids": round_.accepted_ids,
        "token_id": verdict.token,
        "token_text": None if verdict.token is None else text_of([verdict.token]),
        "source": verdict.source,
        "stop_reason": draft.stop_reason,
        "copied": draft.is_copied,
        "entropies": list(draft.entropies),
        "top_probs": list(draft.top_probs),
        "predicted": [None if math.isnan(share) else share for share in draft.predicted],
        "policy": round_.policy_state,
        "target_passes": round_.target_passes,
        "seconds": dict(round_.seconds),
    }
    if round_.unjudged:
        line["unjudged"] = round_.unjudged
    if verdict.log_probs:
        line |= _scores(verdict.log_probs, text_of)
    if record:
        figures: dict[str, Any] = (
            {"overlap": (), "kl": ()} if verdict.agreement is None else asdict(verdict.agreement)
        )
        # PEARL drafts ahead: its last tokens have no values yet
        for name, values in figures.items():
            line[name] = [*values, *[None] * (len(draft.tokens) - len(values))]
    return line


def _scores(
    entries: Sequence[TokenLogProbs], text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Returns a round's log-probabilities by key: None for tokens that the target excludes."""

    def finite(numbers: Sequence[float]) -> list[float | None]:
        return [number if math.isfinite(number) else None for number in numbers]

    return {
        "log_probs": finite([entry.log_prob for entry in entries]),
        "top_ids": [list(entry.top) for entry in entries],
        "top_texts": [[text_of([token]) for token in entry.top] for entry in entries],
        "top_log_probs": [finite(entry.top_log_probs) for entry in entries],
    }
