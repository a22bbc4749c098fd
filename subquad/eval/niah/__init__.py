"""Needle in a haystack: can a model find a key that stands far back in its prompt?"""

from subquad.eval.niah.cells import Cell, Group, cells_of, group_cells, paired_differences
from subquad.eval.niah.plots import plot_difference, plot_heatmap, write_niah_plots
from subquad.eval.niah.prompts import NiahPrompt, PromptSet, build_prompts
from subquad.eval.niah.run import run_niah
from subquad.eval.niah.settings import NiahSettings, default_lengths
from subquad.eval.niah.stats import wilson_interval
from subquad.eval.niah.tables import NiahTable, axis_table, difference_table

__all__ = [
    "Cell",
    "Group",
    "NiahPrompt",
    "NiahSettings",
    "NiahTable",
    "PromptSet",
    "axis_table",
    "build_prompts",
    "cells_of",
    "default_lengths",
    "difference_table",
    "group_cells",
    "paired_differences",
    "plot_difference",
    "plot_heatmap",
    "run_niah",
    "wilson_interval",
    "write_niah_plots",
]
