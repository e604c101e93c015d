"""Mistakes in the commands and in comparisons that the default tests must notice; see `mutants.py`."""

from __future__ import annotations

from mutants import Selection, mutants

COMPARE = Selection("test_compare.py")
PROMPTS = Selection("test_compare_prompts.py")
CLI = Selection("test_cli.py")
INTERRUPTS = Selection("test_interrupts.py")
FILES = Selection("test_files.py")
BAD_INPUTS = Selection("test_bad_inputs.py")
PREDICTIONS = Selection("test_compare.py", "predict")
SAFE_TEXT = Selection("test_safe_text.py")
SIMULATED = Selection("test_simulator.py", "drawn or priced or twice or shape or longer")

COMMAND_MUTANTS = [
    *mutants(
        "compare/results.py",
        COMPARE,
        ("compare: the slowest repeat counts", "(len(own) - 1) // 2]", "len(own) - 1]"),
        ("compare: the speedup is the reference's", "(sums[..., 2] / sums[..., 3])", "(sums[..., 3] / sums[..., 2])"),
        ("compare: the interval's ends are swapped", "float(edges[0]), float(edges[1])", "float(edges[1]), float(edges[0])"),
        ("compare: the interval is of 50 %", "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]", "[0.25, 0.75]"),
        ("compare: prompts of one method alone count", "if all((written, *pair) in self.runs for written in running)", "if True"),
        ("compare: a lossy method may be the best", "if each.spec.lossless and not each.broken", "if not each.broken"),
        ("compare: a wrong output may be the best", "each.spec.lossless and not each.broken and", "each.spec.lossless and"),
        ("compare: the slowest is listed first", "return kind, -(result.speedup or 0.0)", "return kind, result.speedup or 0.0"),
        ("compare: every method is as fast as the best", "(result.high or 0.0) >= (top", "(result.high or 0.0) >= 0 * (top"),
        (
            "compare: sampled outputs are compared",
            "if config.sampling.greedy and spec.lossless else None",
            "if spec.lossless else None",
        ),
    ),
    *mutants(
        "compare/verdict.py",
        COMPARE,
        (
            "compare: an output that ends early is equal",
            "range(shorter) if reference[position] != other[position]), shorter)",
            "range(shorter) if reference[position] != other[position]), None)",
        ),
        ("compare: each difference is a tie", "threshold = 0.0 if exact else", "threshold = 1e9 if exact else 1e9 +"),
        ("compare: a tied prompt counts as identical", "prompts - len(broken) - len(tied)", "prompts - len(broken)"),
        (
            "compare: each tie is broken too",
            "{found.prompt_index for found in differences} - broken",
            "{found.prompt_index for found in differences}",
        ),
    ),
    *mutants(
        "compare/runner.py",
        COMPARE,
        (
            "compare: each method draws its own seed",
            'self.seeds.setdefault((prompt.index, repeat), derive_seed(self._seed, f"prompt {prompt.index} repeat {repeat}"))',
            'derive_seed(self._seed, f"{spec.written} {prompt.index} {repeat}")',
        ),
        ("compare: caches are kept between methods", "        self.pair.forget()\n", ""),
        (
            "compare: a method's error ends the comparison",
            "if spec.written != REFERENCE:\n            self.results.failures",
            "if False:\n            self.results.failures",
        ),
        (
            "compare: later turns have no history",
            "ids = self.pair.tokenizer.encode(history + prompt.text)",
            "ids = self.pair.tokenizer.encode(prompt.text)",
        ),
    ),
    *mutants(
        "compare/resume.py",
        COMPARE,
        (
            "resume: other settings are taken",
            'if name not in ("seed", "stop") and before.get(name) != value',
            'if name == "versions" and before.get(name) != value',
        ),
        (
            "resume: interrupted runs count",
            'if traced.summary is None or traced.finish_reason == "interrupted":',
            "if traced.summary is None:",
        ),
        ("resume: the seeds are forgotten", 'runner.seeds[prompt.index, repeat] = start["sampling"]["seed"]', "pass"),
        ("resume: other prompts are taken", 'if start["prompt_ids"] != runner.prompt_ids(prompt):', "if False:"),
    ),
    *mutants(
        "compare/prompts.py",
        PROMPTS,
        ("prompts: the limit takes the first category's", "return sorted(taken[:limit]", "return sorted(list(questions)[:limit]"),
        ("prompts: comparisons take those for tuning", "if turns[0].for_tuning == for_tuning", "if True"),
    ),
    *mutants(
        "compare/columns.py",
        SAFE_TEXT,
        (
            "CSV: a formula is computed by a spreadsheet",
            r"""return _FORMULA.sub(r"\1'", one_line(text))""",
            "return one_line(text)",
        ),
    ),
    *mutants(
        "compare/predictions.py",
        PREDICTIONS,
        ("predictions: drafting is free", "sum(length * draft_seconds + costs", "sum(0 * draft_seconds + costs"),
    ),
    *mutants(
        "cli/error_reporting.py",
        INTERRUPTS,
        ("command line: every error exits with 1", "code = error.exit_code", "code = 1"),
    ),
    *mutants(
        "cli/error_reporting.py",
        CLI,
        ("command line: Ctrl-C exits with 0", "code = INTERRUPTED\n        except OSError", "code = 0\n        except OSError"),
        (
            "command line: a closed pipe is an error",
            "if isinstance(error, BrokenPipeError):\n            return 0",
            "if isinstance(error, BrokenPipeError):\n            return 1",
        ),
    ),
    *mutants(
        "tune/simulator.py",
        SIMULATED,
        (
            "tune: a drawn draft is accepted as if it were the output's",
            "device=generator.device) >= chance",
            "device=generator.device) > 9",
        ),
        ("tune: rejected tokens are drawn from q", "(probs - of_target).clamp_min(0)", "probs"),
        ("tune: PEARL's overhead is free", "waiting + self._costs.synchronisation_overhead", "waiting"),
        (
            "tune: the target waits for no draft",
            "max(0.0, self.seconds - self._lead_seconds -",
            "0 * max(0.0, self.seconds - self._lead_seconds -",
        ),
        ("tune: a shape's costs are not corrected", "probe.costs.times(earlier / now.at(1))", "probe.costs"),
        (
            "tune: a pass costs what one token costs",
            "verification_cost.at(len(draft) + 1, len(context))",
            "verification_cost.at(1, len(context))",
        ),
    ),
]
