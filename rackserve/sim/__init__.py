"""Floor 4: the simulated host: a heap of events with integer nanoseconds, engines and stores that take modelled time.

It runs the production nodes unchanged, knows nothing of requests, and is the only place where faults are made up.
Law: same seed, configuration and code give the same event log, under any PYTHONHASHSEED.
"""
