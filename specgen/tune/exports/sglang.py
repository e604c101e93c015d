"""Exports to SGLang: a command."""

from __future__ import annotations

from shlex import quote

from specgen.tune.exports.records import ExportedMethod, ExportedModels


def write(method: ExportedMethod) -> str:
    algorithm, options = _algorithm(method)
    words = [write_plain(method.models), "--speculative-algorithm", algorithm]
    if method.drafter != "lookup":
        name = method.draft if method.head is None else method.head.folder
        words += ["--speculative-draft-model-path", quote(str(name))]
    for option, number in options.items():
        words += [f"--speculative-{option}", str(number)]
    if method.sampled and method.width == 1 and algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        # a Gemma 4 assistant turns NEXTN into an algorithm that does not have it
        words += [] if method.drafter == "assistant" else ["--speculative-use-rejection-sampling"]
    return " ".join(words)


def write_plain(models: ExportedModels) -> str:
    return f"sglang serve --model-path {quote(models.target)}"


def _algorithm(method: ExportedMethod) -> tuple[str, dict[str, int]]:
    """Returns the name of the algorithm and its numbers. SGLang's numbers of draft tokens count the
    last verified token, too."""
    length = method.length
    if method.drafter == "lookup":
        return "NGRAM", {
            "num-draft-tokens": length + 1,
            # one continuation of each match, and room for the longest match and what follows it
            "ngram-max-bfs-breadth": 1,
            "ngram-max-trie-depth": int(method.settings["ngram"]) + length,
        }
    if method.drafter in ("dflash", "dflash2"):
        return "DFLASH", {"num-draft-tokens": length + 1}
    if method.drafter == "dspark":
        return "DSPARK", {"dspark-block-size": length}

    names = {"model": "STANDALONE", "mtp": "NEXTN", "assistant": "NEXTN"}
    return names.get(method.drafter, method.drafter.upper()), {
        "num-steps": length,
        "eagle-topk": method.width,
        "num-draft-tokens": method.nodes + 1,
    }
