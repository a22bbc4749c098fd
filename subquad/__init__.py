"""Turn a pretrained softmax Llama into a linear-time model: load, convert, distil, evaluate, use."""

__version__ = "0.1.0"
