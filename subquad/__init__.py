"""Turn a pretrained softmax Llama into a linear-time model: load, convert, distil, evaluate, use.

Importing this package registers its model classes with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained` loads a converted checkpoint.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"

# Registering costs several seconds of imports. The command `subquad` skips it, so that `--help` and wrong usage
# answer at once; its commands import what they need.
if Path("".join(sys.argv[:1])).stem != "subquad":
    import subquad.models  # noqa: F401
