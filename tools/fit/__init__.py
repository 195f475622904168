"""Fits the constants of the cost model (heuristics/h200.py) to measurements: `python -m tools.fit`.

They call the functions that the selection calls: a family's work, and `cost.total_us`, of arrays.
"""
