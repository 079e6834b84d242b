"""What runs inside every rank.

Each file can be copied alone with the siblings its docstring names.
"""
