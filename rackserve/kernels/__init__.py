"""Fast code below the models: what a step is made of, per kind of machine. No decisions, no protocol.

Law: every kernel gives each row of its result the same bits whatever else is computed beside it.
"""
