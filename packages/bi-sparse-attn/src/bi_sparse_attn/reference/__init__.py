"""Exact references: the specification of every op, in pure torch, shipped with the package.

They take checked arguments. What only the data can show (an index out of range, a slot used twice) is checked here,
before anything is written.
"""
