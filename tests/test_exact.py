"""`--exact`: a token's logits have the same bits whichever tokens are run with it, so greedy
outputs are plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import MIXTURES, make_model, near_copy
from families import save as save_model
from native_models import load, make, save, variant
from static_checks import RecordedGraphs, random_model

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.compare.verdict import judge
from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.operators import Kernels
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.graphs import Captures
from specgen.engine.native.native_model import NativeModel, load_native

# Grouped heads or not, windows, no rotations, norms of queries and keys, capped scores, both kinds
# of norm, odd sizes.
CASES: list[tuple[str, int, dict[str, int]]] = [
    ("llama", 0, {"head_dim": 16}),
    ("gemma2", 0, {"head_dim": 8}),
    # torch has another operator for unpacked bfloat16 products of 16^3 multiplications
    ("qwen3", 1, {"hidden_size": 48}),
    ("llama", 3, {"num_attention_heads": 14, "hidden_size": 112}),
    ("mistral", 0, {}),
    ("gemma3_text", 2, {}),
    ("olmo2", 1, {}),
    ("smollm3", 2, {}),
]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
TYPES = [(dtype, pack) for dtype in (torch.float32, torch.bfloat16) for pack in (False, True)]


def random_ids(count: int) -> list[int]:
    rng = Random(3)
    return [rng.randrange(3, 96) for _ in range(count)]


def run(
    native: NativeModel, ids: Sequence[int], sizes: Sequence[int], prompt: int = 3
) -> torch.Tensor:
    """The logits after each token of `ids` from the prompt's last on, with drafts of these sizes,
    each after a rejected one."""
    runner = ModelRunner(native)
    context = Context(ids[:prompt])
    wrong = Random(str(sizes))
    found = []
    size_of = cycle(sizes)
    while len(context) < len(ids):
        draft = list(ids[len(context) : len(context) + next(size_of)])
        runner.logits(
            context,
            [
                *draft[: wrong.randrange(3)],
                *(wrong.randrange(3, 96) for _ in range(wrong.randrange(4))),
            ],
        )
        found.append(runner.logits(context, draft).logits[: len(draft)].clone())
        context.extend(draft)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("number", "count", "threads"),
    [
        pytest.param(
            number, *size, marks=() if number < 2 and size == (44, 1) else pytest.mark.slow
        )
        for number in range(len(CASES))
        for size in ((44, 1), (1100, 1), (1100, 2))
    ],
)
def test_logits_have_the_same_bits_for_drafts_of_any_length(
    tmp_path: Path, number: int, count: int, threads: int
) -> None:
    """On one thread and on two, weights packed or not; the longer texts and drafts reach further
    blocks of keys."""
    family, index, changes = CASES[number]
    save(
        make(
            variant(
                family,
                index,
                **{"intermediate_size": 320, "max_position_embeddings": 2048, **changes},
            )
        ),
        tmp_path,
    )
    ids = random_ids(count)
    all_sizes = ([2], [3], [5], [12], [33, 8], [41])
    all_sizes = (
        all_sizes if count < 100 else (*all_sizes, [131], [194], [509], [1050], [1, 7, 30, 2, 300])
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype, pack in TYPES:
            native = load(tmp_path, dtype, exact=True, pack=pack)
            first = run(native, ids, [1])
            for sizes in all_sizes:
                differing = (run(native, ids, sizes) != first).any(1).nonzero()[:, 0].tolist()
                assert not differing, (dtype, pack, sizes, differing[:5])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "index"), [("llama", 3), ("gemma2", 2)])
def test_a_draft_that_ends_in_another_block_of_keys_changes_no_bits(
    tmp_path: Path, family: str, index: int, dtype: torch.dtype
) -> None:
    """Also if the prompt is in the same pass: then the whole prompt is run with one more block of
    keys."""
    save(make(variant(family, index, max_position_embeddings=1024)), tmp_path)
    native = load(tmp_path, dtype, exact=True)
    ids = random_ids(524)
    one_by_one = run(native, [*ids, 0], [1], prompt=508)
    together = ModelRunner(native).logits(Context(ids[:508]), ids[508:]).logits
    assert torch.equal(together, one_by_one)


def test_captured_passes_of_one_width_give_equal_bits() -> None:
    """As on a GPU, where the prompt runs eagerly."""
    model = random_model("gemma2", torch.bfloat16)
    model.exact = True
    model.captures = Captures((16,), RecordedGraphs())
    ids = random_ids(524)
    one_by_one = run(model, ids, [1], prompt=500)
    assert torch.equal(run(model, ids, [12], prompt=500), one_by_one)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_chains_give_plain_decodings_tokens(tmp_path: Path, family: str, dtype: str) -> None:
    target = make_model(family, initializer_range=0.05)  # close logits: rounding would show
    folders = (
        save_model(target, tmp_path / "target"),
        save_model(near_copy(target, 0.3), tmp_path / "draft"),
    )
    methods: dict[str, dict[str, Any]] = {
        "sd": {"k": 5},
        "svip": {},
        "lookup": {},
        "selfsd": {"skip": "1"},
    }
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompt = [3 + 5 * at % 80 for at in range(7)]
    with specgen.load(*folders, device="cpu", dtype=dtype, backend="native", exact=True) as pair:
        expected = pair.generate(prompt, "ar", sampling).token_ids
        for name, settings in methods.items():
            pair.forget()
            assert pair.generate(prompt, name, sampling, **settings).token_ids == expected, name


TREE = [-1, -1, 0, 1, 1, 3, 2, 4, 5]  # the path 1, 3, 5, 8 among others


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "olmo2", "qwen3"])
def test_with_kernels_a_tree_gives_the_bits_of_its_chains(
    tmp_path: Path, family: str, threads: int
) -> None:
    save(make(variant(family, 0)), tmp_path)
    ids = random_ids(39)
    context = Context(ids[:30])
    drafted = ids[30:]
    path = [1, 3, 5, 8]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = ModelRunner(load(tmp_path, exact=True))
        tree = runner.logits(context, drafted, TREE).logits.clone()
        runner.clear_cache()
        chain = runner.logits(context, [drafted[node] for node in path]).logits
        assert torch.equal(tree[[0, *(node + 1 for node in path)]], chain)
    finally:
        torch.set_num_threads(before)


def native_of(
    family: str, folder: Path, quantise: str | None = None, **changes: Any
) -> NativeModel:
    """A random model that is stored in bfloat16. `quantise`: its weights are rounded to this."""
    save(make_model(family, **changes).to(torch.bfloat16), folder)
    architecture = read_architecture(read_config(folder, "the model"))
    return load_native(
        folder,
        "the model",
        architecture,
        torch.float32,
        torch.device("cpu"),
        exact=True,
        quantise=quantise,
    )


@needs_kernels
@pytest.mark.parametrize("quantise", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "lfm2"])
def test_with_kernels_a_prompt_has_the_same_bits_however_it_came_into_the_cache(
    tmp_path: Path, family: str, quantise: str | None
) -> None:
    """Run at once, after a part of another text, or by turns: logits and last states of the prompt
    and of a draft after it. Passes of many rows are computed in blocks of rows and of slots."""
    native = native_of(family, tmp_path, quantise, max_position_embeddings=512)
    ids = random_ids(309)
    prompt, draft = ids[:301], ids[301:]
    fresh = bits_after(ModelRunner(native), prompt, draft)
    for cut in (1, 39, 64, 131, 239, 300):
        of_another = ModelRunner(native)
        of_another.logits(Context([*prompt[:cut], *ids[: 61 - cut % 7]]))
        assert torch.equal(bits_after(of_another, prompt, draft), fresh), cut
        by_turns = ModelRunner(native)
        context = Context(prompt[:cut])
        by_turns.logits(context, draft)
        context.extend(prompt[cut : (cut + 301) // 2])
        by_turns.logits(context)
        assert torch.equal(bits_after(by_turns, prompt, draft), fresh), cut


def bits_after(runner: ModelRunner, prompt: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
    """The logits and the last states of a prompt's last token and of a draft's tokens."""
    output = runner.logits(Context(prompt), draft)
    assert output.hidden_states is not None
    return torch.cat((output.logits, output.hidden_states), 1).clone()


EXPERTS_AND_CONVOLUTIONS = [*MIXTURES, "lfm2", "lfm2_moe"]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "quantise"),
    [
        pytest.param(
            family,
            quantise,
            marks=() if quantise is None or family == "gemma4_text" else pytest.mark.slow,
        )
        for family in EXPERTS_AND_CONVOLUTIONS
        for quantise in (None, "int8")
    ],
)
def test_with_kernels_experts_and_convolutions_do_not_depend_on_the_pass(
    tmp_path: Path, family: str, quantise: str | None
) -> None:
    """In chains and in a tree."""
    native = native_of(family, tmp_path, quantise)
    ids = random_ids(70)
    one_by_one = run(native, ids, [1])
    for sizes in ([2], [3], [5, 1], [17], [67]):
        assert torch.equal(run(native, ids, sizes), one_by_one), sizes
    context = Context(ids[:30])
    drafted = ids[30:39]
    path = [1, 3, 5, 8]
    runner = ModelRunner(native)
    tree = runner.logits(context, drafted, TREE).logits.clone()
    runner.clear_cache()
    chain = runner.logits(context, [drafted[node] for node in path]).logits
    assert torch.equal(tree[[0, *(node + 1 for node in path)]], chain)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe"])
def test_with_kernels_exact_runs_experts_and_convolutions(tmp_path: Path, family: str) -> None:
    folder = save_model(make_model(family, tie_word_embeddings=False), tmp_path)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with specgen.load(folder, device="cpu", exact=True) as pair:
        assert pair.target.is_exact(in_trees=True)
        expected = pair.generate([5, 9, 7, 5, 9], "ar", sampling).token_ids
        for name in ("lookup", "suffix"):
            found = pair.generate([5, 9, 7, 5, 9], name, sampling, k=4).token_ids
            assert found == expected, name
    for dtype in ("bfloat16", "float32"):
        with pytest.MonkeyPatch.context() as patch:
            if dtype == "float32":
                patch.setattr("specgen.pair.loading.kernels_for", lambda *_: None)
            with pytest.raises(SpecgenError, match="--exact: without kernels in C, the bits of"):
                specgen.load(folder, device="cpu", dtype=dtype, exact=True)


def test_exact_is_refused_for_states_of_the_delta_rule(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3_5_text"), tmp_path)
    with pytest.raises(SpecgenError, match="whose layers keep states, depend on the passes"):
        specgen.load(folder, device="cpu", exact=True)


@needs_kernels
@pytest.mark.parametrize("name", ["sd", "sd:width=3", "lookup:k=3", "eesd-tree"])
def test_with_kernels_exact_runs_the_same_passes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is padded, and the prompt of another text is read from the cache as far as the two
    are the same."""
    counted: list[int] = []
    multiply = Kernels._into
    run = Kernels.run
    run_pass = Kernels.run_pass

    def recorded(
        kernels: Kernels, output: torch.Tensor, weight: Any, x: torch.Tensor, *rest: Any, **how: Any
    ) -> None:
        counted.append(len(x))
        multiply(kernels, output, weight, x, *rest, **how)

    def recorded_layers(kernels: Kernels, program: Any, hidden: torch.Tensor, *rest: Any) -> None:
        counted.extend([len(hidden)] * program.count)
        run(kernels, program, hidden, *rest)

    def recorded_pass(
        kernels: Kernels, program: Any, tokens: Any, segments: Any, *rest: Any
    ) -> Any:
        counted.append(len(tokens))
        return run_pass(kernels, program, tokens, segments, *rest)

    monkeypatch.setattr(Kernels, "_into", recorded)
    monkeypatch.setattr(Kernels, "run", recorded_layers)
    monkeypatch.setattr(Kernels, "run_pass", recorded_pass)
    method, *given = name.split(":")
    settings: dict[str, Any] = dict(parse_pairs(given))
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=1)
    rows = []
    texts = []
    for exact in (False, True):
        counted.clear()
        with specgen.load(device="cpu", exact=exact) as pair:
            texts.append(
                [
                    pair.generate(prompt, method, sampling, **settings).token_ids
                    for prompt in ("def mean(numbers):", "def mean(values):")
                ]
            )
        rows.append(list(counted))
    assert rows[0] == rows[1]
    assert texts[0] == texts[1]
    assert len(rows[0]) > 10


@needs_kernels
def test_with_kernels_no_tie_is_allowed_in_trees() -> None:
    with specgen.load(device="cpu", exact=True) as pair:
        assert pair.target.is_exact(in_trees=True)
    with specgen.load(device="cpu", dtype="bfloat16", exact=True) as pair:
        assert pair.target.is_exact(in_trees=False)
        assert not pair.target.is_exact(in_trees=True)
    with specgen.load(device="cpu") as pair:
        assert not pair.target.is_exact(in_trees=False)


def test_no_difference_between_exact_outputs_is_a_tie() -> None:
    target = SimpleNamespace(
        reference_logits=lambda *_: torch.tensor([1.0, 1.0, 0.0]),
        dtype_name="bfloat16",
        files=SimpleNamespace(experts=None),
    )
    pair: Any = SimpleNamespace(target=target)
    rounding = judge(pair, 0, 0, [1], [0], [1])
    bug = judge(pair, 0, 0, [1], [0], [1], exact=True)
    assert rounding is not None
    assert bug is not None
    assert (rounding.is_broken, bug.is_broken) == (False, True)
    assert judge(pair, 0, 0, [1], [0], [0], exact=True) is None
    chains = {
        written
        for written in ("sd:k=3", "pearl", "eesd", "eesd-tree", "transformers")
        if parse_spec(written).drafts_chains
    }
    assert chains == {"sd:k=3", "pearl", "eesd"}


def test_exactness_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecgenError, match="--exact needs the native backend"):
        specgen.load(exact=True, device="cpu", backend="transformers")
    monkeypatch.setattr("specgen.pair.loading.pick_device", lambda _: torch.device("mps"))
    with pytest.raises(
        SpecgenError,
        match=r"--exact is for the CPU and for one CUDA device, and the target would run on mps",
    ):
        specgen.load(exact=True)
