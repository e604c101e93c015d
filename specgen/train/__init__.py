"""Training of exit layers, acceptance predictors and distilled draft models."""
