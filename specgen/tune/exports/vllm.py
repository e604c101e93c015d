"""Exports to vLLM: a command."""

from __future__ import annotations

import json
from shlex import quote

from specgen.tune.exports.records import ExportedMethod, ExportedModels


def write(method: ExportedMethod) -> str:
    config = json.dumps(_speculative_config(method))
    return f"{write_plain(method.models)} --speculative-config {quote(config)}"


def write_plain(models: ExportedModels) -> str:
    return f"vllm serve {quote(models.target)}"


def _speculative_config(method: ExportedMethod) -> dict[str, object]:
    settings = method.settings
    if method.drafter == "suffix":
        return {
            "method": "suffix",
            # no tree of earlier requests: tuning runs without `history`
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_min_token_prob": settings["min_prob"],
            "suffix_decoding_max_spec_factor": settings["factor"],
        }
    if method.drafter == "lookup":
        return {
            "method": "ngram",
            "num_speculative_tokens": method.length,
            "prompt_lookup_max": settings["ngram"],
            "prompt_lookup_min": 1,
        }

    config: dict[str, object] = {"method": _method(method.drafter)}
    if method.drafter != "mtp":
        config["model"] = method.draft if method.head is None else method.head.folder
    config["num_speculative_tokens"] = length(method)
    if method.drafter == "pard":
        config["parallel_drafting"] = True
    if method.drafter == "translated":
        config["use_heterogeneous_vocab"] = True
    elif method.sampled:
        config["draft_sample_method"] = "probabilistic"
    return config


def _method(drafter: str) -> str:
    if drafter in ("model", "translated", "pard"):
        return "draft_model"
    if drafter == "assistant":
        return "mtp"
    return "dflash" if drafter == "dflash2" else drafter


def length(method: ExportedMethod) -> int:
    """Returns the number of drafted tokens. Above the number of MTP layers, it has to be a multiple
    of it."""
    layers = 1 if method.head is None else method.head.layers
    if method.length <= layers:
        return method.length
    return method.length // layers * layers
