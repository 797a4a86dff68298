"""Floor 5: replays recorded agent sessions against a rack, live or simulated, and measures what came back.

Owns the trace format, the scaled demo sessions, the closed-loop replay, the HTTP client, records, metrics and calibration.
The replay itself (`plan`, `streams`, `serial`) sees no clock and no socket: a driver tells it the time and what ended.
Nothing here may repair or leave out a result: a failure is a record with its kind.
Law: requests sent = done + failed + unfinished, and every token counted is the server's count.
"""
