"""The two files an exported checkpoint carries, so that `trust_remote_code=True` finds the installed subquad."""
