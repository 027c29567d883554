"""What people see while they wait: progress, and text laid out as a table."""
