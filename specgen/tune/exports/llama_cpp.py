"""Exports to llama.cpp: a command."""

from __future__ import annotations

from shlex import quote

from specgen.tune.exports.records import HEAD, TARGET, ExportedMethod, ExportedModels

_TYPES = {
    "model": "draft-simple",
    "mtp": "draft-mtp",
    "assistant": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dspark": "draft-dspark",
}


def write(method: ExportedMethod) -> str:
    command = write_plain(method.models)
    if method.drafter == "lookup":
        match = _ngram_options(int(method.settings["ngram"]), method.length)
        return f"{command} --spec-type ngram-simple {match}"

    words = [command]
    if method.drafter == "model":
        words.append(f"-md {quote(method.models.draft_gguf or 'DRAFT.gguf')}")
    elif method.drafter != "mtp":
        words.append(f"-md {HEAD}")
    words.append(f"--spec-type {_ngram_type(method)}{_TYPES[method.drafter]}")
    words.append(f"--spec-draft-n-max {length(method)}")
    if method.drafter == "model":
        threshold = method.settings.get("threshold", 0.0)
        words.append(f"--spec-draft-n-min 0 --spec-draft-p-min {threshold:g}")
    if method.copies:
        words.append(_ngram_options(method.copies, method.length))
    return " ".join(words)


def copies(method: ExportedMethod) -> str:
    if method.copies:
        return f"a match in the text of exactly {method.copies} tokens comes before the draft"
    return (
        "a match in the text comes before the draft: ngram-mod by itself looks for 24 tokens "
        "and copies 48 to 64"
    )


def write_plain(models: ExportedModels) -> str:
    return f"llama-server -m {quote(models.target_gguf or TARGET)}"


def _ngram_type(method: ExportedMethod) -> str:
    """Returns the type that copies from the text, with a comma; llama.cpp asks it before the
    drafter."""
    if method.copies is None:
        return ""
    return "ngram-simple," if method.copies else "ngram-mod,"


def _ngram_options(size: int, length: int) -> str:
    longest = max(size, length)  # drafts shorter than the n-gram are dropped
    return f"--spec-ngram-simple-size-n {size} --spec-ngram-simple-size-m {longest}"


def length(method: ExportedMethod) -> int:
    """Returns the number of drafted tokens. Several MTP layers draft one token each."""
    layers = 1 if method.head is None else method.head.layers
    return method.length if layers == 1 else min(method.length, layers)
