"""Floor 2: where a request goes.

Owns the router's knowledge: who holds how long a prefix (`index`), what is being computed (`promises`), what is booked
(`load`), the one cost all of it is weighed in (`cost`), the policies (`placement`) and admission (`limits`).
It knows keys and ranks, never tokens, tensors or clocks; nothing here is fresher than the last message received.
Law: the index may forget, but it never claims a block that the events it was given do not warrant.
"""
