"""Programs for developers of weightonly, run from a checkout: `python -m tools.NAME`. They are in no wheel.

fuzz             random calls, damaged files and killed runs, against oracles
regret           the choice of a configuration beside every compiled one
regret_experts   the same of grouped products
fit              the constants of the cost model, from what those two measure
conversions      conversions of whole weights, beside a copy
published        tables and pictures of the documentation, from the committed measurements
models_tried     what becomes of every text architecture of transformers
tiny_models      these models, with small configs
peers            a plug-in of `weightonly.bench` with more providers
"""
