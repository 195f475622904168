"""From the arguments of a call to its launches: which configuration computes them, and what each call of it needs.

choose.py makes a plan: it picks the configuration or says why there is none. tuned.py reads what `tune` measured.
cache.py keeps plans. base.py says what a plan is. kernel.py launches compiled kernels, unfused.py dequantizes and
leaves the product to cuBLAS, cpu.py computes on CPUs.
"""
