"""Measurements of subquad that are not tests: run them as scripts from a checkout."""
