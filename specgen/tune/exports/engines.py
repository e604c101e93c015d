"""The table of the engines to export to, and of what each of them runs.

`tests/bench/check_exports.py` compares the options with the engines themselves. Imports little, as
the help texts list the engines.
"""

from __future__ import annotations

from collections.abc import Mapping

from specgen.tune.exports import (
    llama_cpp,
    lmstudio,
    mlx,
    ollama,
    sglang,
    tensorrt_llm,
    transformers,
    vllm,
)
from specgen.tune.exports.records import Engine

_CONVERT_HEAD = "the head: convert_hf_to_gguf.py {head} --target-model-dir {target}"
_OWN_LAYERS = "the GGUF file has to hold the MTP layers (otherwise name theirs with -md)"
_NEW_TENSORRT = "of TensorRT-LLM, the release candidates of 1.3 and 1.4 have it"
_SHORTER_BLOCKS = "mlx-vlm drafts shorter blocks where few of their tokens are accepted"
_MODEL_KEYS = "models are named by their keys in LM Studio; not tried here"
_DSPARK_KEYS = f"{_MODEL_KEYS}, and only recent versions have this option"

# By the name of --export, in the order in which help lists them.
ENGINES: Mapping[str, Engine] = {
    "transformers": Engine(
        transformers.write,
        transformers.write_plain,
        {
            "model": "",
            "translated": "",
            "lookup": "",
            "mtp": "",
            "assistant": "",
        },
        policies={
            "heuristic": (
                "transformers' schedule has no maximum draft length: {max_draft} is left out"
            ),
            "confidence": "",
        },
        judges=("model", "translated", "mtp"),
        refuses=transformers.refuses,
        length=transformers.length,
        finds_bundled=True,
    ),
    "vllm": Engine(
        vllm.write,
        vllm.write_plain,
        {
            "model": "",
            "translated": "",
            "pard": "",
            "lookup": "",
            "suffix": "vLLM needs the package arctic-inference for suffix decoding",
            "mtp": "",
            "assistant": "",
            "eagle": "",
            "eagle3": "",
            "dflash": "",
            "dflash2": "",
            "dspark": "",
        },
        judges=(
            "model",
            "pard",
            "mtp",
            "assistant",
            "eagle",
            "eagle3",
            "dflash",
            "dflash2",
            "dspark",
        ),
        length=vllm.length,
    ),
    "sglang": Engine(
        sglang.write,
        sglang.write_plain,
        {
            "model": "",
            "lookup": "SGLang goes on after matches of every length, and in other requests' texts",
            "mtp": "",
            "assistant": "",
            "eagle": "",
            "eagle3": "",
            "dflash": "",
            "dflash2": "",
            "dspark": "",
        },
        trees=("mtp", "eagle", "eagle3"),
        judges=("mtp", "eagle", "eagle3", "dflash", "dflash2", "dspark"),
    ),
    "tensorrt-llm": Engine(
        tensorrt_llm.write,
        tensorrt_llm.write_plain,
        {
            "model": "",
            "pard": _NEW_TENSORRT,
            "lookup": "",
            "mtp": "",
            "eagle3": "",
            "dflash": _NEW_TENSORRT,
        },
        trees=("eagle3",),
        copies=tensorrt_llm.copies,
    ),
    "llama.cpp": Engine(
        llama_cpp.write,
        llama_cpp.write_plain,
        {
            "model": "",
            "lookup": "exactly {ngram} tokens are looked for, where specgen goes on to fewer",
            "mtp": _OWN_LAYERS,
            "assistant": _CONVERT_HEAD,
            "eagle3": _CONVERT_HEAD,
            "dflash": _CONVERT_HEAD,
            "dflash2": _CONVERT_HEAD,
            "dspark": _CONVERT_HEAD,
        },
        policies={
            "confidence": (
                "a token under p-min is dropped where specgen keeps it: drafts are one token "
                "shorter"
            ),
        },
        copies=llama_cpp.copies,
        length=llama_cpp.length,
        reads_gguf=True,
        names_gguf=True,
    ),
    "mlx": Engine(mlx.write, mlx.write_plain, {"model": ""}, refuses=mlx.refuses),
    "mlx-vlm": Engine(
        mlx.write_vlm,
        mlx.write_plain_vlm,
        {
            "mtp": "",
            "assistant": "",
            "eagle3": "",
            "dflash": _SHORTER_BLOCKS,
            "dflash2": _SHORTER_BLOCKS,
            "dspark": _SHORTER_BLOCKS,
        },
        refuses=mlx.refuses_vlm,
    ),
    "lmstudio": Engine(
        lmstudio.write,
        lmstudio.write_plain,
        {
            "model": _MODEL_KEYS,
            "mtp": _MODEL_KEYS,
            "dflash": _DSPARK_KEYS,
            "dflash2": _DSPARK_KEYS,
            "dspark": _DSPARK_KEYS,
        },
        policies={"confidence": _MODEL_KEYS},
        length=llama_cpp.length,
        reads_gguf=True,
    ),
    "ollama": Engine(
        ollama.write,
        ollama.write_plain,
        {
            "mtp": "the GGUF file has to hold the MTP layers",
            "assistant": _CONVERT_HEAD,
            "dflash": _CONVERT_HEAD,
            "dflash2": f"{_CONVERT_HEAD}; Ollama's llama.cpp has to know DFlash2",
        },
        length=llama_cpp.length,
        reads_gguf=True,
        names_gguf=True,
    ),
}
