"""transformers: models that are quantized while they load, and checkpoints of other quantizers as running models.

Importing this module registers the quantization method "weightonly" with transformers, and `weightonly.nn.Linear` with
PEFT where that is installed:

    import weightonly.hf
    from weightonly.hf import WeightOnlyConfig

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=WeightOnlyConfig(format="int4"))
    model.save_pretrained(packed)
    model = AutoModelForCausalLM.from_pretrained(packed)
    model = weightonly.hf.load_model(folder_of_awq_gptq_or_others)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
"""

import logging
from importlib.util import find_spec

from ._versions import why_not  # the first: it says which transformers is needed, where the others cannot be imported
from .config import WeightOnlyConfig
from .loader import load_model
from .quantizer import WeightOnlyQuantizer

if find_spec("transformers.distributed") and find_spec("transformers.distributed.parallel_utils"):
    from . import parallel as _parallel

    _parallel.register()
if (_reason := why_not("peft")) is None:
    from . import peft as _peft

    _peft.register()
else:
    logging.getLogger("weightonly").info("PEFT does not know weightonly.nn.Linear: %s", _reason)

__all__ = ["WeightOnlyConfig", "WeightOnlyQuantizer", "load_model"]
