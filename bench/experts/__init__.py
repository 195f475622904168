"""Mixtures of experts: the two grouped products and the whole layer, for each number of tokens.

`python -m weightonly.bench experts --out experts` compares `grouped_gemm` and `fused_experts` with one `gemm` for each
expert and with torch's bf16 grouped product.

    routing.py    which tokens go to which experts
    weights.py    the random weights of all experts, and the results that providers must give
    providers.py  what multiplies by them
    mixture.py    the rows of a mixture that is in memory
    measure.py    the cells, for ../runner.py
    tables.py     the tables
    train.py      gradients through a layer: `python -m weightonly.bench experts-train`
"""
