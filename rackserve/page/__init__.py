"""The web page: a chat and the rack at work, served by the server itself from files that come with the package.

Owns the static files, the form that asks for a key, and what the page is told of the rack. May not decide, hold KV or know
prompts: it sees recorded events and states, and a browser talks to the same routes as every other client.
Law: nothing that a model or a request said becomes markup, and the page fetches nothing from anywhere else.
"""
