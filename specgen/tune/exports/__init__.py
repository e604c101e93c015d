"""Exports tuned settings to other inference engines. Imports no torch.

`engines` is the table of the engines, and of what each of them runs; a module for each engine
writes its options. `choice` chooses the method to export, and says what an engine lacks.
"""
