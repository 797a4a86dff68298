"""Floor 5: `rackserve route`, the router, index and admission in front of OpenAI-compatible workers that others wrote.

Owns what such workers lack: their KV events translated into key chains (`ledger`, `feed`), records of what was sent where
(`records`), the decision (`placer`, the production placement), and the way of a request there and back (`forward`, `pairs`).
It never reads tokens out of an answer nor changes a byte of it, and repeats a request only before its first byte.
Law: what is booked for a request is released exactly once, whatever path, error or hang-up ends it.
"""
