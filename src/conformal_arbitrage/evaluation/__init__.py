"""What a rule would have done on a log: frontiers, costs, inspection, tables and figures."""
