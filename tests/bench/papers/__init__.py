"""The claims of the four papers, and how each is measured. `reproduce.py` runs them."""
