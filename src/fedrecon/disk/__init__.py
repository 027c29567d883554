"""Everything that is written to disk: arrays, runs, models, client folders."""
