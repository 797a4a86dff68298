"""What-ifs on racks nobody here owns: set-ups by name, grids of them, runs in processes, and what to make of the results.

It decides nothing that a rack decides: every figure comes from `simulated_rack`, whose nodes are those that serve.

Law: set-ups are compared seed by seed on the same sessions, and no figure goes without its interval or label.
"""
