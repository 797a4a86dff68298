"""Floor 5: the OpenAI-compatible HTTP front end.

Owns the wire format, validation, streaming, cancellation by clients, metrics and health. It decides nothing about where or
when a request runs: the gateway hands values to the frontend node and gets values back.
Law: one path makes every answer. A plain answer is the joined stream, and usage has one author.
"""
