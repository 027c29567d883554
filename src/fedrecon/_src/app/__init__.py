"""What the command line adds: settings, tasks, experiments, plots."""
