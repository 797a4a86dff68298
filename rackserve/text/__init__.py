"""Floor 4: text to token ids and back.

Owns the tokenizer, the chat template, incremental detokenising and stop strings. No torch, no network, no event loop:
everything here is a plain call that may run on a worker thread.
Law: the text of a token sequence does not depend on how the tokens were grouped on the way.
"""
