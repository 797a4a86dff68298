"""rackserve: serve agent sessions from a whole rack, and measure where the rack stands on its curve."""

__version__ = "0.1.0"
