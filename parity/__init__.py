"""The judge: cards, comparison rules, relations, mutants, reports and the command line."""
