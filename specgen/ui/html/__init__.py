"""Self-contained HTML pages of comparisons and recorded runs."""
