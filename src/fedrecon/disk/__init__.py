"""Files and folders: arrays, runs, models, clients."""
