"""How fast models read a prompt and write tokens, as ratios to the softmax teacher measured in the same call."""

from subquad.eval.speed.run import run_speed
from subquad.eval.speed.settings import SpeedSettings
from subquad.eval.speed.timings import Timing, timings_of

__all__ = ["SpeedSettings", "Timing", "run_speed", "timings_of"]
