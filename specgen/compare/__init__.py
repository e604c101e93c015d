"""The comparison of decoding methods: reads prompts, runs each method on them, and computes
speedups and output differences."""
