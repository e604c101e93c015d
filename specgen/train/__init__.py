"""Training of exit layers, acceptance predictors, heads and distilled draft models."""
