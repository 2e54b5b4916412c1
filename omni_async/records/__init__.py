"""Holds the records of a run: `write` records a run as it trains, `read` reads the folder of any run."""
