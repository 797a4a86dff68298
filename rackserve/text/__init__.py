"""Floor 4: text to token ids and back.

Owns tokenizers, prompts kept between turns, chat templates, incremental detokenising, stop strings, the markup of
DeepSeek-V4.1 and of Hermes, parsers of answers, and constraints on output. No torch, no network, no event loop: a plain call
that may run on a worker thread.
Law: the text of a token sequence does not depend on how the tokens were grouped on the way.
"""
