"""What people read of a run: terminal output, page, statements, data frames and curves."""
