"""Floor 4: text to token ids and back.

Owns tokenizers, chat templates, incremental detokenising, stop strings, and the markup of DeepSeek-V4.1: its prompts and the
parser of its reasoning and tool calls. No torch, no network, no event loop: a plain call that may run on a worker thread.
Law: the text of a token sequence does not depend on how the tokens were grouped on the way.
"""
