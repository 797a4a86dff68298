"""Floor 5: replays recorded agent sessions against a rack, live or simulated, and measures what came back.

Owns trace formats, synthetic and demo sessions, replay plans, the HTTP client, records, metrics and calibration.
A plan (`closed_loop`, `open_loop`, `serial`) sees no clock and no socket: a driver tells it the time and what ended.
Nothing here may repair or leave out a result: a failure is a record with its kind.
Law: requests sent = done + failed + unfinished, and every token counted is the server's count.
"""
