"""Engram, the n-gram memory: rows of huge tables, chosen by a hash of the last few tokens and added to the stream.

Owns which rows a token needs (`vocabulary`, `ngrams`), where rows lie and how they are reached (`tables`, `links`, `sockets`),
and their fetching beside the computation (`hot_rows`, `reader`). Must not know requests, sequences or batch slots: what it
needs of the past is given with the tokens.
Law: rows are those of the whole table, whoever holds them, or an error within a limit; never zeros, never a hang.
"""
