"""Exports to TensorRT-LLM: a config file."""

from __future__ import annotations

from shlex import quote

from specgen.tune.exports.records import ExportedMethod, ExportedModels

_DECODING_TYPES = {
    "model": "Draft_Target",
    "pard": "PARD",
    "lookup": "NGram",
    "mtp": "MTP",
    "eagle3": "Eagle3",
    "dflash": "DFlash",
}
_MATCH = 4  # TensorRT-LLM's own length of a match to copy
_SUFFIX_AUTOMATON = ("mtp", "eagle3", "pard")


def write(method: ExportedMethod) -> str:
    import yaml

    content: dict[str, object] = {}
    if method.drafter in ("model", "lookup"):
        content["disable_overlap_scheduler"] = True
    content["speculative_config"] = _speculative_config(method)
    written = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000).rstrip()
    command = f"{write_plain(method.models)} --config config.yaml"
    return f"# config.yaml, for: {command}\n{written}"


def copies(method: ExportedMethod) -> str | None:
    if method.drafter not in _SUFFIX_AUTOMATON:
        return None
    return (
        "matches in the text replace the drafter's tokens, which it drafts nevertheless; of "
        "TensorRT-LLM, the release candidates of 1.3 and 1.4 have this"
    )


def write_plain(models: ExportedModels) -> str:
    return f"trtllm-serve {quote(models.target)}"


def _speculative_config(method: ExportedMethod) -> dict[str, object]:
    config: dict[str, object] = {
        "decoding_type": _DECODING_TYPES[method.drafter],
        "max_draft_len": method.length,
    }
    if method.drafter == "lookup":
        # each request searches its own text, and the latest match counts, as here
        config |= {
            "max_matching_ngram_size": method.settings["ngram"],
            "is_public_pool": False,
            "is_use_oldest": False,
        }
    elif method.drafter != "mtp":
        config["speculative_model"] = method.draft if method.head is None else method.head.folder
    if method.drafter == "eagle3" and method.width != 1:
        # the bounds that TensorRT-LLM sets
        most = min(max(method.nodes, method.length), method.width * method.length)
        config |= {
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": method.width,
            "max_total_draft_tokens": most,
        }
    if method.copies is not None and method.drafter in _SUFFIX_AUTOMATON:
        config["sa_config"] = {"threshold": method.copies or _MATCH}
    return config
