"""The cost model: what passes and rounds cost, PEARL's window, and the speedup to expect. Pure arithmetic, imports no torch.

Times are seconds. c is the time of a target pass over that of a draft pass, everywhere.
"""
