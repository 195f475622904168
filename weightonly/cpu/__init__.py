"""Products on CPUs: which backend computes them.

native   kernels/cpu, our own vectorized C++: library.py loads it, native.py gives it a product, blocks.py says how the
         layouts of GPUs become the layout of CPUs, table.py which of its kernels computes what
pytorch  the equation in PyTorch (weightonly/reference.py), where the library was not built or is not wanted

The environment variable WEIGHTONLY_CPU chooses: "auto" (what is not set, too), "pytorch", or the most that the native
kernels may use of the machine: "generic", "avx2", "avx512", "amx".
"""
