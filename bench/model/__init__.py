"""Whole models: tokens a second of transformers' own classes, with random weights of real shapes.

`python -m weightonly.bench model --shapes llama3-8b --out models` measures decoding, prompts, LoRA training and overlap
of launches for each provider, one model in memory at a time.

    providers.py  what quantizes a decoder layer, in place
    build.py      a model, made and quantized layer by layer
    decoder.py    its decode step and its prompts, on a static cache
    training.py   a LoRA training step
    rows.py       the rows of a model that is in memory
    measure.py    the cells, for ../runner.py
    tables.py     the tables and the picture
"""
