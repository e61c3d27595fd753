"""Version of the package; RL trainers branch on it, so it stays above 0.5.12."""

__version__ = "0.6.0"
