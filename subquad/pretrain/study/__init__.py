"""Studies: one base recipe, named arms and seeds; every arm with every seed, a table and a plot."""
