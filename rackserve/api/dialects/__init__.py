"""The HTTP dialects that agents speak: each turns a body into an `Ask` and deltas into its own JSON and events.

No tokens, no rack, no event loop in here. Law: what a stream shows, joined, is what the plain answer shows.
"""
