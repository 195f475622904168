"""Which kernel runs: a list of configurations, what is legal for a problem, and what is cheapest.

Standard library only, so that the build (kernels/generate.py) and machines without torch can import it.
"""

from .configs import KernelConfig
from .legal import candidates, legal
from .problem import Problem
from .select import select

__all__ = ["KernelConfig", "Problem", "candidates", "legal", "select"]
