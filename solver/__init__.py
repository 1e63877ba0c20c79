"""Solve, evaluate, export, and the command line."""
