"""Evaluation: what a rule would have done on a log, as frontiers, costs, inspections, tables and figures."""
