"""Training of what drafts: exit layers, predictors and distilled draft models."""
