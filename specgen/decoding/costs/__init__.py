"""The cost model: the times of forward passes and of rounds, PEARL's window, and the expected speedup. Imports no torch.

A round is one draft with the target pass that verifies it. Times are in seconds. Everywhere, c is the time of one target pass
divided by the time of one draft pass.
"""
