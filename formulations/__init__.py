"""The mathematics: cost formulas, candidates, bounds and the CP-SAT formulation."""
